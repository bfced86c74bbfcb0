"""Values of every system turned into the arguments of another library's engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmi_core.config.artefacts.model_files import ModelFiles
from lmi_core.config.sources.merge import Values
from lmi_core.config.table import BY_KEY
from lmi_core.config.table.effect import converted, effect_of_value
from lmi_core.config.table.option import Outcome
from lmi_core.config.table.shared import FRONT
from lmi_core.config.table.value_type import Json, json_or_text
from lmi_core.config.targets.lengths import sum_of_lengths
from lmi_core.settings.library_config import LibraryConfig
from lmi_core.settings.placement import Placement

_OURS = frozenset({"adapters", "model", "revision"})
"""Settings that say where files are, which are fetched by us."""
_BATCHES = {"vllm": "max_num_seqs", "trtllm": "max_batch_size", "neuron": "max_num_seqs"}
"""What each library calls the sequences of the running batch."""
_DEGREE = "tensor_parallel_size"
_NEURON = "additional_config.neuron_config"
_PREFIX = "option."
_PRE_QUANTISED = "modelopt"
"""What NVIDIA's Model Optimizer calls its checkpoints, whatever the format."""


def is_library(backend: str) -> bool:
    """Whether another library's engine serves the models of ``backend``."""
    return backend in _BATCHES


def ignore_stored_quantisation(values: Values, files: ModelFiles) -> None:
    """Note a quantisation that is the checkpoint's own, for a library that reads it by itself."""
    key = "option.quantize"
    wanted = values.get(key)
    if wanted is not None and files.quant_method in (wanted, _PRE_QUANTISED):
        values.ignored[key] = "the checkpoint is read as it is quantised"


def library_settings(
    values: Values, backend: str, name: str, system: str, placement: Placement
) -> LibraryConfig:
    """Return the configuration of ``backend``'s engine for the model ``name``, whose files needn't
    be here."""
    arguments = _arguments(values, backend, system, placement)
    ours: dict[str, Any] = {}
    if "max_queue_size" in arguments:
        ours["max_queue_size"] = arguments.pop("max_queue_size")
    for field, name_there in (
        ("max_num_seqs", _BATCHES[backend]),
        ("max_logprobs", "max_logprobs"),
    ):
        if name_there in arguments:
            ours[field] = arguments[name_there]
    return LibraryConfig(
        backend=backend, model=Path(), served_model_name=name, arguments=arguments, **ours
    )


def _arguments(
    values: Values, backend: str, system: str, placement: Placement
) -> dict[str, object]:
    """The arguments that ``values`` set, by the library's names; a dotted name is a field of an
    argument. Unknown keys are passed on, read as JSON where they are JSON."""
    settings: dict[str, object] = {}
    for value in reversed(values.used()):
        action = value.option.actions.get(backend)
        if action is None or value.option.key in FRONT:
            continue
        action = action.for_value(value.value)
        outcome = effect_of_value(value, backend).outcome
        if action.setting is None or outcome not in (Outcome.HONOURED, Outcome.MAPPED):
            continue
        if action.setting not in _OURS and not action.setting.startswith(_PREFIX):
            own = converted(action, value.value)
            is_json = isinstance(value.option.type, Json)
            _put(settings, action.setting, json_or_text(str(own)) if is_json else own)
    if placement.tensor_parallel_degree > 1:
        settings[_DEGREE] = placement.tensor_parallel_degree
    else:
        settings.pop(_DEGREE, None)
    if placement.num_copies > 1 and backend == "vllm":
        settings["data_parallel_size"] = placement.num_copies
    batch = BY_KEY["option.max_rolling_batch_size"].default_for(system)
    settings.setdefault(_BATCHES[backend], batch)
    if backend == "trtllm":
        _complete_lengths(settings, values)
    elif backend == "neuron":
        _complete_buckets(settings, values)
    for key, setting in values.unknown.items():
        if key.startswith(_PREFIX):
            _fill(settings, key.removeprefix(_PREFIX), json_or_text(setting.text))
    return settings


def _complete_lengths(settings: dict[str, object], values: Values) -> None:
    length = sum_of_lengths(values)
    if length is not None:
        settings.setdefault("max_seq_len", length)


def _complete_buckets(settings: dict[str, object], values: Values) -> None:
    """vLLM Neuron wants the prompt lengths that it compiles for to ascend to a step's tokens."""
    lengths = values.get("option.context_length_estimate")
    if isinstance(lengths, tuple) and lengths:
        _put(settings, f"{_NEURON}.num_batched_tokens_buckets", sorted(set(lengths)))
        settings.setdefault("max_num_batched_tokens", max(lengths))


def _put(settings: dict[str, object], name: str, value: object) -> None:
    *outer, last = name.split(".")
    for part in outer:
        inner = settings.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        settings = inner
    settings[last] = value


def _fill(settings: dict[str, object], name: str, value: object) -> None:
    """Add what isn't there yet, field by field."""
    present = settings.setdefault(name, value)
    if present is not value and isinstance(present, dict) and isinstance(value, dict):
        for field, inner in value.items():
            _fill(present, field, inner)
