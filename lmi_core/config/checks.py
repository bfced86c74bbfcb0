"""Rules that tie several keys together, per system (djl_python/properties_manager)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmi_core.config.artefacts.model_files import ModelFiles
from lmi_core.config.paths import is_dir
from lmi_core.config.problem import Problems
from lmi_core.config.sources.merge import Values
from lmi_core.config.system import ENTRY_POINTS, WrittenFor
from lmi_core.config.table.accelerate import NATIVE_QUANTIZE

_TNX_KEYS = (
    "fuse_qkv",
    "collectives_layout",
    "on_device_embedding",
    "load_in_8bit",
    "quantize",
    "load_split_model",
    "compiled_graph_path",
    "context_length_estimate",
)


@dataclass(frozen=True, slots=True)
class Subject:
    """What a rule looks at."""

    values: Values
    written: WrittenFor
    files: ModelFiles
    problems: Problems

    def option(self, name: str) -> object:
        """Return the value of ``option.<name>``, or None."""
        return self.values.get(f"option.{name}")

    def error(self, key: str, message: str) -> None:
        """Note an error at the place that set ``key``."""
        self.problems.error(self.values.where(key), message, key)

    def warn(self, key: str, message: str) -> None:
        """Note a warning at the place that set ``key``."""
        self.problems.warn(self.values.where(key), message, key)

    def ignore(self, key: str, why: str) -> None:
        """Warn that ``key`` doesn't count."""
        self.warn(key, why)
        self.values.ignored[key] = why


Rule = Callable[[Subject], None]


def check(subject: Subject) -> None:
    """Run the rules of the system that the configuration is written for, and the common ones."""
    for rule in (*_COMMON, *_BY_SYSTEM.get(subject.written.system, ())):
        rule(subject)


def _choices(subject: Subject) -> None:
    """Values that another system knows are impossible in this one."""
    system = subject.written.system
    for value in subject.values.known.values():
        allowed = value.option.choices.get(system)
        if allowed is None or not isinstance(value.value, str) or value.value in allowed:
            continue
        key = value.option.key
        if system == "deepspeed" and key == "option.quantize":
            continue
        subject.error(
            key,
            f"{key}={value.shown} is not one of {', '.join(allowed)} ({subject.written.reason})",
        )


def _static_batching(subject: Subject) -> None:
    size = subject.values.get("batch_size")
    if not isinstance(size, int) or size <= 1 or subject.option("rolling_batch") != "disable":
        return
    if subject.option("enable_streaming") in ("true", "huggingface"):
        subject.error(
            "batch_size",
            f"batch_size={size} can't stream: set option.enable_streaming=false or batch_size=1",
        )


def _queue(subject: Subject) -> None:
    queue = subject.values.get("job_queue_size")
    batch = subject.option("max_rolling_batch_size")
    if isinstance(queue, int) and isinstance(batch, int) and queue < batch:
        subject.warn(
            "job_queue_size",
            f"job_queue_size={queue} is below option.max_rolling_batch_size={batch}; a full batch "
            "can't be waiting",
        )


def _prompt_fits(subject: Subject) -> None:
    names = ["max_model_len", "max_tokens", "n_positions", "ctx_size"]
    names += [] if subject.written.system == "tgi" else ["max_total_tokens"]  # which it checks
    for key in ("max_input_tokens", "max_input_len"):
        prompt = subject.option(key)
        for name in names:
            length = subject.option(name)
            if isinstance(prompt, int) and isinstance(length, int) and 0 < length <= prompt:
                subject.error(
                    f"option.{key}",
                    f"option.{key}={prompt} leaves no room for an answer within "
                    f"option.{name}={length}; make it smaller",
                )


def _entry_point(subject: Subject) -> None:
    given = str(subject.option("entryPoint") or "")
    if given.startswith("djl_python.") and given not in ENTRY_POINTS:
        subject.error(
            "option.entryPoint",
            f"option.entryPoint={given[:80]} is no built-in handler; there are "
            f"{', '.join(ENTRY_POINTS)}",
        )


def _mpi(subject: Subject) -> None:
    engine, system = subject.values.get("engine"), subject.written.system
    if system == "lmi_dist" and engine == "Python" and not subject.written.mpi_mode:
        subject.warn(
            "engine", "LMI-Dist refuses engine=Python; nothing here needs MPI, so it works"
        )
    if system == "vllm" and engine not in (None, "Python"):
        subject.warn("engine", f"vLLM refuses engine={engine}; write engine=Python")


def _lmi_dist(subject: Subject) -> None:
    if subject.option("enable_lora") is True and subject.option("speculative_draft_model"):
        subject.error(
            "option.speculative_draft_model",
            "option.enable_lora and option.speculative_draft_model can't be used together; remove "
            "one",
        )
    if subject.option("dtype") == "int8" and subject.option("quantize"):
        subject.error(
            "option.dtype",
            "option.dtype=int8 means option.quantize=bitsandbytes, but option.quantize="
            f"{subject.option('quantize')} is given as well; remove one",
        )


def _int8_dtype(subject: Subject) -> None:
    allowed = ("lmi_dist", "deepspeed", "accelerate", "scheduler", "common", "tgi")
    if subject.option("dtype") == "int8" and subject.written.system not in allowed:
        subject.error("option.dtype", "option.dtype=int8 is for LMI-Dist; write option.quantize")


def _scheduler(subject: Subject) -> None:
    if subject.files.is_encoder_decoder:
        subject.error(
            "option.rolling_batch",
            f"option.rolling_batch=scheduler can't serve {subject.files.architecture}: it takes "
            "decoder models only",
        )


def _deepspeed(subject: Subject) -> None:
    quantize = subject.option("quantize")
    if quantize not in (None, "dynamic_int8", *NATIVE_QUANTIZE):
        subject.ignore(
            "option.quantize",
            f"DeepSpeed treats option.quantize={quantize} as unset; it knows dynamic_int8 and "
            "smoothquant",
        )
    if quantize == "smoothquant" and subject.option("dtype") in ("bf16", "bfloat16"):
        subject.error(
            "option.dtype", "option.dtype=bf16 can't be used with option.quantize=smoothquant"
        )
    if subject.option("checkpoint") is not None:
        if quantize in ("dynamic_int8", *NATIVE_QUANTIZE):
            subject.error(
                "option.checkpoint", "option.checkpoint can't be combined with option.quantize"
            )
        if subject.option("dtype") is None:
            subject.error("option.checkpoint", "option.checkpoint needs option.dtype")


def _neuronx(subject: Subject) -> None:
    rolling_batch = subject.option("rolling_batch")
    size = subject.values.get("batch_size")
    if isinstance(size, int) and size > 1 and rolling_batch not in (None, "disable"):
        subject.error(
            "batch_size",
            f"batch_size={size} and option.rolling_batch={rolling_batch} exclude each other; write "
            "option.rolling_batch=disable",
        )
    if rolling_batch not in (None, "auto", "disable", "tnx", "neuron"):
        subject.warn(
            "option.rolling_batch",
            f"Transformers-NeuronX takes option.rolling_batch={rolling_batch} as auto",
        )
    loader, schema = subject.option("model_loader"), subject.option("partition_schema")
    if loader == "tnx" and schema == "optimum":
        subject.error("option.partition_schema", "partition_schema=optimum needs loader optimum")
    if loader == "optimum" and schema not in (None, "optimum"):
        subject.error(
            "option.partition_schema", f"option.partition_schema={schema} needs model_loader=tnx"
        )
    tnx_only = [name for name in _TNX_KEYS if subject.option(name)]
    if loader == "optimum" and tnx_only:
        names = ", ".join(f"option.{name}" for name in tnx_only)
        subject.warn("option.model_loader", f"{names} belong to model_loader=tnx")
    path = subject.option("compiled_graph_path")
    if isinstance(path, str) and not path.startswith("s3://") and not is_dir(Path(path)):
        subject.error(
            "option.compiled_graph_path",
            f"option.compiled_graph_path={path[:80]} is neither s3://bucket/key nor a directory",
        )


def _trtllm(subject: Subject) -> None:
    kind, factor = subject.option("rotary_scaling_type"), subject.option("rotary_scaling_factor")
    if (kind is None) != (factor is None):
        given = "rotary_scaling_type" if factor is None else "rotary_scaling_factor"
        subject.error(
            f"option.{given}",
            "option.rotary_scaling_type and option.rotary_scaling_factor must be set together",
        )
    for name, wanted in (
        ("smoothquant_alpha", "smoothquant"),
        ("smoothquant_per_token", "smoothquant"),
        ("smoothquant_per_channel", "smoothquant"),
        ("multi_query_mode", "smoothquant"),
        ("awq_format", "awq"),
        ("awq_calib_size", "awq"),
    ):
        if subject.option(name) not in (None, False) and subject.option("quantize") != wanted:
            subject.warn(
                f"option.{name}", f"option.{name} counts only with option.quantize={wanted}"
            )
    if subject.files.model_type == "chatglm" and subject.option("chatglm_model_version") is None:
        subject.error("option.chatglm_model_version", "chatglm needs option.chatglm_model_version")


_COMMON: tuple[Rule, ...] = (
    _choices,
    _static_batching,
    _queue,
    _prompt_fits,
    _entry_point,
    _mpi,
    _int8_dtype,
)
_BY_SYSTEM: dict[str, tuple[Rule, ...]] = {
    "lmi_dist": (_lmi_dist,),
    "scheduler": (_scheduler,),
    "deepspeed": (_deepspeed,),
    "neuronx": (_neuronx,),
    "trtllm": (_trtllm,),
}
