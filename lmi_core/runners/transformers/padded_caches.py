"""KV caches of sequences that run in padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lmi_core.runners.transformers.sparsity import partition

if TYPE_CHECKING:
    from transformers import DynamicCache

    from lmi_core.runners.transformers.causal_model import CausalModel


class Chunk(NamedTuple):
    """Tokens of one sequence, which has ``start`` in its cache; logits of the last
    ``num_logits`` are wanted."""

    row: int
    """Stands for the sequence while it runs."""
    token_ids: list[int]
    start: int
    num_logits: int
    final_len: int = 0
    """Of the sequence, in the end; 0: not known."""
    begin_id: int | None = None
    """What an encoder's output begins with in the place of what the model forces, if it does."""


@dataclass(slots=True)
class Split:
    """Sequences whose caches are one tensor per layer, padded on the left."""

    rows: list[int]
    lengths: list[int]
    cache: Any
    """A DynamicCache, or what a subclass of ``PaddedCaches`` keeps."""


class PaddedCaches:
    """Runs chunks in as few padded calls as the max-sparsity rule allows.

    Lengths are those that sequences will have in the end, where that is known, as in LMI, else
    those that they have now. Sequences that decode are regrouped only when others come or go: all
    of them grow alike.
    """

    def __init__(self, model: CausalModel, max_sparsity: float, max_splits: int) -> None:
        self._model = model
        self._max_sparsity = max_sparsity
        self._max_splits = max_splits
        self._splits: dict[int, Split] = {}
        """Of each row the split that holds its cache."""
        self._decoding: list[list[int]] = []
        """The groups of the last step."""

    def drop(self, row: int) -> None:
        """Forget a sequence."""
        self._splits.pop(row, None)

    @property
    def groups(self) -> list[list[int]]:
        """The rows of each padded batch that decodes."""
        return self._decoding

    def run(self, chunks: Sequence[Chunk]) -> dict[int, torch.Tensor]:
        """Compute every chunk; per row the logits [num_logits, vocabulary] that were wanted."""
        logits: dict[int, torch.Tensor] = {}
        prompts = {chunk.row: chunk for chunk in chunks if chunk.start == 0}
        others = [chunk for chunk in chunks if chunk.start and len(chunk.token_ids) > 1]
        decoding = {c.row: c for c in chunks if c.start and len(c.token_ids) == 1}
        for rows in self._groups(prompts, decoding):
            if cached := [row for row in rows if row in decoding]:
                split = self._gather(cached)
                self._call(split, [decoding[row] for row in split.rows], logits)
            if new := [prompts[row] for row in rows if row in prompts]:
                self._prefill(new, logits)
        for chunk in others:
            self._call(self._gather([chunk.row]), [chunk], logits)
        return logits

    def _prefill(self, chunks: list[Chunk], logits: dict[int, torch.Tensor]) -> None:
        from transformers import DynamicCache

        split = Split([chunk.row for chunk in chunks], [0] * len(chunks), DynamicCache())
        self._splits |= dict.fromkeys(split.rows, split)
        self._call(split, chunks, logits)

    def _groups(self, prompts: dict[int, Chunk], decoding: dict[int, Chunk]) -> list[list[int]]:
        """Rows that share a batch from now on: prompts, which are computed apart once, and those
        that decode, are grouped together, so that they stay so in the next steps."""
        lengths_of = {row: c.final_len or len(c.token_ids) for row, c in prompts.items()}
        lengths_of |= {row: c.final_len or self._length(row) for row, c in decoding.items()}
        return self._regrouped(lengths_of)

    def _regrouped(self, lengths_of: dict[int, int]) -> list[list[int]]:
        rows = sorted(lengths_of)
        if sorted(row for group in self._decoding for row in group) != rows:
            lengths = [lengths_of[row] for row in rows]
            self._decoding = [[rows[i] for i in group] for group in self._partition(lengths)]
        return self._decoding

    def _partition(self, lengths: list[int]) -> list[list[int]]:
        return partition(lengths, self._max_sparsity, self._max_splits)

    def _length(self, row: int) -> int:
        split = self._splits[row]
        return split.lengths[split.rows.index(row)]

    def _gather(self, rows: list[int]) -> Split:
        """The split of exactly these rows, copied together unless there is one."""
        first = self._splits[rows[0]]
        if set(first.rows) == set(rows) and all(self._splits[row] is first for row in rows):
            return first
        gathered = self._merged(
            rows, [(self._splits[row], self._splits[row].rows.index(row)) for row in rows]
        )
        self._splits |= dict.fromkeys(rows, gathered)
        return gathered

    def _merged(self, rows: list[int], sources: list[tuple[Split, int]]) -> Split:
        """A split of these rows, each copied from its place in another."""
        lengths = [split.lengths[i] for split, i in sources]
        parts = [(split.cache, i, split.lengths[i]) for split, i in sources]
        return Split(rows, lengths, merge(parts, max(lengths)))

    def _call(self, split: Split, chunks: list[Chunk], logits: dict[int, torch.Tensor]) -> None:
        """Only prompts differ in length: those of one split are padded to the longest."""
        width = max(len(chunk.token_ids) for chunk in chunks)
        padded = [[0] * (width - len(chunk.token_ids)) + chunk.token_ids for chunk in chunks]
        mask, positions = self._padding(split, chunks)
        num_logits = max(1, max(chunk.num_logits for chunk in chunks))
        self._model.begin(split.rows)
        values, _ = self._model(
            torch.tensor(padded, device=self._model.device),
            split.cache,
            num_logits,
            mask=mask,
            positions=positions,
        )
        for chunk, rows in zip(chunks, values, strict=True):
            logits[chunk.row] = rows[num_logits - chunk.num_logits :]

    def _padding(self, split: Split, chunks: list[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        """Count the chunks' tokens; the mask of what is cached then, and the tokens' positions."""
        width = max(len(chunk.token_ids) for chunk in chunks)
        split.lengths = [
            length + len(chunk.token_ids)
            for length, chunk in zip(split.lengths, chunks, strict=True)
        ]
        device = self._model.device
        lengths = torch.tensor(split.lengths).unsqueeze(1)
        total = max(split.lengths)
        mask = (torch.arange(total) >= total - lengths).long()
        positions = (lengths - width + torch.arange(width)).clamp(min=0)
        return mask.to(device), positions.to(device)


def merge(
    parts: list[tuple[DynamicCache, int, int]], width: int, *, is_left: bool = True
) -> DynamicCache:
    """A cache of ``width`` tokens: of each part its cache, the sequence in it, and the tokens of
    that. Padding is on the left, there as here, or on the right."""
    from transformers import DynamicCache

    merged = DynamicCache()
    for layer in range(len(parts[0][0].layers)):
        if not getattr(parts[0][0].layers[layer], "is_initialized", False):
            continue
        keys, values = (
            _pad(
                [(getattr(cache.layers[layer], name)[i], length) for cache, i, length in parts],
                width,
                is_left=is_left,
            )
            for name in ("keys", "values")
        )
        merged.update(keys, values, layer)
    return merged


def _pad(parts: list[tuple[torch.Tensor, int]], width: int, *, is_left: bool) -> torch.Tensor:
    """Each [heads, tokens, columns] and how many of its tokens: [parts, heads, width, columns]."""
    num_heads, _, num_columns = parts[0][0].shape
    merged = parts[0][0].new_zeros(len(parts), num_heads, width, num_columns)
    for target, (part, length) in zip(merged, parts, strict=True):
        if is_left:
            target[:, width - length :] = part[:, part.shape[1] - length :]
        else:
            target[:, :length] = part[:, :length]
    return merged


class SingleCaches:
    """Runs one sequence per call, for models whose state is more than keys and values.

    What follows a prompt goes token by token, also the rest of one that was cut: recurrent models
    take several tokens at the start only.
    """

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._caches: dict[int, Any] = {}

    def drop(self, row: int) -> None:
        """Forget a sequence."""
        self._caches.pop(row, None)

    @property
    def groups(self) -> list[list[int]]:
        return [[row] for row in self._caches]

    def run(self, chunks: Sequence[Chunk]) -> dict[int, torch.Tensor]:
        """Compute every chunk; per row the logits [num_logits, vocabulary] that were wanted."""
        return {chunk.row: self._run(chunk) for chunk in chunks}

    def _run(self, chunk: Chunk) -> torch.Tensor:
        ids = torch.tensor([chunk.token_ids], device=self._model.device)
        num_logits = max(1, chunk.num_logits)
        self._model.begin([chunk.row])
        if chunk.start == 0:
            logits, cache = self._model(ids, None, num_logits)
        else:
            cache, parts = self._caches[chunk.row], []
            for i in range(ids.shape[1]):
                part, cache = self._model(ids[:, i : i + 1], cache, 1)
                parts.append(part)
            logits = torch.cat(parts[-num_logits:], dim=1)
        self._caches[chunk.row] = cache
        return logits[0, num_logits - chunk.num_logits :]
