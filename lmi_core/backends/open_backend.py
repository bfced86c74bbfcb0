"""The choice of an adapter by the configured backend."""

from __future__ import annotations

from collections.abc import Callable

from lmi_core.backends.library_engine import LibraryEngine
from lmi_core.backends.neuron_source import NeuronSource
from lmi_core.backends.token_source import TokenSource
from lmi_core.backends.trtllm_source import TrtllmSource
from lmi_core.backends.vllm_source import VllmSource
from lmi_core.engine.stats import EngineObserver
from lmi_core.settings.library_config import LibraryConfig

_SOURCES: dict[str, Callable[[LibraryConfig], TokenSource]] = {
    "neuron": NeuronSource,
    "trtllm": TrtllmSource,
    "vllm": VllmSource,
}


def open_backend(config: LibraryConfig, observer: EngineObserver | None = None) -> LibraryEngine:
    """The engine of another library, which entering it starts."""
    return LibraryEngine(config, _SOURCES[config.backend](config), observer=observer)
