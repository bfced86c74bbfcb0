"""From logits to token ids; the rules are those of the native sampler (csrc/cpu/isa/sample.inc).

Filters keep a prefix of the tokens in order of (logit descending, id ascending), typical-p one in
order of distances from the mean logit, and cutoffs (csrc/cpu/isa/cutoffs.inc) what has a share of
so much. Draws go through what is kept in order of ids, with masses that are integers: those of
csrc/cuda/sample.cu too, so that both choose alike but for the rounding of exponentials. The CPU's
draws choose alike where nothing is filtered.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmi_core.ops.device.pending_results import PendingResults
from lmi_core.ops.device.sampling_inputs import (
    Edits,
    SamplingInputs,
    SamplingResults,
)

_Rows = npt.NDArray[np.int64]
UNIT = 2.0**40
"""Masses are multiples of this part of the greatest."""
_LOWEST = torch.finfo(torch.float32).min


def sample(logits: Tensor, inputs: SamplingInputs, *, is_by_row: bool = False) -> PendingResults:
    """fp32 [L, vocab]. A row with a NaN or infinite logit, or with all tokens banned, gets -1.

    ``is_by_row``: sums of floats go row by row, so that they add up alike whatever else is there.
    """
    parts = torch.split(logits, 1) if is_by_row and len(logits) else (logits,)
    plain_mass = torch.cat([part.logsumexp(-1) for part in parts])
    modified = _modify(logits, inputs)
    best, token_ids = modified.max(-1)
    _draw(modified, best, token_ids, inputs)
    is_valid = plain_mass.isfinite() & (best >= _LOWEST)
    is_sampled = _to(inputs.is_sampled, logits) & is_valid
    token_ids = torch.where(is_sampled, token_ids, -1)

    targets = _to(inputs.target_ids, logits).long()
    reported = torch.where(targets >= 0, targets, token_ids)
    logprobs = logits.gather(1, reported.clamp(min=0).unsqueeze(1)).squeeze(1) - plain_mass
    logprobs = torch.where(reported >= 0, logprobs, 0.0)

    num_most = min(int(inputs.num_top.max(initial=0)), logits.shape[1])
    _, top_ids = in_order(logits, num_most)
    top_logprobs = logits.gather(1, top_ids) - plain_mass.unsqueeze(1)
    ranks = torch.where(is_valid, _ranks(logits, inputs.target_ids), 0)
    return _pack(token_ids, logprobs, top_ids, top_logprobs, is_valid, ranks, inputs.num_top)


def _ranks(logits: Tensor, target_ids: npt.NDArray[np.int32]) -> Tensor:
    """[L]: the places of targets, from 1, lower ids first among equals; 0: a row has none."""
    ranks = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    rows = np.flatnonzero(target_ids >= 0)
    if len(rows):
        at, targets = _to(rows, logits), _column(target_ids, rows, logits).long()
        others = logits[at]
        own, ids = others.gather(1, targets), torch.arange(logits.shape[1], device=logits.device)
        is_before = (others > own) | (others == own) & (ids <= targets)
        ranks[at] = is_before.sum(-1, dtype=torch.int32)
    return ranks


def in_order(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` greatest logits of every row and their ids, lower id first among equals:
    fp32 and int64 [L, count]."""
    if count == 0:
        empty = logits.new_empty(len(logits), 0)
        return empty, empty.long()
    ids = torch.arange(logits.shape[1], device=logits.device)
    candidates = (_in_order(logits) - (1 << 31) << 32) | (0xFFFFFFFF - ids)
    chosen = 0xFFFFFFFF - (candidates.topk(count).values & 0xFFFFFFFF)
    return logits.gather(1, chosen), chosen


def _in_order(values: Tensor) -> Tensor:
    """int64 from 0 to 2^32 - 1 in the order of the fp32 ``values``."""
    bits = (values + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() + (1 << 31)


def _modify(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Logit bias, penalties, scales, bans, masks; a copy only where something is to change."""
    masked_rows, masks = inputs.masks()
    edited = (inputs.biases, inputs.seen, inputs.scales, inputs.bans)
    if not len(masked_rows) and not any(len(edits[0]) for edits in edited):
        return logits
    modified = logits.clone()
    rows, ids, biases = _edits(inputs.biases, logits)
    modified.index_put_((rows, ids), biases, accumulate=True)
    rows, ids, counts = _edits(inputs.seen, logits)
    seen, repetition = modified[rows, ids], _to(inputs.repetition_penalty, logits)[rows]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    seen -= _to(inputs.frequency_penalty, logits)[rows] * counts
    seen -= _to(inputs.presence_penalty, logits)[rows] * (counts > 0)
    modified[rows, ids] = seen
    rows, ids, above = _edits(inputs.scales[:3], logits)
    scaled, below = modified[rows, ids], _to(inputs.scales[3], logits)
    scaled *= torch.where(scaled > 0, above, below).where(scaled > _LOWEST, 1.0)
    modified[rows, ids] = scaled
    rows, ids, _ = _edits(inputs.bans, logits)
    modified[rows, ids] = -torch.inf
    if len(masked_rows):
        rows = _to(masked_rows, logits).long()
        modified[rows] = modified[rows].masked_fill(~_allowed(masks, logits), -torch.inf)
    return modified


def _allowed(masks: npt.NDArray[np.uint32], logits: Tensor) -> Tensor:
    """[rows, vocab] from the bits of the masks."""
    words = _to(masks.view(np.int32), logits).unsqueeze(2)
    bits = words >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
    return bits.flatten(1)[:, : logits.shape[1]].bool()


def _draw(logits: Tensor, best: Tensor, token_ids: Tensor, inputs: SamplingInputs) -> None:
    """Replace the most likely token by a drawn one in rows with a temperature."""
    drawn = np.flatnonzero(inputs.temperature > 0)
    if len(drawn):
        rows = _to(drawn, logits)
        masses = kept_masses(logits[rows], best[rows].unsqueeze(1), inputs, drawn)
        token_ids[rows] = _pick(masses, _column(inputs.uniform, drawn, logits))


def kept_masses(logits: Tensor, best: Tensor, inputs: SamplingInputs, rows: _Rows) -> Tensor:
    """Masses int64 [R, vocab], multiples of 2^-40 of the greatest; 0 of tokens that a filter drops.

    ``logits``: those of ``rows``; ``best``: their greatest [R, 1]. Nothing is sorted."""
    temperature = _column(inputs.temperature, rows, logits)
    weights = ((logits - best) * (1.0 / temperature)).exp()
    masses = (weights * UNIT).long()

    def keep(
        which: npt.NDArray[np.bool_], is_kept: Callable[[Tensor, npt.NDArray[np.int64]], Tensor]
    ) -> None:
        chosen = np.flatnonzero(which)
        if len(chosen):
            at = _to(chosen, logits)
            masses[at] = torch.where(is_kept(at, rows[chosen]), masses[at], 0)

    def is_top_k(at: Tensor, of: _Rows) -> Tensor:
        ones = masses.new_ones(len(at), logits.shape[1])
        return _is_in_prefix(_in_order(logits[at]), ones, _column(inputs.top_k, of, logits).long())

    def is_top_p(at: Tensor, of: _Rows) -> Tensor:
        target = _share(masses[at], _column(inputs.top_p, of, logits))
        return _is_in_prefix(_in_order(logits[at]), masses[at], target)

    def is_typical(at: Tensor, of: _Rows) -> Tensor:
        own = masses[at]
        target = _share(own, _column(inputs.typical_p, of, logits))
        distances = _distances(logits[at], own, best[at], temperature[at])
        return _is_in_prefix(_in_order(-distances), own, target)

    def is_heavy(at: Tensor, least: Tensor) -> Tensor:
        own = masses[at]
        return own >= torch.minimum(least.long(), own.amax(-1, keepdim=True))

    def is_above_epsilon(at: Tensor, of: _Rows) -> Tensor:
        total = masses[at].sum(-1, keepdim=True).double()
        return is_heavy(at, _column(inputs.epsilon_cutoff, of, logits) * total)

    def is_above_eta(at: Tensor, of: _Rows) -> Tensor:
        own, eta = masses[at], _column(inputs.eta_cutoff, of, logits).double()
        total = own.sum(-1, keepdim=True).double()
        entropy = (total / UNIT).log() + _mean_below(logits[at], own, best[at], temperature[at])
        return is_heavy(at, torch.minimum(eta, eta.sqrt() * (-entropy).exp()) * total)

    keep((inputs.top_k[rows] > 0) & (inputs.top_k[rows] < logits.shape[1]), is_top_k)
    keep(inputs.top_p[rows] < 1, is_top_p)
    keep(
        inputs.min_p[rows] > 0,
        lambda at, of: weights[at] >= _column(inputs.min_p, of, logits),
    )
    keep(inputs.typical_p[rows] < 1, is_typical)
    keep(inputs.epsilon_cutoff[rows] > 0, is_above_epsilon)
    keep(inputs.eta_cutoff[rows] > 0, is_above_eta)
    return masses


def _share(masses: Tensor, part: Tensor) -> Tensor:
    """[R, 1]: that part of each row's mass, at least a unit."""
    return (part.double() * masses.sum(-1, keepdim=True).double()).long().clamp(min=1)


def _is_in_prefix(keys: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """Which tokens are among the fewest, the greatest ``keys`` first and lower ids first among
    equals, whose weights reach ``target`` [R, 1]; int64 all. Histograms over digits of the keys
    find the last one; integers have the same sum in any order."""
    prefix = torch.zeros_like(target)
    for first, bits in ((21, 11), (10, 11), (0, 10)):
        last = (1 << bits) - 1
        own = weights if first == 21 else torch.where(keys >> first + bits == prefix, weights, 0)
        sums = own.new_zeros(len(own), last + 1)
        sums.scatter_add_(1, last - (keys >> first & last), own)
        sums = sums.cumsum(-1)
        found = torch.searchsorted(sums, target).clamp_(max=last)
        target = target - torch.where(found > 0, sums.gather(1, (found - 1).clamp(min=0)), 0)
        prefix = prefix << bits | last - found
    is_last = keys == prefix
    equals = torch.where(is_last, weights, 0)
    return (keys > prefix) | is_last & (equals.cumsum(-1) - equals < target)


def _distances(logits: Tensor, masses: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """From the mean logit of what is kept: the surprise is as far from the entropy, but for the
    temperature (csrc/cpu/isa/typical.inc)."""
    mean_below = _mean_below(logits, masses, best, temperature).float()
    return (logits - (best - mean_below * temperature)).abs()


def _mean_below(logits: Tensor, masses: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """[R, 1] fp64: how far what is kept is below the greatest logit in the mean, over the
    temperature. A token adds 1 / e of the greatest mass at most."""
    below = torch.where(masses > 0, (best - logits) / temperature, 0.0)
    moment = (masses.float() * below).long().sum(-1, keepdim=True)
    return moment.double() / masses.sum(-1, keepdim=True).double()


def _pick(masses: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose running sum exceeds the fraction ``uniform`` of a row's mass."""
    sums = masses.cumsum(-1)
    total = sums[:, -1:]
    rest = torch.minimum((uniform * total.double()).long(), total - 1)
    drawn = torch.searchsorted(sums, rest, right=True).squeeze(1)
    return drawn.clamp(max=masses.shape[1] - 1)


def _pack(
    token_ids: Tensor,
    logprobs: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
    is_valid: Tensor,
    ranks: Tensor,
    num_top: npt.NDArray[np.int32],
) -> PendingResults:
    """Everything in one tensor, for one copy."""
    columns = [*(each.unsqueeze(1) for each in (token_ids, is_valid, ranks)), top_ids]
    floats = torch.cat([logprobs.unsqueeze(1), top_logprobs], dim=1).float().view(torch.int32)
    packed = torch.cat([*(column.int() for column in columns), floats], dim=1)
    num_most = top_ids.shape[1]

    def unpack(host: npt.NDArray[np.int32]) -> SamplingResults:
        values = np.ascontiguousarray(host[:, 3 + num_most :]).view(np.float32)
        return SamplingResults(
            token_ids=host[:, 0],
            logprobs=values[:, 0],
            top_ids=host[:, 3 : 3 + num_most],
            top_logprobs=values[:, 1:],
            num_top=np.where(host[:, 1] != 0, np.minimum(num_top, num_most), 0).astype(np.int32),
            target_ranks=host[:, 2],
        )

    return PendingResults(token_ids, packed, unpack)


def _to(values: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device, non_blocking=True)


def _column(values: npt.NDArray[np.generic], rows: npt.NDArray[np.int64], like: Tensor) -> Tensor:
    return _to(values[rows], like).unsqueeze(1)


def _edits(edits: Edits, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, ids, values = (_to(part, like) for part in edits)
    return rows.long(), ids.long(), values
