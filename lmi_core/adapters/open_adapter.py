"""The choice of an adapter by the configured backend."""

from __future__ import annotations

from lmi_core.adapters.adapted_engine import AdaptedEngine
from lmi_core.adapters.trtllm_source import TrtllmSource
from lmi_core.adapters.vllm_source import VllmSource
from lmi_core.config.adapter_config import AdapterConfig
from lmi_core.engine.stats import EngineObserver


def open_adapter(config: AdapterConfig, observer: EngineObserver | None = None) -> AdaptedEngine:
    """The engine of another library, which entering it starts."""
    source = TrtllmSource(config) if config.backend == "trtllm" else VllmSource(config)
    return AdaptedEngine(config, source, observer=observer)
