"""Which backend serves a model, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from lmi_core.config.artefacts.model_files import ModelFiles
from lmi_core.config.problem import Problems
from lmi_core.config.sources.merge import Values
from lmi_core.config.system import WrittenFor
from lmi_core.config.table.capabilities import BACKENDS
from lmi_core.config.table.common import TASKS
from lmi_core.config.targets.host import Host
from lmi_core.models.registry import supported_architectures
from lmi_core.weights.hf_config import PURPOSES, Task

_RETIRED = {
    "deepspeed": "DeepSpeed",
    "fastertransformer": "FasterTransformer",
    "lmi_dist": "LMI-Dist",
    "neuronx": "Transformers-NeuronX",
}
_DECIDING = (
    "option.entryPoint",
    "option.rolling_batch",
    "engine",
    "option.task",
    "option.tensor_parallel_degree",
)
_WANTED = {"vllm": "vllm", "trtllm": "trtllm"}


@dataclass(frozen=True, slots=True)
class Decision:
    """The backend's name and the reason in words.

    ``missing``: how the package that it needs is installed, if it isn't; ``stand_in``: whether our
    engine knows the model, too.
    """

    backend: str
    reason: str
    key: str | None = None
    """What names the backend."""
    missing: str = ""
    stand_in: bool = False

    def refusal(self, way_out: str = "") -> str:
        """Say that the package is missing, and the other ``way_out`` beside installing it."""
        title = BACKENDS[self.backend].title
        return f"{self.reason}: {title} is not installed: {self.missing}{way_out}"


def dispatch(
    written: WrittenFor,
    values: Values,
    files: ModelFiles,
    host: Host,
    problems: Problems,
    *,
    prefer_native: bool = False,
) -> Decision:
    """Choose the backend; one that isn't installed is for the caller to refuse or to replace."""
    handler = written.handler
    if handler is not None and handler.handle is not None:
        return Decision("handler", written.reason)
    if written.system == "stable_diffusion":
        problems.error(
            values.where("option.entryPoint"),
            "image generation is not served here; use another server for diffusion models",
            "option.entryPoint",
        )
        return Decision("lmi", written.reason)
    wanted = _wanted(written, values, files, host)
    if wanted.backend == "lmi":
        return wanted
    if prefer_native and _can_be_native(values, files):
        return Decision("lmi", f"--prefer-native instead of {BACKENDS[wanted.backend].title}")
    if wanted.backend != "transformers" or _generates(wanted, values, files, problems):
        wanted = _with_package(wanted, written, values, files, host)
    if handler is not None and wanted.backend != "transformers" and not wanted.missing:
        problems.error(
            str(handler.path),
            f"{handler.path.name} has formatters, which only our own engine can use; "
            f"{wanted.reason} needs {BACKENDS[wanted.backend].title}",
        )
    return wanted


def _wanted(written: WrittenFor, values: Values, files: ModelFiles, host: Host) -> Decision:
    system = written.system
    if system in ("neuronx", "vllm") and host.num_neuron_cores:
        return Decision("neuron", f"{written.reason} on {host.num_neuron_cores} Neuron cores")
    if system in _WANTED:
        return Decision(_WANTED[system], written.reason)
    task = values.get("option.task")
    if task is not None and task not in TASKS:
        return Decision("transformers", f"option.task={task}")
    if files.architecture is not None and files.architecture not in supported_architectures():
        reason = f"the lmi engine has no description of {files.architecture}"
        return Decision("transformers", reason)
    if files.unsupported is not None:
        return Decision("transformers", f"the lmi engine doesn't have this: {files.unsupported}")
    if values.get("option.force_padded") is True:
        key = "option.force_padded"
        return Decision("transformers", f"{key}=true", key)
    return Decision("lmi", _native_reason(written, files, TASKS.get(str(task), "auto")))


def _native_reason(written: WrittenFor, files: ModelFiles, asked: str) -> str:
    parts = [written.reason]
    if written.system in _RETIRED:
        parts.append(f"{_RETIRED[written.system]} is retired, its keys map onto the lmi engine")
    elif written.system == "scheduler":
        parts.append("the lmi engine batches without padding")
    if files.architecture is None:
        parts.append("the architecture is checked once the model is here")
    else:
        parts.append(files.architecture)
    task = files.task if asked == "auto" else cast(Task, asked)
    if task != "generate":
        parts.append(f"served for {PURPOSES[task]}")
    return "; ".join(parts)


def _can_be_native(values: Values, files: ModelFiles) -> bool:
    if values.get("option.force_padded") is True:
        return False
    task = values.get("option.task")
    known = files.architecture is None or files.architecture in supported_architectures()
    return known and files.unsupported is None and (task is None or task in TASKS)


def _with_package(
    wanted: Decision, written: WrittenFor, values: Values, files: ModelFiles, host: Host
) -> Decision:
    """The decision, and what it needs that isn't installed."""
    backend = BACKENDS[wanted.backend]
    if backend.package is None or backend.package in host.packages:
        return wanted
    return replace(
        wanted,
        key=wanted.key or _deciding_key(written, values),
        missing=backend.installation,
        stand_in=_can_be_native(values, files),
    )


def _generates(wanted: Decision, values: Values, files: ModelFiles, problems: Problems) -> bool:
    """Whether the model generates text, as far as its files tell; else that is an error.

    Names of architectures that come with their own code tell nothing.
    """
    if files.is_generative or values.get("option.trust_remote_code") is True:
        return True
    key = "option.model_id"
    problems.error(
        values.where(key),
        f"{wanted.reason}, and {files.architecture} doesn't generate text, by its name: "
        "Transformers models are served here if they do (ForCausalLM, LMHeadModel, "
        "ForConditionalGeneration)",
        key,
    )
    return False


def _deciding_key(written: WrittenFor, values: Values) -> str | None:
    for key in _DECIDING:
        if key in values.known and f"{key}={values.get(key)}" in written.reason:
            return key
    return None
