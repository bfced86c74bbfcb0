"""A request inside the engine: what its choices share, and each choice's tokens and state."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence as Items
from enum import IntEnum
from typing import Any, Literal

from lmi_core._native import LogitBiases
from lmi_core.engine.beam_search import BeamSearch
from lmi_core.engine.contrastive_search import ContrastiveSearch
from lmi_core.engine.lora_slots import LoraSlot
from lmi_core.engine.outputs import FinishReason, PromptScore
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stats import RequestRecord
from lmi_core.engine.stream import EventStream
from lmi_core.models.pooling_head import RowSum
from lmi_core.structured.matcher import Matcher
from lmi_core.text.detokenizer import Detokenizer
from lmi_core.text.stop import StopMatcher

DraftedBy = Literal["text", "grammar", "model"]


class SequenceState(IntEnum):
    """Where a sequence is, in the order in which it gets there; preemption goes back to WAITING."""

    HELD = 0
    """Waits until a sibling has computed the prompt that they share."""
    RESTORING = 1
    """Waits for blocks of its prompt's prefix, which are read from a disk."""
    WAITING = 2
    RUNNING = 3
    FINISHED = 4


class Sequence:
    """Tokens so far and their KV blocks. Changed only by the loop's thread."""

    __slots__ = (
        "ahead_row",
        "block_ids",
        "choice",
        "copy",
        "detokenizer",
        "drafted_by",
        "drafts",
        "end_ids",
        "error",
        "has_eos",
        "hashes",
        "is_counted_ahead",
        "is_delivered",
        "is_ending",
        "is_plain",
        "key",
        "last_token_s",
        "logit_row",
        "matcher",
        "max_len",
        "needs_observe",
        "num_ahead",
        "num_computed",
        "num_drafted",
        "num_first",
        "num_prompt",
        "num_published",
        "num_scheduled",
        "request",
        "row",
        "row_sum",
        "state",
        "stop_matcher",
        "token_ids",
    )

    def __init__(
        self,
        request: ActiveRequest,
        choice: int,
        *,
        key: tuple[int, int, int],
        max_len: int,
        end_ids: frozenset[int],
        hashes: list[bytes],
        detokenizer: Detokenizer,
        stop_matcher: StopMatcher | None,
        has_eos: bool = True,
        matcher: Matcher | None = None,
    ) -> None:
        self.request = request
        self.choice = choice
        self.key = key
        """Order of admission and, reversed, of preemption: (priority, arrival, choice)."""
        self.token_ids = request.prompt_ids[:]
        """Prompt and output."""
        self.num_prompt = len(request.prompt_ids)
        self.max_len = max_len
        """Prompt and output together end here."""
        self.end_ids = end_ids
        """End-of-sequence and stop token ids."""
        self.has_eos = has_eos
        """Whether there is an end-of-sequence id among them."""
        self.matcher = matcher
        """Where the output is in the request's grammar. It knows every token of the output, also
        across preemptions."""
        self.error: Exception | None = None
        """Why no token could be sampled, if it is known."""
        self.row_sum: RowSum | None = None
        """What is pooled so far; None: tokens are wanted."""
        self.num_first = -1
        """Tokens before those of the second text of a pair."""
        self.needs_observe = request.needs_observe
        self.is_counted_ahead = False
        """Whether the worker counts its tokens, for penalties, and waits for masks that follow
        them, where the step behind is submitted before they are known."""
        self.detokenizer = detokenizer
        self.stop_matcher = stop_matcher

        self.state = SequenceState.WAITING
        self.row = -1
        """Row in the block tables and the sampling table while running."""
        self.block_ids: list[int] = []
        self.hashes = hashes
        """Chained hashes of the full blocks known so far."""
        self.copy: tuple[int, int] | None = None
        """(source, target) of a block to copy before the next step that it is in."""
        self.num_published = 0
        """Leading blocks that the prefix index knows."""
        self.num_computed = 0
        """Leading tokens whose KV is in the cache, by committed steps."""
        self.num_drafted = 0
        """Leading tokens whose KV the draft model has, by the chains that were submitted."""
        self.num_scheduled = 0
        """Tokens in the step being planned or in flight; 0 when it has no part in it."""
        self.logit_row = -1
        """First logit row in that step."""
        self.drafts: list[int] = []
        """What that step computes behind the last token, to be kept as far as it is what is
        sampled; -1: it can't be."""
        self.drafted_by: DraftedBy = "text"
        """What gave the first of the last drafts."""
        self.num_ahead = 0
        """Tokens in a step submitted behind that one, before its results are known."""
        self.ahead_row = -1
        """Logit row in the step behind."""
        self.is_ending = False
        """Ended while in flight: at commit, its result is dropped and its memory freed."""
        self.is_delivered = False
        """Its last event was handed out."""
        self.last_token_s = 0.0
        self.note_plain()

    @property
    def gang(self) -> list[Sequence]:
        """Those that are in memory with it or not at all: what a search has."""
        search = self.request.search
        return [self] if search is None else self.request.sequences[: search.num_live]

    @property
    def num_rows_wanted(self) -> int:
        """How many rows its gang will have, beyond those that it has now."""
        search = self.request.search
        return 0 if search is None or search.num_live > 1 else search.num_sequences - 1

    @property
    def final_len(self) -> int:
        """The length that its request has asked for, prompt and output; 0: it hasn't."""
        asked = self.request.request.params.max_new_tokens is not None
        return self.max_len if asked else 0

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def chunk(self) -> tuple[int, int]:
        """Where what the last planned step computes of it starts, and how many tokens that are."""
        if self.num_ahead:
            return self.num_computed + self.num_scheduled, self.num_ahead
        return self.num_computed, self.num_scheduled

    def step_over(self) -> None:
        """The step in flight completed: what lies in the one behind is now in flight."""
        self.num_scheduled, self.num_ahead = self.num_ahead, 0
        self.logit_row = self.ahead_row
        if self.drafts:
            self.drafts = []

    def take(self, token_id: int) -> FinishReason | None:
        """Append what was sampled, -1: nothing could be; returns why the text ends with it."""
        if token_id < 0:
            return FinishReason.ABORT
        self.token_ids.append(token_id)
        reason: FinishReason | None = None
        if token_id in self.end_ids:
            is_stop_id = token_id in self.request.request.params.stop_token_ids
            reason = FinishReason.STOP if is_stop_id else FinishReason.EOS
        elif self.matcher is not None and self._ends_grammar(self.matcher, token_id):
            reason = FinishReason.EOS
        elif len(self.token_ids) >= self.max_len:
            reason = FinishReason.LENGTH
        return reason if self.error is None else FinishReason.ABORT

    def _ends_grammar(self, matcher: Matcher, token_id: int) -> bool:
        """Go on in the grammar by a token; whether the text ends here, without an id that says so:
        there is no such id, it may not come yet, or there is no room for it."""
        try:
            matcher.accept(token_id)
        except Exception as error:
            self.error = error
            return True
        if not matcher.is_complete:
            if matcher.is_spent:
                self.matcher = None
            return False
        length = len(self.token_ids)
        min_length = self.num_prompt + self.request.request.params.min_new_tokens
        return not self.has_eos or length < min_length or length >= self.max_len

    def note_plain(self) -> None:
        """See whether its next tokens hang on nothing but those before as the worker knows them: on
        no search or scores of its prompt, or not any more."""
        is_free = self.matcher is None and not self.needs_observe
        self.is_plain = (is_free or self.is_counted_ahead) and not self.is_scoring_prompt

    @property
    def num_pending(self) -> int:
        """Tokens that must be computed before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_scoring_prompt(self) -> bool:
        """Whether this sequence still has to report log-probabilities of the prompt."""
        return self.choice == 0 and self.request.is_scoring_prompt


class ActiveRequest:
    """Prompt, choices and the stream of events of a request from submission to its last event."""

    __slots__ = (
        "adapter",
        "adapter_slot",
        "arrival_s",
        "biases",
        "has_sequence_biases",
        "is_scoring_prompt",
        "needs_observe",
        "num_cached_tokens",
        "num_given",
        "num_open",
        "prefix_seed",
        "prompt_ids",
        "prompt_scores",
        "queue_seconds",
        "reported_seed",
        "request",
        "request_id",
        "row_settings",
        "search",
        "seed",
        "sequences",
        "state_blocks",
        "stream",
    )

    def __init__(
        self,
        request: GenerationRequest,
        prompt_ids: Items[int],
        *,
        adapter: LoraSlot | None = None,
        prefix_seed: bytes = b"",
        biases: LogitBiases | None = None,
        seed: int,
        arrival_s: float,
        stream: EventStream,
    ) -> None:
        params = request.params
        self.request = request
        self.request_id = request.request_id
        self.prompt_ids = array("i", prompt_ids)
        """As its sequences' ids, no list, which each collection of garbage would go through."""
        self.adapter = adapter
        self.adapter_slot = -1 if adapter is None else adapter.index
        self.prefix_seed = prefix_seed
        """What its blocks' hashes start from: only requests with the same share blocks."""
        self.seed = seed
        self.reported_seed = seed if params.temperature > 0 else None
        self.arrival_s = arrival_s
        self.stream = stream
        self.sequences: list[Sequence] = []
        self.search: BeamSearch | ContrastiveSearch | None = None
        """What its sequences are beams or candidates of."""
        self.state_blocks: list[int] = []
        """Blocks of the KV cache that stand for its hidden states, while it runs."""
        self.num_given: list[int] = []
        """Tokens of each choice that another engine had handed out when it ended in mid-delivery;
        of searches alone, whose texts come whole."""
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
        self.biases = biases
        """What is added to logits, of every choice."""
        self.has_sequence_biases = self.biases is not None and self.biases.num_last > 0
        """Whether logits depend on the last tokens' order, which rows of drafts don't know."""
        self.needs_observe = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
            or params.min_new_tokens > 0
            or params.watermark_delta != 0.0
            or params.is_search
            or self.has_sequence_biases
            or bool(params.processors and params.processors.exponential_decay_length_penalty)
        )
        """Whether sampling depends on the tokens seen."""
        self.row_settings: dict[str, Any] | None = None
        """Of its sequences' rows of the sampling table; None before the first admission."""

    @property
    def deadline_s(self) -> float | None:
        """When it must have begun."""
        most_s = self.request.max_queue_s
        return None if most_s in (None, math.inf) else self.arrival_s + most_s

    @property
    def num_prompt_tokens(self) -> int:
        """Of all its sequences, since each has its own list."""
        return self.request.params.num_sequences * len(self.prompt_ids)

    @property
    def is_impatient(self) -> bool:
        """Whether it begins at once or never: once what is read of its prefix is there."""
        return self.request.max_queue_s == 0

    @property
    def is_waiting(self) -> bool:
        """Whether it is open and nothing of it was ever computed."""
        first = self.sequences[0]
        is_open = first.state is not SequenceState.FINISHED
        return is_open and self.num_cached_tokens is None and not first.num_generated

    @property
    def wants_states(self) -> bool:
        """Whether it needs the hidden states of all its tokens, which no cache has."""
        return isinstance(self.search, ContrastiveSearch)

    def record(self) -> RequestRecord:
        """What it took until now."""
        return RequestRecord(
            seconds=time.monotonic() - self.arrival_s,
            queue_seconds=self.queue_seconds,
            num_prompt_tokens=len(self.prompt_ids),
            num_generated_tokens=sum(
                sequence.num_generated for sequence in self.sequences[: self.request.params.n]
            ),
        )

    def note_cached(self, num_tokens: int) -> None:
        """Record what the first admission found in the prefix cache; later ones don't count."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_tokens
            self.queue_seconds = time.monotonic() - self.arrival_s
