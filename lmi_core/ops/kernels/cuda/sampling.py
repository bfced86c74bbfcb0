"""From logits to token ids in one kernel; one upload before it, one download after it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmi_core.ops.device.pending_results import PendingResults
from lmi_core.ops.device.sampling_inputs import Edits as EditArrays
from lmi_core.ops.device.sampling_inputs import SamplingInputs, SamplingResults
from lmi_core.ops.kernels.cuda import library
from lmi_core.ops.kernels.fallback import fallback

MAX_TOP = 1024
"""LMI_MAX_TOP."""


def sample(logits: Tensor, inputs: SamplingInputs) -> PendingResults:
    """As ``torch_ops`` has it."""
    lacking, why = _lacking(inputs, logits.shape[1])
    if not len(lacking):
        return _sample(logits, inputs)
    rest: PendingResults
    rest_sample = fallback("sample", logits.device, why)
    if len(lacking) == len(logits):
        rest = rest_sample(logits, inputs)
        return rest
    # What others give mustn't hang on these rows' company: samplers round differently.
    rows = torch.from_numpy(lacking).to(logits.device, non_blocking=True)
    rest = rest_sample(logits[rows], inputs.of_rows(lacking))
    return _sample(logits, inputs, (lacking, rows, rest))


def _lacking(inputs: SamplingInputs, vocab_size: int) -> tuple[npt.NDArray[np.intp], str]:
    """Rows that the kernel doesn't cover, ascending, and what it lacks."""
    has_many = np.minimum(inputs.num_top, vocab_size) > MAX_TOP
    is_shaped = (inputs.epsilon_cutoff > 0) | (inputs.eta_cutoff > 0)
    is_shaped[inputs.scales[0]] = True
    reasons = []
    if has_many.any():
        reasons.append(f"more than {MAX_TOP} log-probabilities a token")
    if is_shaped.any():
        reasons.append("scales of logits, and no cutoffs")
    return np.flatnonzero(has_many | is_shaped), ", and no ".join(reasons)


def _sample(
    logits: Tensor,
    inputs: SamplingInputs,
    others: tuple[npt.NDArray[np.intp], Tensor, PendingResults] | None = None,
) -> PendingResults:
    """``others``: rows, also on the device, whose results are those."""
    num_rows, vocab_size = logits.shape
    masked_rows, masks = inputs.masks()
    structs = library.load().interface.structs
    rows = _packed_rows(inputs, masked_rows, structs["SampleRow"])
    max_top = min(int(rows["num_top"].max(initial=0)), vocab_size)
    lists = [_by_row(edits, num_rows) for edits in (inputs.biases, inputs.seen, inputs.bans)]
    is_modified = len(masked_rows) > 0 or any(len(ids) for _, ids, _ in lists)
    uploaded = _upload(
        [
            rows.view(np.int32),
            masks.view(np.int32).ravel(),
            *(array for edits in lists for array in edits),
        ],
        logits,
    )
    edits = [
        structs["Edits"](*(tensor.data_ptr() for tensor in uploaded[i : i + 3])) for i in (2, 5, 8)
    ]
    results = torch.empty(4 + 2 * max_top, num_rows, dtype=torch.int32, device=logits.device)
    top_ids = results[4 : 4 + max_top].view(num_rows, max_top)
    top_logprobs = results[4 + max_top :].view(num_rows, max_top)
    modified = torch.empty_like(logits) if is_modified else None
    library.call(
        "sample",
        logits,
        logits=logits,
        modified=modified,
        rows=uploaded[0],
        biases=edits[0],
        seen=edits[1],
        bans=edits[2],
        masks=uploaded[1],
        token_ids=results[0],
        logprobs=results[1],
        num_top=results[2],
        target_ranks=results[3],
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        num_rows=num_rows,
        vocab_size=vocab_size,
        max_top=max_top,
        num_mask_words=masks.shape[-1],
    )
    if others is None:
        return PendingResults(results[0], results, partial(_unpack, max_top))
    rest_rows, rest_at, rest = others
    results[0].index_copy_(0, rest_at, rest.token_ids.int())

    def unpack(host: npt.NDArray[np.int32]) -> SamplingResults:
        return _unpack(max_top, host).replaced(rest_rows, rest.wait())

    return PendingResults(results[0], results, unpack)


def _packed_rows(
    inputs: SamplingInputs, masked_rows: npt.NDArray[np.int32], struct: Any
) -> npt.NDArray[Any]:
    rows = np.zeros(len(inputs.num_top), np.dtype(struct))
    for name in set(rows.dtype.names or ()) - {"mask", "target_id", "num_top"}:
        rows[name] = getattr(inputs, name)
    rows["num_top"] = np.minimum(inputs.num_top, MAX_TOP)
    rows["target_id"] = inputs.target_ids
    rows["mask"] = -1
    rows["mask"][masked_rows] = np.arange(len(masked_rows))
    return rows


def _by_row(edits: EditArrays, num_rows: int) -> tuple[npt.NDArray[np.int32], ...]:
    """Offsets per row, ids, values as bits."""
    rows, ids, values = edits
    order = np.argsort(rows, kind="stable")
    offsets = np.zeros(num_rows + 1, np.int32)
    offsets[1:] = np.bincount(rows, minlength=num_rows).cumsum()
    bits = values.astype(np.float32)[order].view(np.int32)
    return offsets, ids[order].astype(np.int32), bits


def _upload(arrays: list[npt.NDArray[np.int32]], like: Tensor) -> list[Tensor]:
    """Views of one device buffer, each on 16 bytes."""
    sizes = [-(-array.size // 4) * 4 for array in arrays]
    is_cuda = like.device.type == "cuda"
    staging = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=is_cuda)
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    for start, array in zip(starts, arrays, strict=True):
        staging[start : start + array.size] = torch.from_numpy(array)
    buffer = staging.to(like.device, non_blocking=True)
    return [buffer[s : s + array.size] for s, array in zip(starts, arrays, strict=True)]


def _unpack(max_top: int, host: npt.NDArray[np.int32]) -> SamplingResults:
    shape = (host.shape[1], max_top)
    return SamplingResults(
        token_ids=host[0],
        logprobs=host[1].view(np.float32),
        num_top=host[2],
        target_ranks=host[3],
        top_ids=host[4 : 4 + max_top].reshape(shape),
        top_logprobs=host[4 + max_top :].reshape(shape).view(np.float32),
    )
