"""The choice of the runner by the configured device and library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from lmi_core.errors import MissingExtraError
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.transformers_config import TransformersConfig
from lmi_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lmi_core.models.loader import FoundModel
    from lmi_core.runners.runner import Runner


class Loaded(Protocol):
    """What the engine needs of a model beside its runner."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


def load_runner(
    asked: EngineConfig | FoundModel,
    progress: Callable[[str, int, int], None] | None = None,
    on_found: Callable[[int, Sequence[int]], None] | None = None,
) -> tuple[Runner, Loaded]:
    """Load the model for the device that is asked for. ``on_found`` may be told before the weights
    are loaded how large the vocabulary is, and which tokens end a text. Raises ModelError for files
    that can't be served, UserError for a device that isn't there or sizes that don't fit."""
    if isinstance(asked, TransformersConfig):
        from lmi_core.runners.transformers.transformers_runner import load_transformers_runner

        return load_transformers_runner(asked, progress)
    config = asked if isinstance(asked, EngineConfig) else asked.asked
    if config.device == "cpu":
        from lmi_core.runners.cpu.cpu_runner import load_cpu_runner

        return load_cpu_runner(asked, progress, on_found)
    try:
        from lmi_core.runners.device.device_runner import load_device_runner
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError(f"device={config.device}", "cuda") from None
    return load_device_runner(asked, progress)


def load_tokenizer(asked: EngineConfig | FoundModel, vocab_size: int) -> Tokenizer:
    """The tokenizer of the model's directory, for a model of ``vocab_size`` embeddings.

    Raises ModelError when its files are missing or malformed, or don't fit the model.
    """
    if not isinstance(asked, EngineConfig) and asked.tokenizer is not None:
        return asked.tokenizer
    config = asked if isinstance(asked, EngineConfig) else asked.asked
    is_stored = (config.model / "tokenizer.json").is_file()
    if isinstance(config, TransformersConfig) and not is_stored:
        from lmi_core.runners.transformers.converted_tokenizer import convert_tokenizer

        return convert_tokenizer(config)
    return Tokenizer.load(config.model, vocab_size=vocab_size)
