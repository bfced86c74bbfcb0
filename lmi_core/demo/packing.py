"""Documents packed into rows of equal length, few of them cut and little padded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

PAD_ID = 1
"""Padding is the end-of-text token; it follows an end token only, where it costs no loss."""

CHUNK_SIZE = 2048
"""Documents that are packed together."""

Rows = NDArray[np.uint16]


def pack_chunk(documents: list[list[int]], length: int) -> Rows:
    """Rows `[num_rows, length]` by best fit, longest document first; longer ones are cut."""
    rooms: list[list[list[int]]] = [[] for _ in range(length + 1)]
    for ids in sorted((document[:length] for document in documents), key=len, reverse=True):
        room = next((size for size in range(len(ids), length) if rooms[size]), length)
        row = rooms[room].pop() if rooms[room] else []
        row.extend(ids)
        rooms[length - len(row)].append(row)
    rows = [row + [PAD_ID] * (length - len(row)) for room in rooms for row in room]
    return np.array(rows, dtype=np.uint16)


def packed_rows(
    texts: Iterable[str], tokenizer: Tokenizer, length: int, seed: int
) -> Iterator[Rows]:
    """Rows of `length` tokens, chunk by chunk, shuffled within each chunk."""
    rng = np.random.default_rng(seed)
    source = iter(texts)
    while chunk := list(islice(source, CHUNK_SIZE)):
        encodings = tokenizer.encode_batch(chunk, add_special_tokens=False)
        rows = pack_chunk([encoding.ids for encoding in encodings], length)
        yield rng.permutation(rows)
