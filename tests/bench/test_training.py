"""What a training step sees: rows cut from the corpus, and the tokens that its loss counts."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from bench.demo.bpe import load_tokenizer
from bench.demo.chat import Turn, render_chat, render_text
from bench.demo.corpus import LONG_SOURCES, SHORT_SOURCES, documents
from bench.demo.packing import (
    PAD_ID,
    WIDTH_STEP,
    cut_batches,
    cut_rows,
    document_batches,
)
from lmi_core.demo import MODEL_DIR

torch = pytest.importorskip("torch")

TOKENIZER = load_tokenizer(MODEL_DIR)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def counted_text(ids: list[int], monkeypatch: pytest.MonkeyPatch, prompt_share: float) -> str:
    from bench.demo import train

    monkeypatch.setattr(train, "PROMPT_SHARE", prompt_share)
    counted = train.is_counted(torch.tensor([ids]))[0].tolist()
    chosen = [target for target, is_in in zip(ids[1:], counted, strict=True) if is_in]
    return TOKENIZER.decode(chosen, skip_special_tokens=False)


def test_cut_rows_are_the_stream_in_pieces() -> None:
    texts = list(islice(documents(3, sources=LONG_SOURCES), 30))
    stream = [token for text in texts for token in ids_of(text)]
    (rows,) = cut_rows(iter(texts), TOKENIZER, 128, seed=1)
    assert rows.shape == (len(stream) // 128, 128)
    whole = np.array(stream[: rows.size]).reshape(rows.shape)
    assert sorted(map(tuple, rows)) == sorted(map(tuple, whole))


def test_cut_batches_are_rows_of_a_fixed_number() -> None:
    texts = list(islice(documents(3, sources=LONG_SOURCES), 30))
    batches = list(cut_batches(iter(texts), TOKENIZER, 128, 512, seed=1))
    assert {batch.shape for batch in batches} == {(4, 128)}
    (rows,) = cut_rows(iter(texts), TOKENIZER, 128, seed=1)
    assert np.array_equal(np.concatenate(batches), rows[: len(rows) // 4 * 4])


def test_document_batches_hold_each_document_once_and_alone() -> None:
    texts = list(islice(documents(3, sources=SHORT_SOURCES), 200))
    rows = []
    for batch in document_batches(iter(texts), TOKENIZER, 200, 1000, seed=1):
        assert batch.shape[1] % WIDTH_STEP == 0
        assert len(batch) == 1 or batch.size <= 1000 + len(batch) * WIDTH_STEP
        rows += [tuple(row.tolist()) for row in batch]
    padded = [ids + [PAD_ID] * (-len(ids) % WIDTH_STEP) for ids in (ids_of(t)[:200] for t in texts)]
    without_padding = sorted(" ".join(map(str, row)).rstrip(" 1") for row in rows)
    assert without_padding == sorted(" ".join(map(str, row)).rstrip(" 1") for row in padded)


def test_loss_counts_answers_and_plain_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [Turn("system", "Be kind."), Turn("user", "Who?"), Turn("assistant", "A fox.")]
    ids = ids_of(render_chat(turns) + render_text("A bear."))
    # A begin token after an end and the first role are counted with what stands before them.
    assert counted_text(ids, monkeypatch, 0.0) == (
        "<|system|>A fox.<|end|><|begin|>A bear.<|endoftext|>"
    )


def test_loss_counts_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [*ids_of(render_text("A bear.")), PAD_ID, PAD_ID]
    assert counted_text(ids, monkeypatch, 0.0) == "A bear.<|endoftext|>"


def test_loss_counts_a_share_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = render_chat([Turn("user", "Who?"), Turn("assistant", "A fox.")])
    assert counted_text(ids_of(chat), monkeypatch, 1.0) == chat.removeprefix("<|begin|>")
