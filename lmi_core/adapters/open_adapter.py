"""The choice of an adapter by the configured backend."""

from __future__ import annotations

from collections.abc import Callable

from lmi_core.adapters.adapted_engine import AdaptedEngine
from lmi_core.adapters.neuron_source import NeuronSource
from lmi_core.adapters.token_source import TokenSource
from lmi_core.adapters.trtllm_source import TrtllmSource
from lmi_core.adapters.vllm_source import VllmSource
from lmi_core.config.adapter_config import AdapterConfig
from lmi_core.engine.stats import EngineObserver

_SOURCES: dict[str, Callable[[AdapterConfig], TokenSource]] = {
    "neuron": NeuronSource,
    "trtllm": TrtllmSource,
    "vllm": VllmSource,
}


def open_adapter(config: AdapterConfig, observer: EngineObserver | None = None) -> AdaptedEngine:
    """The engine of another library, which entering it starts."""
    return AdaptedEngine(config, _SOURCES[config.backend](config), observer=observer)
