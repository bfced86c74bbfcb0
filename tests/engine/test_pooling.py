"""Embeddings and scores of decoders: as transformers computes them, and the same bits whatever
else the engine does."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.pooling_params import PoolingParams
from lmi_core.errors import ContextLengthError, UserError
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.text.framed_text import FramedText
from lmi_core.text.tokenizer import Tokenizer
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.hf_config import UnsupportedSettingError
from tests.checkpoints import cached_checkpoint, make_checkpoint
from tests.pooled_checkpoints import DECODERS, decoder, write_modules
from tests.tiny_tokenizer import VOCAB_SIZE

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


RAW = PoolingParams(normalize=False)


def engine_of(model: Path, **settings: Any) -> Engine:
    settings = {"num_threads": 1, "kv_cache_bytes": 16 << 20, "block_size": 16, **settings}
    return Engine(EngineConfig(model=model, **settings), check_integrity=True)


def inputs(lengths: tuple[int, ...] = (1, 2, 17, 60, 130)) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(4, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def hidden_states(path: Path, ids: list[int]) -> FloatArray:
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        states: FloatArray = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    return states


@pytest.mark.parametrize("name", DECODERS)
@in_a_loop
async def test_last_hidden_state_is_that_of_transformers(name: str) -> None:
    async with engine_of(decoder(name)) as engine:
        for ids in inputs():
            wanted = hidden_states(decoder(name), ids)[-1]
            vector = await engine.embed(ids, RAW)
            assert np.abs(vector - wanted).max() <= 1e-4 * wanted.std()
            unit = await engine.embed(ids)
            np.testing.assert_allclose(unit, wanted / np.linalg.norm(wanted), atol=1e-5)


@in_a_loop
async def test_mean_of_a_decoder_that_is_asked_for_it(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(decoder("qwen3"), path)
    write_modules(path, "mean_tokens", sentence_bert_config={"max_seq_length": 100})
    async with engine_of(path, max_num_batched_tokens=40) as engine:
        assert engine.max_model_len == 100
        for ids in inputs((1, 17, 60, 100)):
            wanted = hidden_states(path, ids).mean(0)
            vector = await engine.embed(ids, RAW)
            assert np.abs(vector - wanted).max() <= 1e-4 * wanted.std()


@in_a_loop
async def test_same_bits_in_any_batch_chunk_and_cache(tmp_path: Path) -> None:
    mean, last = tmp_path / "mean", tmp_path / "last"
    for path, mode in ((mean, "mean_tokens"), (last, "lasttoken")):
        shutil.copytree(decoder("mistral"), path)
        write_modules(path, mode)
    prefix = inputs((70,))[0]
    asked = inputs((1, 2, 15, 33, 100, 300)) + [prefix + more for more in inputs((5, 6, 40))]
    for path in (mean, last):
        async with engine_of(path, enable_prefix_caching=False, max_num_seqs=1) as engine:
            alone = [(await engine.embed(ids)).tobytes() for ids in asked]
        for budget, num_seqs in ((32, 4), (200, 32)):
            settings = {"max_num_batched_tokens": budget, "max_num_seqs": num_seqs}
            async with engine_of(path, **settings, num_threads=2) as engine:
                for seed in range(3):
                    order = random.Random(seed).sample(range(len(asked)), len(asked))
                    found = await asyncio.gather(*(engine.embed(asked[i]) for i in order))
                    assert [vector.tobytes() for vector in found] == [alone[i] for i in order]
                hits = engine.stats().totals.num_cached_tokens
                assert (hits > 0) == (path is last)
                assert engine.stats().num_used_blocks == 0


@in_a_loop
async def test_prompts_of_the_model_are_put_before_texts(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(decoder("qwen3"), path)
    prompts = {"query": "Find it: ", "plain": ""}
    settings = {"prompts": prompts, "default_prompt_name": "query"}
    write_modules(path, "lasttoken", config_sentence_transformers=settings)
    async with engine_of(path) as engine:
        plain = PoolingParams(prompt_name="plain")
        whole = await engine.embed("Find it: a fox", plain)
        np.testing.assert_array_equal(await engine.embed("a fox"), whole)
        assert (await engine.embed("a fox", plain) != whole).any()
        with pytest.raises(UserError, match="'query', 'plain'"):
            await engine.embed("a fox", PoolingParams(prompt_name="title"))


@in_a_loop
async def test_normalising_is_an_option() -> None:
    async with engine_of(decoder("qwen3"), normalize=False) as engine:
        np.testing.assert_array_equal(await engine.embed([5]), await engine.embed([5], RAW))
        unit = await engine.embed([5], PoolingParams(normalize=True))
        assert np.linalg.norm(unit) == pytest.approx(1, abs=1e-6)


@in_a_loop
async def test_dimensions_are_cut_before_the_length_is_one() -> None:
    async with engine_of(decoder("qwen3")) as engine:
        whole = await engine.embed([5, 6, 7], RAW)
        part = await engine.embed([5, 6, 7], PoolingParams(dimensions=16))
        np.testing.assert_allclose(part, whole[:16] / np.linalg.norm(whole[:16]), rtol=1e-5)
        for wrong in (0, 65):
            with pytest.raises(UserError, match=r"dimensions is .*1 to 64"):
                await engine.embed([5], PoolingParams(dimensions=wrong))


@in_a_loop
async def test_too_long_inputs_are_refused_or_cut() -> None:
    async with engine_of(decoder("qwen3"), max_model_len=32) as engine:
        ids = inputs((40,))[0]
        with pytest.raises(ContextLengthError, match="32 tokens, but the input has 40"):
            await engine.embed(ids)
        for truncate, kept in (("left", ids[8:]), ("right", ids[:32])):
            cut = await engine.embed(ids, PoolingParams(truncate=truncate))  # type: ignore[arg-type]
            np.testing.assert_array_equal(cut, await engine.embed(kept))
        text = "The quick fox " * 40
        with pytest.raises(ContextLengthError):
            await engine.embed(text)
        kept = engine.tokenizer.encode_now(text)[:32]
        cut = await engine.embed(text, PoolingParams(truncate="right"))
        np.testing.assert_array_equal(cut, await engine.embed(kept))


@in_a_loop
async def test_a_model_gives_what_it_is_for() -> None:
    async with engine_of(decoder("qwen3")) as engine:
        with pytest.raises(UserError, match="gives embeddings, it doesn't generate"):
            await engine.complete("a fox")
        with pytest.raises(UserError, match="doesn't score pairs"):
            await engine.score("a fox", "a heron")
        with pytest.raises(UserError, match="empty"):
            await engine.embed("")
    with pytest.raises(UserError, match="can't generate text"):
        await engine_of(decoder("qwen3"), task="generate").start()
    async with engine_of(cached_checkpoint("qwen3")) as engine:
        with pytest.raises(UserError, match="generates text"):
            await engine.embed("a fox")
    async with engine_of(cached_checkpoint("qwen3"), task="embed") as engine:
        vector = await engine.embed([5, 6], RAW)
        np.testing.assert_allclose(
            vector, hidden_states(cached_checkpoint("qwen3"), [5, 6])[-1], atol=1e-4
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n": 2}, "n is for generated texts, not for embeddings and scores: leave it out"),
        ({"num_beams": 2}, "num_beams is for generated texts"),
        ({"echo": True}, "echo is for generated texts"),
        ({"params": {}}, "pooling is {}; allowed are PoolingParams, None"),
        ({"params": PoolingParams(truncate="both")}, "truncate is 'both'; allowed are , left"),  # type: ignore[arg-type]
        ({"params": PoolingParams(dimensions=2.5)}, "dimensions is 2.5; allowed are int, None"),  # type: ignore[arg-type]
    ],
)
@in_a_loop
async def test_what_no_embedding_has_is_refused(options: dict[str, Any], said: str) -> None:
    async with engine_of(decoder("qwen3")) as engine:
        with pytest.raises(UserError, match=said):
            await asyncio.wait_for(engine.embed("a fox", **options), 10)


@pytest.mark.parametrize("name", DECODERS)
@in_a_loop
async def test_classifiers_score_pairs(name: str) -> None:
    kind = "AutoModelForSequenceClassification"
    path = decoder(name, kind)
    oracle = getattr(transformers, kind).from_pretrained(path, dtype=torch.float32)
    async with engine_of(path) as engine:
        ids = Tokenizer.load(path)._encode_whole(FramedText("a fox", "runs away"), 99, "").ids
        with torch.no_grad():
            wanted = float(oracle(torch.tensor([ids])).logits[0, 0])
        assert await engine.score("a fox", "runs away", raw=True) == pytest.approx(wanted, abs=1e-4)
        sigmoid = 1 / (1 + np.exp(-wanted))
        assert await engine.score("a fox", "runs away") == pytest.approx(sigmoid, abs=1e-5)
        with pytest.raises(UserError, match="scores pairs"):
            await engine.embed("a fox")


@in_a_loop
async def test_a_model_that_answers_yes_or_no(tmp_path: Path) -> None:
    """As Qwen3-Reranker's model card computes it."""
    for tied in (True, False):
        path = make_checkpoint(tmp_path / f"{tied}", "qwen3", tie_word_embeddings=tied)
        answers = add_answers(path)
        oracle = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        async with engine_of(path, task="rerank") as engine:
            score = await engine.score("a fox", "The fox sleeps.")
            encode = engine.tokenizer.encode_now
            ids = encode(
                "<|im_start|>system\nJudge whether the Document meets the requirements based on "
                "the Query and the Instruct provided. Note that the answer can only be "
                '"yes" or "no".<|im_end|>\n<|im_start|>user\n'
            )
            ids += encode(
                "<Instruct>: Given a web search query, retrieve relevant passages that answer the "
                "query\n<Query>: a fox\n<Document>: The fox sleeps."
            )
            ids += encode("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
            with torch.no_grad():
                logits = oracle(torch.tensor([ids])).logits[0, -1, answers]
            assert score == pytest.approx(float(torch.softmax(logits, 0)[1]), abs=1e-5)


def add_answers(path: Path) -> list[int]:
    """Let two tokens of the vocabulary be no and yes."""
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    merged = {"".join(merge) for merge in tokenizer["model"]["merges"]}
    spare = [token for token in vocabulary if token not in merged and len(token) == 1][-2:]
    for token, name in zip(spare, ("no", "yes"), strict=True):
        vocabulary[name] = vocabulary.pop(token)
    file.write_text(json.dumps(tokenizer))
    return [vocabulary["no"], vocabulary["yes"]]


@in_a_loop
async def test_what_can_not_be_pooled_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(decoder("qwen3"), path)
    write_modules(path, "max_tokens")
    with pytest.raises(UnsupportedSettingError, match="pooling_mode_max_tokens"):
        await engine_of(path).start()
    with pytest.raises(UserError, match="can't score pairs"):
        await engine_of(decoder("mistral"), task="rerank").start()
    kind = "AutoModelForSequenceClassification"
    with pytest.raises(UserError, match="it has no embeddings"):
        await engine_of(decoder("mistral", kind), task="embed").start()
