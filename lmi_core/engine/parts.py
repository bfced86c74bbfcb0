"""What an engine is loaded of, before its loop runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lmi_core.engine.disk_blocks import DiskBlocks, open_disk_blocks
from lmi_core.engine.fingerprint import FingerprintOf
from lmi_core.errors import MissingExtraError, UserError
from lmi_core.runners.runner import Runner
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.transformers_config import TransformersConfig
from lmi_core.structured.library import load_library
from lmi_core.structured.matcher import GrammarLibrary
from lmi_core.text.tokenizer import Tokenizer
from lmi_core.weights.gguf.directory import model_directory

if TYPE_CHECKING:
    from lmi_core.models.found_model import FoundModel


def checked_config(
    config: EngineConfig | FoundModel | Path | str,
) -> EngineConfig | FoundModel:
    """What an engine is given; of a directory or GGUF file a configuration with the defaults.
    UserError for anything else."""
    if isinstance(config, Path | str):
        config = EngineConfig(model=Path(config))
    if isinstance(config, EngineConfig):
        return replace(config, model=model_directory(config.model))
    if not isinstance(getattr(config, "asked", None), EngineConfig):
        raise UserError(
            "config must be an EngineConfig, or the path of a model's directory or GGUF file, got "
            f"{type(config).__name__} {config!r:.80}",
            field="config",
        )
    return config


class TextParts:
    """What a model needs for texts, made in a thread while its weights are loaded. The library of
    grammars holds the interpreter's lock for most of its time, which those who read and pack
    weights don't need."""

    def __init__(self, model: EngineConfig | FoundModel) -> None:
        self._model = model
        self._asked: tuple[int, tuple[int, ...]] | None = None
        self._tokenizer: Future[Tokenizer] = Future()
        self._library: Future[GrammarLibrary] = Future()

    def begin(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Once it is known what the model has; again: only if it is something else."""
        asked = vocab_size, tuple(sorted(set(eos_token_ids)))
        if asked != self._asked:
            self._asked = asked
            thread = ThreadPoolExecutor(1, thread_name_prefix="lmi-text")
            self._tokenizer = thread.submit(load_tokenizer, self._model, vocab_size)
            self._library = thread.submit(_library, self._tokenizer.result, *asked)
            thread.shutdown(wait=False)  # it ends when both are there

    def tokenizer(self) -> Tokenizer:
        """Waits for it. Raises as ``load_tokenizer``."""
        return self._tokenizer.result()

    def library(self) -> GrammarLibrary:
        """Waits for it. Raises as ``load_library``."""
        return self._library.result()

    def close(self) -> None:
        """Make no library if it isn't begun. Idempotent."""
        self._library.cancel()


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A model's runner, and what goes with it."""

    runner: Runner
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    fingerprint: FingerprintOf | None = None
    disk: DiskBlocks | None = None
    """Where KV blocks are kept beyond memory and restarts."""
    texts: TextParts | None = None

    def load_grammars(self) -> GrammarLibrary:
        """What compiles grammars for the model's vocabulary."""
        if self.texts is not None:
            return self.texts.library()
        return load_library(
            self.tokenizer,
            vocab_size=self.runner.info.vocab_size,
            eos_token_ids=sorted(set(self.eos_token_ids)),
        )

    def close(self) -> None:
        """Stop what runs beside the requests; the runner is closed with the loop."""
        for opened in (self.fingerprint, self.disk, self.texts):
            if opened is not None:
                opened.close()


async def load_in_thread(load: Callable[[], EngineParts]) -> EngineParts:
    """What ``load`` gives. Its thread goes on if who waits is cancelled, and closes it then."""
    loaded: Future[EngineParts] = Future()
    try:
        await asyncio.to_thread(lambda: loaded.set_result(load()))
    except asyncio.CancelledError:
        loaded.add_done_callback(_give_up)
        raise
    return loaded.result()


def _give_up(loaded: Future[EngineParts]) -> None:
    parts = loaded.result()
    parts.runner.close()
    parts.close()


class Loaded(Protocol):
    """What the engine needs of a model beside its runner."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


def load_parts(
    asked: EngineConfig | FoundModel,
    progress: Callable[[str, int, int], None] | None = None,
    *,
    has_fingerprint: bool = True,
) -> EngineParts:
    """Load a model; blocking. Raises as ``load_runner`` and ``load_tokenizer``."""
    config = asked if isinstance(asked, EngineConfig) else asked.asked
    texts = TextParts(asked)
    try:
        runner, files = load_runner(asked, progress, texts.begin)
    except BaseException:
        texts.close()
        raise
    try:
        texts.begin(runner.info.vocab_size, files.eos_token_ids)
        tokenizer = texts.tokenizer()
        directory, disk = config.prefix_cache_dir, None
        fingerprint = FingerprintOf(config, runner.info)
        if has_fingerprint or directory is not None:
            fingerprint.start(waits=directory is not None)
        if directory is not None:
            disk = open_disk_blocks(directory, config, runner, fingerprint.text)
    except BaseException:
        texts.close()
        runner.close()
        raise
    return EngineParts(runner, tokenizer, files.eos_token_ids, fingerprint, disk, texts)


def load_runner(
    asked: EngineConfig | FoundModel,
    progress: Callable[[str, int, int], None] | None = None,
    on_found: Callable[[int, Sequence[int]], None] | None = None,
) -> tuple[Runner, Loaded]:
    """Load the model for the device that is asked for. ``on_found`` may be told before the weights
    are loaded how large the vocabulary is, and which tokens end a text. Raises ModelError for files
    that can't be served, UserError for a device that isn't there or sizes that don't fit."""
    if isinstance(asked, TransformersConfig):
        from lmi_core.adapters.text_models import check_torch

        check_torch()
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
    is_stored = (config.model / "tokenizer.json").exists()
    if isinstance(config, TransformersConfig) and not is_stored:
        from lmi_core.runners.transformers.converted_tokenizer import convert_tokenizer

        return convert_tokenizer(config)
    return Tokenizer.load(config.model, vocab_size=vocab_size)


def _library(
    tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Sequence[int]
) -> GrammarLibrary:
    return load_library(tokenizer(), vocab_size=vocab_size, eos_token_ids=eos_token_ids)
