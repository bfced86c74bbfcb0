"""A large-model inference server: configuration, engine, models and adapters.

The names for embedding are imported when first used, so that the package itself imports at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lmi_core.version import __version__

if TYPE_CHECKING:
    from lmi_core.config.engine_config import EngineConfig
    from lmi_core.engine.engine import Engine
    from lmi_core.engine.outputs import FinishReason, TokenEvent
    from lmi_core.engine.request import GenerationRequest
    from lmi_core.engine.sampling_params import SamplingParams

__all__ = [
    "Engine",
    "EngineConfig",
    "FinishReason",
    "GenerationRequest",
    "SamplingParams",
    "TokenEvent",
    "__version__",
]

_MODULES = {
    "Engine": "lmi_core.engine.engine",
    "EngineConfig": "lmi_core.config.engine_config",
    "FinishReason": "lmi_core.engine.outputs",
    "GenerationRequest": "lmi_core.engine.request",
    "SamplingParams": "lmi_core.engine.sampling_params",
    "TokenEvent": "lmi_core.engine.outputs",
}


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)
