"""The frozen configuration of a model's custom code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomCodeConfig:
    """What runs a ``model.py``: its functions, its processes and their limits."""

    path: Path
    model_dir: Path
    """The process's working directory, first on its import path."""
    model_name: str = "model"
    function: str | None = None
    """Answers requests; None: the file only formats."""
    input_formatter: str | None = None
    output_formatter: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    """The model's configuration, as the first call gets it."""
    call_properties: Mapping[str, str] = field(default_factory=dict)
    """Properties of every call."""
    packages: Path | None = None
    """Directory of what its requirements.txt names."""
    python: str | None = None
    """Interpreter; None: the server's own."""
    env: Mapping[str, str] = field(default_factory=dict)
    withheld: tuple[str, ...] = ()
    """Variables of the server that its processes don't inherit: secrets of the server."""
    batch_size: int = 1
    max_batch_delay_ms: int = 100
    min_workers: int = 1
    max_workers: int = 1
    """Workers beyond min_workers are started while many requests wait, and end when idle."""
    max_idle_time_s: int = 60
    max_queue_size: int = 1000
    predict_timeout_s: float = 120.0
    """One call; of a stream, the time to each of its pieces."""
    loading_timeout_s: float = 1800.0
    max_output_bytes: int = 62914560
    retry_threshold: int = 10
    """Failures of processes until the model counts as failed."""
    parallel_loading: bool = False

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The variables of its processes, of those that the server has."""
        kept = {name: text for name, text in inherited.items() if name not in self.withheld}
        return {**kept, **self.env}
