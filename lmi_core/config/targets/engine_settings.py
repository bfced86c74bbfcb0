"""Values of every system turned into the configuration of our engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from lmi_core.config.artefacts.model_files import ModelFiles
from lmi_core.config.problem import Problems
from lmi_core.config.sources.merge import Value, Values
from lmi_core.config.table import BY_KEY
from lmi_core.config.table.accelerate import TRTLLM_QUANTIZE
from lmi_core.config.table.capabilities import BACKENDS
from lmi_core.config.table.common import TASKS
from lmi_core.config.table.effect import converted, effect_of_value
from lmi_core.config.table.option import Outcome
from lmi_core.config.targets.lengths import sum_of_lengths
from lmi_core.config.targets.rotary_settings import ROTARY_KEYS, refuse_overrides, rotary_fields
from lmi_core.errors import ModelError, UserError
from lmi_core.settings.engine_config import BLOCK_MULTIPLE, EngineConfig, is_too_long
from lmi_core.settings.placement import Placement
from lmi_core.settings.speculation_config import SpeculationConfig
from lmi_core.settings.transformers_config import TransformersConfig
from lmi_core.weights.hf_config import PURPOSES, QuantizationSettings, Task
from lmi_core.weights.quantized.methods import BITSANDBYTES, objection, stored_as

_NOT_SET = frozenset(
    {"model", "served_model_name", "num_models", "speculation", "tensor_parallel_degree", "job"}
)
_CONFIGS: dict[str, type[EngineConfig]] = {
    "lmi": EngineConfig,
    "transformers": TransformersConfig,
}
_QUANTIZE = "option.quantize"


def runs_in_engine(backend: str) -> bool:
    """Whether our engine drives the models of ``backend``."""
    return backend in _CONFIGS


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Our engine's configuration for a model whose files needn't be here, and which of its fields
    the options set."""

    config: EngineConfig
    given: tuple[str, ...]

    def shown(self) -> dict[str, Any]:
        """The fields that were set, for an explanation, as data of JSON's types."""
        values = {name: getattr(self.config, name) for name in self.given if name != "job"}
        for name, value in values.items():
            if isinstance(value, SpeculationConfig):
                values[name] = {
                    k: v for k, v in asdict(value).items() if k != "draft_model"
                }  # the draft model's place is a row of its own
            elif isinstance(value, Path):
                values[name] = str(value)
        return values


def engine_settings(
    values: Values,
    backend: str,
    name: str,
    system: str,
    placement: Placement,
    files: ModelFiles,
    problems: Problems,
    speculation: SpeculationConfig | None = None,
) -> EngineSettings | None:
    """Return our engine's configuration for the model ``name``, as ``values`` and ``placement`` set
    it, with the defaults of ``system``; None if the engine doesn't drive models of ``backend``, or
    if its fields don't go together. That, settings that it can't run with and checkpoints that it
    can't read are among ``problems`` then.
    """
    if not runs_in_engine(backend):
        return None
    settings: dict[str, Any] = {
        "max_num_seqs": BY_KEY["option.max_rolling_batch_size"].default_for(system),
        "max_queue_size": BY_KEY["job_queue_size"].default_for(system),
        "flash_attention": not BY_KEY["option.disable_flash_attn"].default_for(system),
    }
    chosen = _chosen(values, backend, problems)
    settings |= {field: fields_of(value, backend)[field] for field, value in chosen.items()}
    length = sum_of_lengths(values)
    if length is not None:
        settings.setdefault("max_model_len", length)
    timeout_s = values.get("option.predict_timeout")
    if isinstance(timeout_s, int):
        settings.setdefault("max_queue_s", float(timeout_s))
    if settings.get("instruction_set") == "auto":
        settings["instruction_set"] = ""
    if speculation is not None:
        settings["speculation"] = speculation
    settings |= _devices(placement, settings, backend)
    try:
        config = _CONFIGS[backend](model=Path(), served_model_name=name, **settings)
    except UserError as error:
        at_fault = chosen.get(error.field or "")
        key = None if at_fault is None else at_fault.option.key
        problems.error("" if at_fault is None else at_fault.setting.where, str(error), key)
        return None
    _check(config, backend, values, files, problems)
    return EngineSettings(config, tuple(settings))


def _chosen(values: Values, backend: str, problems: Problems) -> dict[str, Value]:
    """What sets each field. Of several keys for one the strongest source wins; two of one source
    that disagree are an error."""
    allowed = frozenset(field.name for field in fields(_CONFIGS[backend])) - _NOT_SET
    chosen: dict[str, Value] = {}
    for value in values.used():
        for field, target in fields_of(value, backend).items():
            if field not in allowed or value.option.key in values.refused:
                continue
            first = chosen.setdefault(field, value)
            is_rival = first.setting.precedence == value.setting.precedence and first is not value
            if is_rival and fields_of(first, backend)[field] != target:
                _conflict(first, value, field, backend, problems)
    return chosen


def fields_of(value: Value, backend: str) -> Mapping[str, object]:
    """What a value sets of the engine's configuration."""
    action = value.option.actions.get(backend)
    outcome = effect_of_value(value, backend).outcome
    if action is None or outcome not in (Outcome.HONOURED, Outcome.MAPPED):
        return {}
    if value.option.key in ROTARY_KEYS:
        return rotary_fields(value)
    action = action.for_value(value.value)
    return {} if action.setting is None else {action.setting: converted(action, value.value)}


def _devices(
    placement: Placement, settings: Mapping[str, object], backend: str
) -> dict[str, object]:
    """Transformers spreads a copy's layers over its devices, as in LMI."""
    if backend != "transformers":
        devices: dict[str, object] = {"device": placement.device}
        if placement.has_ranks:
            devices["tensor_parallel_degree"] = placement.tensor_parallel_degree
            devices |= {} if placement.job is None else {"job": placement.job}
        return devices
    device = "cuda" if placement.device == "cuda" else "cpu"
    if placement.num_devices == 1 or "device_map" in settings:
        return {"device": device}
    return {"device": device, "device_map": "auto"}


_ON_CPU = {
    "option.gpu_memory_utilization": "option.kv_cache_bytes sizes the CPU engine's cache",
    "option.disable_flash_attn": "flash-attn runs on GPUs only",
    "option.enforce_eager": "the CPU engine always replays its own recorded graph",
}


def settle_keys(
    values: Values,
    backend: str,
    system: str,
    placement: Placement,
    files: ModelFiles,
    environ: Mapping[str, str],
    problems: Problems,
) -> None:
    """Note what device and checkpoint make of other keys, where our engine drives the model."""
    if runs_in_engine(backend):
        _ignore_for_device(values, placement, problems)
        _ignore_beside_others(values, backend, files)
    if backend == "lmi":
        if system == "trtllm":
            _quantise_as_trtllm(values, files, placement)
        _refuse_other_quantisations(values, files)
        refuse_overrides(values)
        if placement.device != "cpu":
            _check_ops(environ, problems)


def _ignore_for_device(values: Values, placement: Placement, problems: Problems) -> None:
    """Note the keys that mean nothing on the device; those of GPUs on the CPU silently, since
    configurations made for one have them."""
    if placement.device == "cpu":
        values.ignored |= _ON_CPU
        return
    own = ["instruction_set", "tp_invariant", "cpu_binding"]
    if placement.on == "here":  # elsewhere it says how many cores a copy has
        own.append("num_threads")
    for key in (f"option.{name}" for name in own):
        if key in values.known:
            why = f"{key} belongs to option.device=cpu, not to {placement.device}"
            problems.warn(values.where(key), why, key)
            values.ignored[key] = why


_OF_TEXTS = (
    "speculation",
    "speculate",
    "speculative_config",
    "speculative_draft_model",
    "tool_call_parser",
    "enable_auto_tool_choice",
    "reasoning_parser",
    "enable_reasoning",
    "generation_config",
    "override_generation_config",
    "decoding_strategy",
    "contrastive_states",
    "max_logprobs",
    "seed",
)
"""Options of models that generate texts."""


def _ignore_beside_others(values: Values, backend: str, files: ModelFiles) -> None:
    """Note the keys that mean nothing beside what else is given, or the model's task."""
    asked = TASKS.get(str(values.get("option.task")), "auto")
    task = cast(Task, files.task if asked == "auto" else asked)
    if backend == "lmi" and task != "generate":
        why = f"the model is served for {PURPOSES[task]}, it generates no texts"
        values.ignored |= {f"option.{name}": why for name in _OF_TEXTS}
    if values.get("option.enable_prefix_caching") is False:
        why = "option.enable_prefix_caching=false keeps no prefixes"
        values.ignored |= {f"option.prefix_cache_{name}": why for name in ("dir", "bytes")}
    lengths = [v.option.key for v in values.used() if "max_model_len" in fields_of(v, backend)]
    if lengths:
        values.ignored["option.max_output_len"] = f"{lengths[0]} says how long a sequence may be"


def _quantise_as_trtllm(values: Values, files: ModelFiles, placement: Placement) -> None:
    """Read option.quantize as TensorRT-LLM's configurations mean it: of a checkpoint that isn't
    quantised. fp8 becomes int8 where the CPU computes."""
    value = values.known.get(_QUANTIZE)
    if value is None or files.quantization is not None:
        return
    name = f"{value.value} by TensorRT-LLM"
    if name in TRTLLM_QUANTIZE and (placement.device == "cpu" or value.value != "fp8"):
        values.known[_QUANTIZE] = replace(value, value=name)


def _refuse_other_quantisations(values: Values, files: ModelFiles) -> None:
    """Note a quantisation that doesn't go with the checkpoint's own, or that it has already, as far
    as that is known."""
    key = "option.quantize"
    value = values.known.get(key)
    if value is None or not files.known:
        return
    asked = converted(value.option.actions["lmi"].for_value(value.value), value.value)
    stored = files.quantization
    problem = objection(str(asked), stored)
    if effect_of_value(value, "lmi").outcome is Outcome.REFUSED:
        return
    if problem is not None:
        values.refused[key] = problem
    elif stored is not None and stored.method == BITSANDBYTES:
        values.ignored[key] = f"the checkpoint is read as it is: {stored_as(stored)}"


def _check_ops(environ: Mapping[str, str], problems: Problems) -> None:
    """Note what LMI_OPS, which torch devices go by, can't say."""
    from lmi_core.ops.kernels.select import VARIABLE, check

    try:
        check(environ.get(VARIABLE, ""))
    except UserError as error:
        problems.error("", str(error))


def _conflict(first: Value, second: Value, field: str, backend: str, problems: Problems) -> None:
    owner = "the lmi engine" if backend == "lmi" else BACKENDS[backend].title
    problems.error(
        first.setting.where,
        f"{first.option.key}={first.shown} and {second.option.key}={second.shown} "
        f"({second.setting.where}) both set {field} of {owner}, to different values; "
        "keep one",
        first.option.key,
    )


def _check(
    config: EngineConfig, backend: str, values: Values, files: ModelFiles, problems: Problems
) -> None:
    """Note settings that the engine can't run with, and checkpoints ``backend`` can't read."""
    max_positions = files.max_position_embeddings
    if backend == "lmi" and files.quantization is not None:
        _check_quantization(files.quantization, problems)
    if config.block_size % BLOCK_MULTIPLE:
        key = "option.block_size"
        key = key if key in values.known else "option.tokens_per_block"
        problems.error(
            values.where(key),
            f"{key}={config.block_size} is not a multiple of {BLOCK_MULTIPLE}",
            key,
        )
    num_tokens = config.max_num_batched_tokens
    if num_tokens is not None and num_tokens < config.max_num_seqs:
        key = _first_given(values, _STEP_KEYS)
        problems.error(
            values.where(key),
            f"{key}: steps of {num_tokens} tokens don't hold one of each of the batch's "
            f"{config.max_num_seqs} sequences: write at least {config.max_num_seqs}, or a smaller "
            "option.max_rolling_batch_size",
            key,
        )
    length = config.max_model_len
    if config.rope_scaling is not None or config.rope_factor is not None:
        max_positions = None  # stretched; the loader knows by how much
    if is_too_long(length, max_positions):
        key = _first_given(values, _LENGTH_KEYS)
        problems.error(
            values.where(key),
            f"{key}: {length} tokens are more than the model's {max_positions} positions; write at "
            f"most {max_positions}",
            key,
        )


def _check_quantization(settings: QuantizationSettings, problems: Problems) -> None:
    from lmi_core.weights.quantized.checkpoint import layout_of

    if f"weights.{settings.method}" not in BACKENDS["lmi"].capabilities:
        problems.error(
            "config.json",
            f"the checkpoint is quantised with {settings.method[:40]}, which the lmi engine "
            "doesn't read in this version; give the unquantised model",
        )
        return
    try:
        layout_of(settings)
    except ModelError as error:
        where = str(settings.path)
        problems.error(where, str(error).removeprefix(f"{where}: "))


_STEP_KEYS = ("option.max_rolling_batch_prefill_tokens", "option.max_num_tokens")
_LENGTH_KEYS = (
    "option.max_model_len",
    "option.max_tokens",
    "option.max_total_tokens",
    "option.n_positions",
    "option.max_output_len",
    "option.max_input_len",
)


def _first_given(values: Values, keys: Sequence[str]) -> str:
    return next((key for key in keys if key in values.known), keys[-1])
