"""Which LMI system a configuration is written for: from engine, entry point and rolling batch.

Source: DJL-Serving's ModelInfo.java, LmiUtils.java and PyModel.java.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lmi_core.config.artefacts.handler import Handler
from lmi_core.config.artefacts.model_files import ModelFiles
from lmi_core.config.sources.merge import Values

_NEURON = "djl_python.transformers_neuronx"
_BY_ENTRY_POINT = {
    "djl_python.deepspeed": "deepspeed",
    "djl_python.fastertransformer": "fastertransformer",
    _NEURON: "neuronx",
    "djl_python.transformers-neuronx": "neuronx",
    "djl_python.tensorrt_llm": "trtllm",
    "djl_python.stable_diffusion": "stable_diffusion",
    "djl_python.stable-diffusion": "stable_diffusion",
    "djl_python.lmi_vllm.vllm_async_service": "vllm",
    "djl_python.lmi_trtllm.trtllm_async_service": "trtllm",
}
_BY_ROLLING_BATCH = {
    "scheduler": "scheduler",
    "lmi-dist": "lmi_dist",
    "vllm": "vllm",
    "trtllm": "trtllm",
    "deepspeed": "deepspeed",
    "tnx": "neuronx",
    "neuron": "neuronx",
}
FEATURES = ("trtllm", "lmi-dist", "vllm", "tnx")
"""Libraries that images name; Neuron's decides nothing here."""
_ALIASES = {
    "DeepSpeed": "djl_python.deepspeed",
    "FasterTransformer": "djl_python.fastertransformer",
}
# On Neuron devices with a degree of parallelism their models get Neuron's entry point.
_BY_DEVICE = frozenset({"accelerate", "common", "lmi_dist", "scheduler"})
HUGGING_FACE = "djl_python.huggingface"
ENTRY_POINTS = (HUGGING_FACE, *_BY_ENTRY_POINT)
"""Built-in handlers that there are."""
_LMI_DIST = re.compile(
    "falcon|gpt-neox|t5|llama|mpt|gpt-bigcode|aquila|baichuan|bloom|chatglm|deci|gemma|gpt2|gptj|"
    "internlm2|mistral|mixtral|opt|phi|qwen|qwen2|stablelm|dbrx|starcoder2"
)
"""Types of models that its container gives to LMI-Dist."""


@dataclass(frozen=True, slots=True)
class WrittenFor:
    """The system, why, and what the engine's alias expands to."""

    system: str
    reason: str
    entry_point: str
    mpi_mode: bool
    handler: Handler | None = None


def written_for(
    values: Values,
    files: ModelFiles,
    handler: Handler | None,
    *,
    tgi: bool,
    on_neuron: bool = False,
    features: Sequence[str] = (),
) -> WrittenFor:
    """Tell which system's rules and defaults a configuration follows.

    A ``handler`` that has formatters only leaves the requests to the built-in one. ``on_neuron``
    says that the host's devices are Neuron's; ``features`` are the container's libraries.
    """
    engine = values.get("engine")
    given = values.get("option.entryPoint")
    mpi_mode = values.get("option.mpi_mode") is True or engine in ("MPI", *_ALIASES)
    if handler is not None and handler.handle is not None:
        reason = f"{handler.path.name} answers the requests"
        return WrittenFor("common", reason, handler.path.name, mpi_mode, handler)
    entry_point = str(given or _ALIASES.get(str(engine), HUGGING_FACE))
    system, reason = _system(values, files, entry_point, engine, tgi, features)
    if on_neuron and given is None and handler is None and system in _BY_DEVICE:
        degree = values.get("option.tensor_parallel_degree")
        if degree == "max" or (isinstance(degree, int) and degree > 0):
            reason = f"option.tensor_parallel_degree={degree}"
            return WrittenFor("neuronx", reason, _NEURON, mpi_mode)
    return WrittenFor(system, reason, entry_point, mpi_mode, handler)


def _system(
    values: Values,
    files: ModelFiles,
    entry_point: str,
    engine: object,
    tgi: bool,
    features: Sequence[str],
) -> tuple[str, str]:
    rolling_batch = values.get("option.rolling_batch")
    if entry_point in _BY_ENTRY_POINT:
        cause = f"engine={engine}" if engine in _ALIASES else f"option.entryPoint={entry_point}"
        return _BY_ENTRY_POINT[entry_point], cause
    if files.is_diffusion:
        return "stable_diffusion", "the model is a diffusion pipeline"
    if rolling_batch in _BY_ROLLING_BATCH:
        return _BY_ROLLING_BATCH[str(rolling_batch)], f"option.rolling_batch={rolling_batch}"
    if tgi:
        return "tgi", "launcher flags or variables"
    if rolling_batch == "disable":
        return "accelerate", "option.rolling_batch=disable"
    by_features = _by_features(values, files, features, is_mpi=engine == "MPI")
    if by_features:
        return by_features, f"SERVING_FEATURES={','.join(features)}"
    if engine == "MPI" and rolling_batch == "auto":
        return "lmi_dist", "engine=MPI with option.rolling_batch=auto"
    if "option.entryPoint" in values.known or "option.device_map" in values.known:
        return "accelerate", f"option.entryPoint={entry_point}"
    return "common", "no key names another engine"


def _by_features(
    values: Values, files: ModelFiles, features: Sequence[str], *, is_mpi: bool
) -> str | None:
    """The system that the container's libraries serve generative models with, if no key names one
    and requests aren't batched by hand.

    Source: DJL-Serving's LmiUtils.java.
    """
    size = values.get("batch_size")
    if not files.is_generative or (isinstance(size, int) and size > 1):
        return None
    if "trtllm" in features:
        return "trtllm"
    if "lmi-dist" in features:
        is_known = files.model_type is None or bool(_LMI_DIST.fullmatch(files.model_type))
        return "lmi_dist" if is_known or is_mpi else "scheduler"
    return "vllm" if "vllm" in features else None
