"""What the server needs of those who serve a model. Each promises what it does and nothing else:
lmi's engine and other libraries' all of it, a model's own code only to report."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stats import EngineInfo, EngineStats
from lmi_core.text.tokenizer import Tokenizer


class Reports(Protocol):
    """Every backend: how it is."""

    @property
    def healthy(self) -> bool: ...

    def stats(self) -> EngineStats: ...


@runtime_checkable
class Generates(Protocol):
    """What turns requests into events; some also as ``Subscribable``."""

    def generate_batches(
        self, request: GenerationRequest
    ) -> AsyncGenerator[Sequence[TokenEvent], None]:
        """A request's events, all that are ready at once; closing the generator aborts it.

        Raises UserError or CapacityError before the first event, EngineError at any time.
        """
        ...

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Token ids of a text; UserError when it isn't valid Unicode."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and its output together."""
        ...

    @property
    def info(self) -> EngineInfo: ...


@runtime_checkable
class Tokenizes(Protocol):
    """What knows the model's tokens."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Token ids of a text; UserError when it isn't valid Unicode."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included; UserError for ids there aren't."""
        ...


@runtime_checkable
class Pins(Protocol):
    """What keeps the blocks of sessions (``GenerationRequest.session``)."""

    def unpin(self, session: str) -> None:
        """Keep them no longer than others'. Idempotent."""
        ...


@runtime_checkable
class Scales(Protocol):
    """What is served by processes, whose number can be changed while it runs."""

    @property
    def lacks_workers(self) -> bool:
        """Whether fewer of them run than always should: some are being restarted."""
        ...

    @property
    def worker_starts(self) -> Sequence[float]:
        """When those that take requests were started, in seconds since the epoch."""
        ...

    async def scale(self, min_workers: int, max_workers: int) -> None:
        """Keep other numbers of them from now on; InsufficientMemoryError where they don't fit."""
        ...


@runtime_checkable
class Attests(Protocol):
    """What says by what its tokens are decided besides the request."""

    @property
    def fingerprint(self) -> str | None:
        """Digests of weights, build, instruction set and formats; None: not known yet."""
        ...

    def adapter_digest(self, name: str) -> str:
        """Of a registered adapter's files; "" for the base model."""
        ...


class AdapterHost(Protocol):
    """What a backend is besides where LoRA is enabled (``ServerOptions.has_lora``)."""

    @property
    def adapters(self) -> Mapping[str, Path]:
        """Names and directories, in the order of registration."""
        ...

    async def load_adapter(self, name: str, path: Path) -> None:
        """UserError for a name that is taken, ModelError for files that can't be served."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """At once for new requests; returns when running ones have finished. UserError for a name
        that isn't registered."""
        ...
