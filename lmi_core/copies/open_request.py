"""A request between its arrival and its last event, whichever copy has it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lmi_core.copies.outbox import FullEvent, PlainEvent, full_event
from lmi_core.copies.router import Entry
from lmi_core.engine.handover import Handover
from lmi_core.engine.outputs import FinishReason, TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stream import EventStream


class OpenRequest:
    """What its reader was given so far: enough to go on anywhere."""

    __slots__ = (
        "arrival_s",
        "entry",
        "finished",
        "had_prompt",
        "hashes",
        "num_cached",
        "num_first",
        "num_losses",
        "num_prompt",
        "on_end",
        "outputs",
        "prefix_seed",
        "queue_seconds",
        "request",
        "seed",
        "stream",
    )

    def __init__(
        self,
        request: GenerationRequest,
        entry: Entry,
        stream: EventStream,
        *,
        arrival_s: float,
        prefix_seed: bytes,
        hashes: list[bytes],
        num_first: int,
        on_end: Callable[[], None],
    ) -> None:
        """``request`` has token ids and a seed; ``on_end`` is called once."""
        assert request.prompt_token_ids is not None
        params = request.params
        self.request = request
        self.entry = entry
        self.stream = stream
        self.arrival_s = arrival_s
        self.prefix_seed = prefix_seed
        self.hashes = hashes
        self.num_first = num_first
        self.on_end = on_end
        self.num_prompt = len(request.prompt_token_ids)
        self.seed = params.seed if params.temperature > 0 else None
        self.outputs: list[list[int]] = [[] for _ in range(params.n)]
        self.finished: set[int] = set()
        self.had_prompt = False
        self.num_cached: int | None = None
        self.queue_seconds = 0.0
        self.num_losses = 0
        """Copies that were lost after they had said that they have it."""

    @property
    def number(self) -> int:
        return self.entry.number

    @property
    def has_begun(self) -> bool:
        """Whether its reader was given anything."""
        return self.had_prompt or any(self.outputs)

    @property
    def is_finished(self) -> bool:
        return len(self.finished) == len(self.outputs)

    def take(self, item: PlainEvent | FullEvent) -> TokenEvent:
        """The event that a copy has sent, which is handed out next."""
        if len(item) == 2:
            return self._take_full(item)
        _, choice, token_id, text, num_generated, special = item
        self.outputs[choice].append(token_id)
        return TokenEvent(
            request_id=self.request.request_id,
            choice=choice,
            token_id=token_id,
            text=text,
            special=special,
            num_prompt_tokens=self.num_prompt,
            num_cached_tokens=self.num_cached or 0,
            num_generated_tokens=num_generated,
            seed=self.seed,
        )

    def _take_full(self, item: FullEvent) -> TokenEvent:
        event = full_event(self.request.request_id, item[1])
        self.num_cached = event.num_cached_tokens
        if event.prompt is not None:
            self.had_prompt = True
            return event
        if event.token_id >= 0:
            self.outputs[event.choice].append(event.token_id)
        if event.num_generated_tokens == 1:
            self.queue_seconds = event.queue_seconds
        if event.finish_reason is not None:
            self.finished.add(event.choice)
        return event

    def handover(self) -> Handover:
        """For the next copy that runs it."""
        return Handover(
            order=self.number,
            arrival_s=self.arrival_s,
            prefix_seed=self.prefix_seed,
            hashes=tuple(self.hashes),
            num_first=self.num_first,
            outputs=tuple(map(tuple, self.outputs)) if self.has_begun else (),
            finished=frozenset(self.finished),
            had_prompt=self.had_prompt,
            num_cached_tokens=self.num_cached,
            queue_seconds=self.queue_seconds,
            last_token_s=time.monotonic(),
        )

    def abort_events(self) -> list[TokenEvent]:
        """The last event of every choice that hasn't had one."""
        left = [choice for choice in range(len(self.outputs)) if choice not in self.finished]
        return [
            TokenEvent(
                request_id=self.request.request_id,
                choice=choice,
                token_id=-1,
                text="",
                num_prompt_tokens=self.num_prompt,
                num_cached_tokens=self.num_cached or 0,
                num_generated_tokens=len(self.outputs[choice]),
                finish_reason=FinishReason.ABORT,
            )
            for choice in left
        ]

    def full_blocks(
        self, hash_blocks: Callable[[Sequence[int], bytes, bytes], list[bytes]], block_size: int
    ) -> list[bytes]:
        """Hashes of the blocks that it leaves behind, of its first choice."""
        assert self.request.prompt_token_ids is not None
        token_ids = [*self.request.prompt_token_ids, *self.outputs[0]]
        num_known = len(self.hashes)
        # The last token was sampled, not computed.
        num_full = (len(token_ids) - 1) // block_size
        rest = token_ids[num_known * block_size : num_full * block_size]
        parent = self.hashes[-1] if self.hashes else b""
        return [*self.hashes, *hash_blocks(rest, parent, self.prefix_seed)]
