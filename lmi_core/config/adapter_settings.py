"""Values of every system turned into the arguments of another library's engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmi_core.config.adapter_config import AdapterConfig
from lmi_core.config.effect import converted, effect_of_value
from lmi_core.config.lengths import sum_of_lengths
from lmi_core.config.merge import Values
from lmi_core.config.model_files import ModelFiles
from lmi_core.config.option import Outcome
from lmi_core.config.placement import Placement
from lmi_core.config.table import BY_KEY

_OURS = frozenset(
    {"lmi_compat", "model", "output_formatter", "revision", "served_model_name", "tgi_compat"}
)
"""Settings that the server takes, or that say where the model is: it is fetched by us."""
_DEGREES = {"vllm": "tensor_parallel_size", "trtllm": "tensor_parallel_size", "neuron": "tp_degree"}
_BATCHES = {"vllm": "max_num_seqs", "trtllm": "max_batch_size"}
"""What each library calls the sequences of the running batch."""
_PREFIX = "option."
_PRE_QUANTISED = "modelopt"
"""What TensorRT-LLM's own quantiser calls its checkpoints, whatever the format."""


def is_adapter(backend: str) -> bool:
    """Whether another library's engine serves the models of ``backend``."""
    return backend in _DEGREES


def passes_on(backend: str) -> bool:
    """Whether unknown keys are arguments of the library."""
    return backend in _BATCHES


def ignore_stored_quantisation(values: Values, files: ModelFiles) -> None:
    """Note a quantisation that is the checkpoint's own, which TensorRT-LLM reads by itself."""
    key = "option.quantize"
    wanted = values.get(key)
    if wanted is not None and files.quant_method in (wanted, _PRE_QUANTISED):
        values.ignored[key] = "the checkpoint is read as it is quantised"


def adapter_settings(
    values: Values, backend: str, system: str, placement: Placement
) -> dict[str, object]:
    """Return the arguments that ``values`` set, by the library's names; a dotted name is a field
    of an argument. Unknown keys are passed on, read as JSON where they are JSON."""
    settings: dict[str, object] = {}
    for value in reversed(values.used()):
        action = value.option.actions.get(backend)
        if action is None:
            continue
        action = action.for_value(value.value)
        outcome = effect_of_value(value, backend).outcome
        if action.setting is None or outcome not in (Outcome.HONOURED, Outcome.MAPPED):
            continue
        if action.setting not in _OURS and not action.setting.startswith(_PREFIX):
            _put(settings, action.setting, converted(action, value.value))
    degree = _DEGREES[backend]
    if placement.tensor_parallel_degree > 1:
        settings[degree] = placement.tensor_parallel_degree
    else:
        settings.pop(degree, None)
    length = sum_of_lengths(values)
    if backend == "trtllm" and length is not None:
        settings.setdefault("max_seq_len", length)
    if passes_on(backend):
        batch = BY_KEY["option.max_rolling_batch_size"].default_for(system)
        settings.setdefault(_BATCHES[backend], batch)
        for key, setting in values.unknown.items():
            if key.startswith(_PREFIX):
                settings.setdefault(key.removeprefix(_PREFIX), _read(setting.text))
    return settings


def adapter_config(
    backend: str, model: Path, name: str, settings: Mapping[str, object]
) -> AdapterConfig:
    """Return the frozen configuration for a model that is here."""
    arguments = dict(settings)
    ours: dict[str, Any] = {}
    if "max_queue_size" in arguments:
        ours["max_queue_size"] = arguments.pop("max_queue_size")
    for field, name_there in (
        ("max_num_seqs", _BATCHES.get(backend)),
        ("max_logprobs", "max_logprobs"),
    ):
        if name_there in arguments:
            ours[field] = arguments[name_there]
    return AdapterConfig(
        backend=backend, model=model, served_model_name=name, arguments=arguments, **ours
    )


def _put(settings: dict[str, object], name: str, value: object) -> None:
    head, _, rest = name.partition(".")
    if not rest:
        settings[head] = value
        return
    inner = settings.setdefault(head, {})
    if isinstance(inner, dict):
        inner[rest] = value


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
