"""A large-model inference server: configuration, engine, models and adapters.

The names for embedding are imported when first used, so that the package itself imports at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lmi_core.version import __version__

if TYPE_CHECKING:
    from lmi_core.engine.completion import Completion
    from lmi_core.engine.engine import Engine
    from lmi_core.engine.outputs import FinishReason, TokenEvent
    from lmi_core.engine.request import GenerationRequest
    from lmi_core.engine.sampling_params import SamplingParams
    from lmi_core.errors import CapacityError, EngineError, LmiError, UserError
    from lmi_core.settings.engine_config import EngineConfig
    from lmi_core.settings.lora_config import LoraConfig
    from lmi_core.structured.grammar import Grammar

__all__ = [
    "CapacityError",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineError",
    "FinishReason",
    "GenerationRequest",
    "Grammar",
    "LmiError",
    "LoraConfig",
    "SamplingParams",
    "TokenEvent",
    "UserError",
    "__version__",
]

_MODULES = {
    "CapacityError": "lmi_core.errors",
    "Completion": "lmi_core.engine.completion",
    "Engine": "lmi_core.engine.engine",
    "EngineConfig": "lmi_core.settings.engine_config",
    "EngineError": "lmi_core.errors",
    "FinishReason": "lmi_core.engine.outputs",
    "GenerationRequest": "lmi_core.engine.request",
    "Grammar": "lmi_core.structured.grammar",
    "LmiError": "lmi_core.errors",
    "LoraConfig": "lmi_core.settings.lora_config",
    "SamplingParams": "lmi_core.engine.sampling_params",
    "TokenEvent": "lmi_core.engine.outputs",
    "UserError": "lmi_core.errors",
}


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return __all__
