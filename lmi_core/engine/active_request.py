"""A request inside the engine: what its choices share."""

from __future__ import annotations

import time

from lmi_core.engine.lora_slots import LoraSlot
from lmi_core.engine.outputs import TokenLogprob
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sequence import Sequence
from lmi_core.engine.stats import RequestRecord
from lmi_core.engine.stream import EventStream

PromptScore = tuple[float, tuple[TokenLogprob, ...]]


class ActiveRequest:
    """Prompt, choices and the stream of events of a request from submission to its last event."""

    __slots__ = (
        "adapter",
        "adapter_slot",
        "arrival_s",
        "is_scoring_prompt",
        "needs_observe",
        "num_cached_tokens",
        "num_open",
        "prefix_seed",
        "prompt_ids",
        "prompt_scores",
        "queue_seconds",
        "reported_seed",
        "request",
        "request_id",
        "seed",
        "sequences",
        "stream",
    )

    def __init__(
        self,
        request: GenerationRequest,
        prompt_ids: list[int],
        *,
        adapter: LoraSlot | None = None,
        seed: int,
        arrival_s: float,
        stream: EventStream,
    ) -> None:
        params = request.params
        self.request = request
        self.request_id = request.request_id
        self.prompt_ids = prompt_ids
        self.adapter = adapter
        self.adapter_slot = -1 if adapter is None else adapter.index
        self.prefix_seed = request.cache_salt.encode()
        """What its blocks' hashes start from: only requests with the same share blocks."""
        if adapter is not None:
            self.prefix_seed = adapter.prefix_seed + self.prefix_seed
        self.seed = seed
        self.reported_seed = seed if params.temperature > 0 else None
        self.arrival_s = arrival_s
        self.stream = stream
        self.sequences: list[Sequence] = []
        self.num_open = params.n
        """Choices whose last event wasn't handed out."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache; None before the first admission."""
        self.queue_seconds = 0.0
        """From the arrival to the first admission."""
        self.is_scoring_prompt = params.prompt_logprobs is not None
        """Log-probabilities of the prompt were asked for and aren't complete."""
        self.prompt_scores: list[PromptScore | None] = []
        """Per prompt token, filled as its chunks are computed."""
        if self.is_scoring_prompt:
            self.prompt_scores = [None] * len(prompt_ids)
        self.needs_observe = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
            or params.min_new_tokens > 0
        )
        """Whether sampling depends on the tokens seen."""

    def record(self) -> RequestRecord:
        """What it took until now."""
        return RequestRecord(
            seconds=time.monotonic() - self.arrival_s,
            queue_seconds=self.queue_seconds,
            num_prompt_tokens=len(self.prompt_ids),
            num_generated_tokens=sum(sequence.num_generated for sequence in self.sequences),
        )

    def note_cached(self, num_tokens: int) -> None:
        """Record what the first admission found in the prefix cache; later ones don't count."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_tokens
            self.queue_seconds = time.monotonic() - self.arrival_s


class OpenRequests(dict[str, ActiveRequest]):
    """The open requests by id, and how much they hold together."""

    num_prompt_tokens = 0
    """Of every choice, since each has its own list."""

    def __setitem__(self, request_id: str, request: ActiveRequest) -> None:
        self._count(request, 1)
        super().__setitem__(request_id, request)

    def pop(self, request_id: str, default: None = None) -> ActiveRequest | None:  # type: ignore[override]
        request = super().pop(request_id, default)
        if request is not None:
            self._count(request, -1)
        return request

    def _count(self, request: ActiveRequest, sign: int) -> None:
        self.num_prompt_tokens += sign * request.request.params.n * len(request.prompt_ids)
