"""The seam to another library's engine: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError

Top = tuple[tuple[int, float], ...]
"""Token ids and their log-probabilities, best first."""


def most_likely(found: Mapping[int, Any], count: int) -> Top:
    """The best of a library's entries by token id, each with its ``logprob``."""
    best = sorted(((i, entry.logprob) for i, entry in found.items()), key=lambda e: (-e[1], e[0]))
    return tuple(best[:count])


def refuse_typical_p(params: SamplingParams, library: str) -> None:
    """Raise UserError for what no library's sampler has."""
    if params.temperature > 0 and params.typical_p < 1.0:
        raise UserError(
            f"typical_p is {params.typical_p:g}, but {library} has no typical sampling; leave "
            "typical_p out",
            field="typical_p",
        )


class SampledToken(NamedTuple):
    """A token of one choice; ``finish_reason`` is set on its last one."""

    choice: int
    token_id: int
    logprob: float | None = None
    top: Top = ()
    finish_reason: FinishReason | None = None


class ScoredToken(NamedTuple):
    """A token of the prompt; the first one has no log-probability."""

    token_id: int
    logprob: float | None
    top: Top = ()
    rank: int | None = None

    @classmethod
    def of(cls, token_id: int, found: Mapping[int, Any], num_top: int) -> ScoredToken:
        """From a library's entries by token id, this one's among them."""
        own = found[token_id]
        return cls(token_id, own.logprob, most_likely(found, num_top), own.rank)


@dataclass(slots=True)
class TokenBatch:
    """What an engine had ready at once."""

    tokens: list[SampledToken] = field(default_factory=list)
    prompt: tuple[ScoredToken, ...] | None = None
    """Once, if the request asked for the prompt's log-probabilities."""
    num_cached_tokens: int = 0


class TokenSource(Protocol):
    """An engine of another library. Errors of a request are UserError, others EngineError."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str

    @property
    def healthy(self) -> bool: ...

    async def start(self) -> None:
        """Load the model; sets the attributes above."""
        ...

    async def stop(self) -> None: ...

    def generate(
        self, request: GenerationRequest, request_id: str, prompt_ids: list[int], seed: int
    ) -> AsyncGenerator[TokenBatch, None]:
        """Tokens of a request, whose ``max_new_tokens`` is set; closing the generator aborts it.

        ``seed`` counts where the temperature isn't 0.
        """
        ...


class AdapterSource(TokenSource, Protocol):
    """A source whose engine holds LoRA adapters, which requests name (``LibraryConfig.lora``)."""

    async def load_adapter(self, name: str, path: Path) -> None:
        """Raises ModelError for an adapter that the engine doesn't take."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Running requests go on."""
        ...
