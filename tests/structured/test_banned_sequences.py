"""What is banned is what Transformers' processors ban, wherever the text is."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
)

from lmi_core.structured.allowed_tokens import AllowedTokens
from lmi_core.structured.banned_sequences import BannedSequences, word_sequences
from lmi_core.structured.matcher import Matcher

VOCAB_SIZE = 70


def allowed_by(matcher: Matcher) -> set[int]:
    mask = np.zeros(-(-VOCAB_SIZE // 32), np.uint32)
    matcher.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCAB_SIZE]).tolist())


@pytest.mark.parametrize("ngram_size", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_bans_as_transformers(ngram_size: int, seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(4) for _ in range(rng.choice([0, 1, 30]))]
    words = [[rng.randrange(4) for _ in range(rng.choice([1, 2, 3]))] for _ in range(4)]
    processors = [NoBadWordsLogitsProcessor([list(word) for word in words])]
    if ngram_size:
        processors.append(NoRepeatNGramLogitsProcessor(ngram_size))
    prompt_ngram_size = 3 - seed if prompt else 0
    if prompt_ngram_size:
        ids = torch.tensor([prompt])
        processors.append(EncoderNoRepeatNGramLogitsProcessor(prompt_ngram_size, ids))
    matcher = BannedSequences(
        prompt,
        ngram_size=ngram_size,
        prompt_ngram_size=prompt_ngram_size,
        sequences=words,
        grammar=None,
    ).matcher()
    text = prompt[:]
    for _ in range(150):
        if rng.random() < 0.3 and len(text) > len(prompt):
            count = rng.randrange(1, len(text) - len(prompt) + 1)
            matcher.rollback(count)
            del text[len(text) - count :]
        else:
            text.append(rng.randrange(6))
            matcher.accept(text[-1])
        scores = torch.zeros(1, VOCAB_SIZE)
        for processor in processors:
            scores = processor(torch.tensor([text]), scores) if text else scores
        if text:
            assert allowed_by(matcher) == set(torch.where(scores[0] == 0)[0].tolist()), text


def test_bans_of_places_end_behind_them() -> None:
    banned_at = {0: np.array([3, 4], np.int32), 1: np.array([5], np.int32)}
    matcher = BannedSequences(
        [1, 2], ngram_size=0, sequences=[], grammar=None, banned_at=banned_at
    ).matcher()
    everything = set(range(VOCAB_SIZE))
    assert allowed_by(matcher) == everything - {3, 4}
    assert matcher.num_allowed([5, 5]) == 1
    matcher.accept(5)
    assert allowed_by(matcher) == everything - {5}
    assert not matcher.is_spent
    matcher.accept(6)
    assert allowed_by(matcher) == everything
    assert matcher.is_spent
    matcher.rollback(2)
    assert allowed_by(matcher) == everything - {3, 4}


def test_beside_what_is_allowed() -> None:
    grammar = AllowedTokens([1, 2, 3, 4], VOCAB_SIZE, None)
    banned = BannedSequences([2, 3, 2], ngram_size=2, sequences=[[1]], grammar=grammar)
    one, other = banned.matcher(), banned.matcher()
    assert one.num_allowed([4, 2, 4, 2]) == 2
    assert one.num_allowed([3, 2]) == 0
    one.accept(2)
    assert allowed_by(one) == {4}
    assert allowed_by(other) == {2, 4}
    assert not one.is_complete
    assert one.forced_tokens() == []


def test_words_at_the_beginning_and_after_a_blank() -> None:
    ids = {"bad": [5], " bad": [6, 7], "word": [], " word": [8]}
    assert word_sequences([" bad", "bad", "word"], ids.__getitem__) == [(5,), (6, 7), (8,)]
