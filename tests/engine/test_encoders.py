"""BERT and its kin: as transformers computes them, and the same bits in any batch."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmi_core import _native
from lmi_core.errors import ContextLengthError, UserError
from lmi_core.text.framed_text import FramedText
from lmi_core.text.tokenizer import Tokenizer
from lmi_core.weights.formats import FloatArray
from tests.engine.test_pooling import RAW, engine_of, in_a_loop, inputs
from tests.pooled_checkpoints import ENCODERS, encoder, write_modules
from tests.tiny_tokenizer import SPECIAL_TOKENS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CLASSIFIER = "AutoModelForSequenceClassification"
LENGTHS = (1, 2, 17, 60, 130, 257, 300)


def hidden_states(path: Path, ids: list[int], dtype: Any = torch.float32) -> FloatArray:
    model = transformers.AutoModel.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        output = model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)))
    states: FloatArray = output.last_hidden_state[0].float().numpy()
    return states


@pytest.mark.parametrize("name", ENCODERS)
@in_a_loop
async def test_means_are_those_of_transformers(name: str) -> None:
    async with engine_of(encoder(name)) as engine:
        for ids in inputs(LENGTHS):
            wanted = hidden_states(encoder(name), ids).mean(0)
            vector = await engine.embed(ids, RAW)
            assert np.abs(vector - wanted).max() <= 1e-4 * wanted.std(), len(ids)


@in_a_loop
async def test_layers_are_of_the_types_that_are_listed(tmp_path: Path) -> None:
    """Whatever the period is, which newer files may lack."""
    path = shutil.copytree(encoder("modernbert"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["layer_types"].reverse()
    del config["global_attn_every_n_layers"]
    (path / "config.json").write_text(json.dumps(config))
    async with engine_of(path) as engine:
        [ids] = inputs((60,))
        wanted = hidden_states(path, ids).mean(0)
        assert np.abs(await engine.embed(ids, RAW) - wanted).max() <= 1e-4 * wanted.std()


@pytest.mark.parametrize("level", _native.instruction_sets())
@pytest.mark.parametrize("name", ["mpnet", "modernbert"])
@in_a_loop
async def test_every_instruction_set(name: str, level: str) -> None:
    for dtype, most in (("fp32", 1e-4), ("bf16", 0.2)):
        async with engine_of(encoder(name), instruction_set=level, dtype=dtype) as engine:
            for ids in inputs((17, 300)):
                wanted = hidden_states(encoder(name), ids).mean(0)
                vector = await engine.embed(ids, RAW)
                assert np.abs(vector - wanted).max() <= most * wanted.std()


@pytest.mark.parametrize("name", ENCODERS)
@in_a_loop
async def test_bf16_error_is_close_to_that_of_transformers(name: str) -> None:
    async with engine_of(encoder(name), dtype="bf16") as engine:
        ours = theirs = 0.0
        for ids in inputs((17, 130, 300)):
            exact = hidden_states(encoder(name), ids).mean(0)
            rounded = hidden_states(encoder(name), ids, torch.bfloat16).mean(0)
            ours += float(((await engine.embed(ids, RAW) - exact) ** 2).sum())
            theirs += float(((rounded - exact) ** 2).sum())
    assert ours <= 1.5**2 * theirs


@pytest.mark.parametrize("name", ["bert", "modernbert"])
@in_a_loop
async def test_the_first_token_is_pooled_where_files_say_so(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(encoder(name), path)
    write_modules(path, "cls_token", normalizes=False)
    async with engine_of(path) as engine:
        for ids in inputs((1, 60, 300)):
            wanted = hidden_states(path, ids)[0]
            vector = await engine.embed(ids, RAW)
            assert np.abs(vector - wanted).max() <= 1e-4 * wanted.std()


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@in_a_loop
async def test_same_bits_in_any_batch(name: str, dtype: str) -> None:
    asked = inputs((1, 2, 15, 33, 100, 257, 300, 60, 8))
    async with engine_of(encoder(name), dtype=dtype, max_num_seqs=1) as engine:
        alone = [(await engine.embed(ids)).tobytes() for ids in asked]
    for budget in (300, 1000):
        settings = {"max_num_batched_tokens": budget, "max_num_seqs": 32, "num_threads": 2}
        async with engine_of(encoder(name), dtype=dtype, **settings) as engine:
            for seed in range(3):
                order = random.Random(seed).sample(range(len(asked)), len(asked))
                found = await asyncio.gather(*(engine.embed(asked[i]) for i in order))
                assert [vector.tobytes() for vector in found] == [alone[i] for i in order]
            stats = engine.stats()
            assert stats.num_used_blocks == stats.num_cached_blocks == 0


@pytest.mark.parametrize("name", ENCODERS)
@in_a_loop
async def test_classifiers_score_pairs(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(encoder(name, CLASSIFIER), path)
    join_pairs(path)
    model = getattr(transformers, CLASSIFIER)
    oracle = model.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    query, text = "a fox", "sleeps near the river"
    whole = Tokenizer.load(path)._encode_whole(FramedText(query, text), 99, "")
    assert 0 < whole.num_first < len(whole.ids)
    types = [int(i >= whole.num_first) for i in range(len(whole.ids))]
    extra = {"token_type_ids": torch.tensor([types])} if name == "bert" else {}
    with torch.no_grad():
        ids = torch.tensor([whole.ids])
        wanted = float(oracle(ids, attention_mask=torch.ones_like(ids), **extra).logits[0, 0])
    async with engine_of(path) as engine:
        assert await engine.score(query, text, raw=True) == pytest.approx(wanted, abs=1e-4)


def join_pairs(path: Path) -> None:
    """Let the tokenizer put special tokens around texts, and tell those of a pair apart."""
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    names = SPECIAL_TOKENS[2:]  # neither of which is padding's
    first, end = ({"SpecialToken": {"id": name, "type_id": 0}} for name in names)
    a, b = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    last = {"SpecialToken": {"id": names[1], "type_id": 1}}
    special = {
        name: {"id": name, "ids": [i], "tokens": [name]} for i, name in enumerate(names, start=2)
    }
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, a, end],
        "pair": [first, a, end, b, last],
        "special_tokens": special,
    }
    file.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("name", ENCODERS)
@in_a_loop
async def test_quantised_embeddings_are_close(name: str, quantize: str) -> None:
    async with engine_of(encoder(name), quantize=quantize) as engine:
        for ids in inputs((17, 130)):
            exact = hidden_states(encoder(name), ids).mean(0)
            vector = await engine.embed(ids, RAW)
            cosine = vector @ exact / np.linalg.norm(vector) / np.linalg.norm(exact)
            assert 0.9 < cosine < 0.999999


@in_a_loop
async def test_old_names_and_other_heads(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(encoder("bert"), path)
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    old = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    old["cls.predictions.bias"] = np.zeros(7, np.float32)
    save_file(old, path / "model.safetensors")
    config["architectures"] = ["BertForMaskedLM"]
    (path / "config.json").write_text(json.dumps(config))
    async with engine_of(path) as engine, engine_of(encoder("bert")) as same:
        np.testing.assert_array_equal(await engine.embed([5, 6]), await same.embed([5, 6]))


@in_a_loop
async def test_what_encoders_do_not_take() -> None:
    async with engine_of(encoder("roberta")) as engine:
        assert engine.max_model_len == 328
        with pytest.raises(ContextLengthError):
            await engine.embed(inputs((329,))[0])
        with pytest.raises(UserError, match="doesn't generate text"):
            await engine.complete("a fox")
    with pytest.raises(UserError, match="kv_dtype is int8"):
        await engine_of(encoder("bert"), kv_dtype="int8").start()
