"""The choice of the runner by the configured device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmi_core.config.engine_config import EngineConfig
    from lmi_core.engine.runner import Runner
    from lmi_core.models.loader import LoadedModel


def load_runner(
    config: EngineConfig, progress: Callable[[str, int, int], None] | None = None
) -> tuple[Runner, LoadedModel]:
    """Load the model for ``config.device``. Raises ModelError for files that can't be served,
    UserError for a device that isn't there or sizes that don't fit."""
    if config.device == "cpu":
        from lmi_core.engine.native_runner import load_native_runner

        return load_native_runner(config, progress)
    from lmi_core.engine.torch_runner import load_torch_runner

    return load_torch_runner(config, progress)
