"""From logits to token ids; the rules are those of the native sampler (csrc/cpu/isa/sample.inc).

Filters keep a prefix of the tokens in order of (logit descending, id ascending), typical-p one in
order of distances from the mean logit. Unfiltered draws
go through the tokens in order of ids, as the native sampler does, so that both choose alike but for
rounding; filtered ones go through them in descending order, which only the distribution shares.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmi_core.ops.device.pending_results import PendingResults
from lmi_core.ops.device.sampling_inputs import Edits, SamplingInputs, SamplingResults

_LOWEST = torch.finfo(torch.float32).min


def sample(logits: Tensor, inputs: SamplingInputs, *, is_by_row: bool = False) -> PendingResults:
    """fp32 [L, vocab]. A row with a NaN or infinite logit, or with all tokens banned, gets -1.

    ``is_by_row``: what adds up goes row by row, so that it adds up alike whatever else is there.
    """
    parts = torch.split(logits, 1) if is_by_row and len(logits) else (logits,)
    plain_mass = torch.cat([part.logsumexp(-1) for part in parts])
    modified = _modify(logits, inputs)
    best, token_ids = modified.max(-1)
    _draw(modified, best, token_ids, inputs, is_by_row)
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
    return _pack(token_ids, logprobs, top_ids, top_logprobs, is_valid, inputs.num_top)


def in_order(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` greatest logits of every row and their ids, lower id first among equals."""
    if count == 0:
        empty = logits.new_empty(len(logits), 0)
        return empty, empty.long()
    bits = (logits + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(logits.shape[1], device=logits.device)
    candidates = (ordered << 32) | (0xFFFFFFFF - ids)
    chosen = 0xFFFFFFFF - (candidates.topk(count).values & 0xFFFFFFFF)
    return logits.gather(1, chosen), chosen


def _modify(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Logit bias, penalties, bans, masks; a copy only where there is something to change."""
    masked_rows, masks = inputs.masks()
    edited = (inputs.biases, inputs.seen, inputs.bans)
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


def _draw(
    logits: Tensor, best: Tensor, token_ids: Tensor, inputs: SamplingInputs, is_by_row: bool
) -> None:
    """Replace the most likely token by a drawn one in rows with a temperature."""
    is_top_k = (inputs.top_k > 0) & (inputs.top_k < logits.shape[1])
    is_filtered = is_top_k | (inputs.top_p < 1) | (inputs.min_p > 0) | (inputs.typical_p < 1)
    is_drawn = inputs.temperature > 0
    for rows_of, draw in (
        (is_drawn & ~is_filtered, _draw_unfiltered),
        (is_drawn & is_filtered, _draw_filtered),
    ):
        drawn = np.flatnonzero(rows_of)
        for chosen in np.split(drawn, len(drawn)) if is_by_row and len(drawn) else (drawn,):
            if not len(chosen):
                continue
            rows = _to(chosen, logits)
            token_ids[rows] = draw(logits[rows], best[rows].unsqueeze(1), inputs, chosen)


def _draw_unfiltered(
    logits: Tensor, best: Tensor, inputs: SamplingInputs, rows: npt.NDArray[np.int64]
) -> Tensor:
    weights = ((logits - best) / _column(inputs.temperature, rows, logits)).exp().double()
    return _pick(weights, _column(inputs.uniform, rows, logits))


def _draw_filtered(
    logits: Tensor, best: Tensor, inputs: SamplingInputs, rows: npt.NDArray[np.int64]
) -> Tensor:
    vocab_size = logits.shape[1]
    top_k = inputs.top_k[rows]
    top_k = np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size)
    values, ids = in_order(logits, int(top_k.max()))
    weights = ((values - best) / _column(inputs.temperature, rows, logits)).exp()
    rank = torch.arange(weights.shape[1], device=logits.device)
    min_p = _column(inputs.min_p, rows, logits)
    kept = torch.where(rank < _to(top_k, logits).unsqueeze(1), weights, 0.0).double()
    before = kept.cumsum(-1) - kept
    top_p = _column(inputs.top_p, rows, logits).double()
    kept = torch.where((top_p >= 1) | (before < top_p * kept.sum(-1, keepdim=True)), kept, 0.0)
    kept = torch.where(weights >= min_p, kept, 0.0)
    if (inputs.typical_p[rows] < 1).any():
        kept = _typical(kept, values, _column(inputs.typical_p, rows, logits).double())
    drawn = _pick(kept, _column(inputs.uniform, rows, logits))
    return ids.gather(1, drawn.unsqueeze(1)).squeeze(1)


def _typical(weights: Tensor, values: Tensor, typical_p: Tensor) -> Tensor:
    """Only the weights whose surprise is closest to the entropy (csrc/cpu/isa/typical.inc)."""
    mass = weights.sum(-1, keepdim=True)
    mean = torch.where(weights > 0, weights * values, 0.0).sum(-1, keepdim=True) / mass
    distances = torch.where(weights > 0, (values - mean.float()).abs(), torch.inf)
    order = distances.argsort(stable=True)
    nearest = weights.gather(1, order)
    before = nearest.cumsum(-1) - nearest
    is_kept = (typical_p >= 1) | (before < typical_p * mass)
    is_kept[:, :1] = True
    return torch.zeros_like(weights).scatter(1, order, torch.where(is_kept, nearest, 0.0))


def _pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose running sum exceeds the fraction ``uniform`` of a row's mass."""
    sums = weights.cumsum(-1)
    drawn = torch.searchsorted(sums, uniform * sums[:, -1:], right=True).squeeze(1)
    # Rounding may lead past the last index of any weight.
    indices = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, indices, 0).amax(-1)
    return torch.minimum(drawn, last)


def _pack(
    token_ids: Tensor,
    logprobs: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
    is_valid: Tensor,
    num_top: npt.NDArray[np.int32],
) -> PendingResults:
    """Everything in one tensor, for one copy."""
    columns = [token_ids.unsqueeze(1), is_valid.unsqueeze(1), top_ids]
    floats = torch.cat([logprobs.unsqueeze(1), top_logprobs], dim=1).float().view(torch.int32)
    packed = torch.cat([*(column.int() for column in columns), floats], dim=1)
    num_most = top_ids.shape[1]

    def unpack(host: npt.NDArray[np.int32]) -> SamplingResults:
        values = np.ascontiguousarray(host[:, 2 + num_most :]).view(np.float32)
        return SamplingResults(
            token_ids=host[:, 0],
            logprobs=values[:, 0],
            top_ids=host[:, 2 : 2 + num_most],
            top_logprobs=values[:, 1:],
            num_top=np.where(host[:, 1] != 0, np.minimum(num_top, num_most), 0).astype(np.int32),
        )

    return PendingResults(token_ids, packed, unpack)


def _to(values: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device, non_blocking=True)


def _column(values: npt.NDArray[np.generic], rows: npt.NDArray[np.int64], like: Tensor) -> Tensor:
    return _to(values[rows], like).unsqueeze(1)


def _edits(edits: Edits, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, ids, values = (_to(part, like) for part in edits)
    return rows.long(), ids.long(), values
