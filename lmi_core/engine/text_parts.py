"""What an engine needs for texts, made in a thread while the model's weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from lmi_core.runners.load import load_tokenizer
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.structured.library import load_library
from lmi_core.structured.matcher import GrammarLibrary
from lmi_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lmi_core.models.loader import FoundModel


class TextParts:
    """Of one model. The library of grammars holds the interpreter's lock for most of its time,
    which those who read and pack weights don't need."""

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


def _library(
    tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: Sequence[int]
) -> GrammarLibrary:
    return load_library(tokenizer(), vocab_size=vocab_size, eos_token_ids=eos_token_ids)
