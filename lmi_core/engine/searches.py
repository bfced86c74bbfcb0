"""Searches, whose sequences go on from each other: which a request wants, and how they move."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from lmi_core.engine.beam_search import BeamSearch
from lmi_core.engine.contrastive_search import Chosen, ContrastiveSearch, HiddenStates
from lmi_core.engine.kv_memory import KvMemory
from lmi_core.engine.plan import Output, Plan
from lmi_core.engine.queues import Queues
from lmi_core.engine.ranked_tokens import Ranked, RankedBans
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.sequence import ActiveRequest, Sequence, SequenceState
from lmi_core.errors import EngineError, UserError
from lmi_core.runners.runner import RunnerInfo
from lmi_core.structured.banned_sequences import BannedSequences
from lmi_core.weights.formats import FloatArray

_MAX_STATE_BYTES = 256 << 20
"""Of a text's hidden states, which the loop's thread reads for every token: 25 ms."""


def search_of(
    params: SamplingParams,
    end_ids: frozenset[int],
    info: RunnerInfo,
    *,
    num_prompt: int,
    max_len: int,
    bans: BannedSequences | None,
) -> BeamSearch | ContrastiveSearch | None:
    """A request's search, if it wants one. ``max_len``: of the prompt and a text. Raises UserError
    for more beams or candidates than there are rows and blocks, of which it may need its own for
    each."""
    is_contrastive = params.penalty_alpha is not None
    if not is_contrastive and params.num_beams == 1:
        return None
    num_state_blocks = _num_state_blocks(info, max_len) if is_contrastive else 0
    field = "top_k" if is_contrastive else "num_beams"
    _check_room(params, info, field, max_len, num_state_blocks)
    num_needed = params.top_k
    if not is_contrastive:  # any end, and others for all beams
        num_needed = params.num_beams + len(end_ids)
    ranked_bans = RankedBans(
        params,
        end_ids,
        field=field,
        num_needed=min(info.vocab_size, num_needed),
        vocab_size=info.vocab_size,
        max_ranked=info.max_logprobs,
        bans=bans,
    )
    max_tokens = max_len - num_prompt
    if not is_contrastive:
        return BeamSearch(params, end_ids, max_tokens=max_tokens, bans=ranked_bans)
    return ContrastiveSearch(
        params,
        end_ids,
        max_tokens=max_tokens,
        num_columns=info.num_state_columns,
        num_state_blocks=num_state_blocks,
        bans=ranked_bans,
    )


def _check_room(
    params: SamplingParams, info: RunnerInfo, field: str, max_len: int, num_state_blocks: int
) -> None:
    count = params.num_sequences
    num_blocks = count * -(-max_len // info.block_size) + num_state_blocks
    reason = ""
    if not info.shares_blocks:
        reason = "sequences of this model share no blocks of the cache, as those of a search do"
    elif count > info.max_num_seqs:
        reason = f"option.max_rolling_batch_size allows {info.max_num_seqs} sequences in a step"
    elif num_blocks > info.num_blocks:
        reason = (
            f"texts of {max_len} tokens take {num_blocks} blocks of the cache, which has "
            f"{info.num_blocks}: ask for fewer tokens (max_new_tokens)"
        )
    if reason:
        raise UserError(f"{field} is {count}, but {reason}; lower {field}", field=field)


def _num_state_blocks(info: RunnerInfo, max_len: int) -> int:
    """How many blocks of the KV cache have the size of a text's hidden states."""
    if not info.num_state_columns:
        raise UserError(
            "penalty_alpha asks for contrastive search, whose hidden states neither Transformers "
            "gives nor steps that C++ launches on GPUs, and the model runs on "
            f"{info.kernels or info.device}: leave it out, or start with decoding_strategy="
            "contrastive or LMI_OPS=launch:torch",
            field="penalty_alpha",
        )
    num_bytes = HiddenStates.num_bytes(max_len, info.num_state_columns)
    if num_bytes > _MAX_STATE_BYTES:
        most = _MAX_STATE_BYTES // (4 * info.num_state_columns)
        raise UserError(
            f"contrastive search compares each token with all before it, of which it may keep "
            f"{most}; prompt and max_new_tokens are {max_len}: ask for fewer",
            field="max_new_tokens",
        )
    return -(-num_bytes * info.num_blocks // max(1, info.kv_cache_bytes))


class SearchMoves:
    """Takes over what steps computed for searches, and moves their sequences in memory."""

    def __init__(
        self, queues: Queues, memory: KvMemory, preempt: Callable[[Sequence], None]
    ) -> None:
        self._queues = queues
        self._memory = memory
        self._preempt = preempt

    def go_on(
        self,
        sequence: Sequence,
        ranked: Ranked | None,
        states: FloatArray | None,
        plan: Plan,
    ) -> bool:
        """Take over one sequence's part of a step: the tokens that are ``ranked`` behind it, if its
        logits were computed, and for a contrastive search its ``states`` [tokens, columns]. Whether
        the search has ended."""
        search = sequence.request.search
        if ranked is not None and not ranked:
            raise EngineError("the logits of a search aren't finite")
        if isinstance(search, ContrastiveSearch):
            assert states is not None
            return self._choose(sequence, search, ranked, states, plan)
        assert search is not None
        return ranked is not None and self._move_beams(sequence, search, ranked, plan)

    def _move_beams(
        self, sequence: Sequence, search: BeamSearch, ranked: Ranked, plan: Plan
    ) -> bool:
        if not search.note(sequence.choice, ranked):
            return False
        request = sequence.request
        moves = search.moves()
        if not moves:
            for each in request.sequences:
                del each.token_ids[each.num_prompt :]
            for each, result in zip(request.sequences, search.results or (), strict=False):
                each.token_ids.extend(result.token_ids)
            plan.searches.append(request)
            return True
        parents = [move.parent for move in moves]
        self._follow(request, parents, [move.token_id for move in moves], search.num_live)
        search.follow(moves)
        return False

    def _choose(
        self,
        sequence: Sequence,
        search: ContrastiveSearch,
        ranked: Ranked | None,
        states: FloatArray,
        plan: Plan,
    ) -> bool:
        request, parent = sequence.request, 0
        num_live = search.num_live
        if not search.has_candidates:
            search.add_context(states)
        if ranked is None:
            return False
        if search.has_candidates:
            if not search.note(sequence.choice, states[0], ranked):
                return False
            chosen = search.choose(sequence.num_generated - 1)
            plan.outputs.append(_output(request, chosen, sequence.num_generated))
            if chosen.finish_reason is not None:
                for each in request.sequences:
                    del each.token_ids[each.num_prompt if each.choice else -1 :]
                request.sequences[0].token_ids.append(chosen.token_id)
                return True
            parent = chosen.candidate
            ranked = search.ranked_behind(parent)
        generated = request.sequences[parent].token_ids[sequence.num_prompt :].tolist()
        candidates = search.candidates(ranked, generated)
        token_ids = [token_id for token_id, _ in candidates]
        if self._follow(request, [parent] * len(token_ids), token_ids, num_live):
            search.follow(candidates, ranked)
        else:
            del request.sequences[0].token_ids[-1]
        return False

    def _follow(
        self, request: ActiveRequest, parents: list[int], token_ids: list[int], num_live: int
    ) -> bool:
        """Give each sequence the text and the blocks of its parent among the live ones, and a
        token; False where there was no room for the blocks: all are computed again."""
        moved, live = request.sequences[: len(parents)], request.sequences[:num_live]
        sources = [live[parent] for parent in parents]
        texts = [
            source.token_ids + array("i", [token_id])
            for source, token_id in zip(sources, token_ids, strict=True)
        ]
        hashes = [source.hashes.copy() for source in sources]
        has_room = self._memory.fork(moved, sources)
        if has_room:
            for sequence in moved:
                if sequence.state is SequenceState.HELD:
                    self._queues.run(sequence)
            for sequence in live[len(moved) :]:
                self._queues.running.remove(sequence)
                self._memory.release(sequence)
                self._queues.hold(sequence)
        else:
            self._preempt(live[0])
        for sequence, text, known in zip(moved, texts, hashes, strict=True):
            sequence.token_ids, sequence.hashes = text, known
            self._queues.note_generated(sequence)
        return has_room


def _output(request: ActiveRequest, chosen: Chosen, num_generated: int) -> Output:
    return Output(
        request.sequences[0],
        chosen.token_id,
        -1,
        num_generated,
        chosen.finish_reason,
        (chosen.logprob, chosen.top),
    )
