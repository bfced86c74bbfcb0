"""Documents put into batches of rows: one document a row, or rows cut from one stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

PAD_ID = 1
"""Padding is the end-of-text token; it follows an end token only, where it costs no loss."""

CHUNK_SIZE = 2048
"""Documents that are sorted by length, or shuffled, together."""

WIDTH_STEP = 8
"""Rows of single documents have a multiple of so many tokens."""

Rows = NDArray[np.uint16]


def _encoded_chunks(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[list[int]]]:
    source = iter(texts)
    while chunk := list(islice(source, CHUNK_SIZE)):
        encodings = tokenizer.encode_batch(chunk, add_special_tokens=False)
        yield [encoding.ids for encoding in encodings]


def padded_batch(documents: list[list[int]]) -> Rows:
    """One document a row, padded to the longest and to a multiple of `WIDTH_STEP` tokens."""
    width = -(-max(map(len, documents)) // WIDTH_STEP) * WIDTH_STEP
    return np.array([ids + [PAD_ID] * (width - len(ids)) for ids in documents], dtype=np.uint16)


def document_batches(
    texts: Iterable[str], tokenizer: Tokenizer, most_tokens: int, batch_tokens: int, seed: int
) -> Iterator[Rows]:
    """Batches of about `batch_tokens` with one document a row, cut to `most_tokens`.

    A document is alone in its row: what other documents say would look like a part of its text.
    Documents of like length go together; the batches of a chunk are shuffled.
    """
    rng = np.random.default_rng(seed)
    for chunk in _encoded_chunks(texts, tokenizer):
        documents = sorted((ids[:most_tokens] for ids in chunk), key=len)
        groups: list[list[list[int]]] = [[]]
        for ids in documents:
            if (len(groups[-1]) + 1) * len(ids) > batch_tokens and groups[-1]:
                groups.append([])
            groups[-1].append(ids)
        for index in rng.permutation(len(groups)):
            yield padded_batch(groups[index])


def cut_rows(texts: Iterable[str], tokenizer: Tokenizer, length: int, seed: int) -> Iterator[Rows]:
    """Rows of `length` tokens cut one after the other from all documents in their order.

    A row begins anywhere in a document, so what stands at a position doesn't depend on it. The
    rows of a chunk are shuffled.
    """
    rng = np.random.default_rng(seed)
    rest = np.empty(0, dtype=np.uint16)
    for chunk in _encoded_chunks(texts, tokenizer):
        stream = np.concatenate([rest, *(np.array(ids, dtype=np.uint16) for ids in chunk)])
        num_rows = len(stream) // length
        rest = stream[num_rows * length :]
        yield rng.permutation(stream[: num_rows * length].reshape(num_rows, length))


def cut_batches(
    texts: Iterable[str], tokenizer: Tokenizer, length: int, batch_tokens: int, seed: int
) -> Iterator[Rows]:
    """Batches of `batch_tokens` of the rows of `cut_rows`."""
    num_rows = batch_tokens // length
    for rows in cut_rows(texts, tokenizer, length, seed):
        for start in range(0, len(rows) - num_rows + 1, num_rows):
            yield rows[start : start + num_rows]
