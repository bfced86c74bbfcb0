"""Checkpoints on disk: what is read, and how faults are reported."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError, ModelError
from lmi_core.models.found_model import find_model
from lmi_core.models.loader import LoadedModel
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.weights.checkpoint import read_checkpoint
from tests.checkpoints import cached_checkpoint
from tests.loading import load_model

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")


def load(path: Path, dtype: Any = "auto", progress: Any = None) -> LoadedModel:
    from tests.ops.torch_store import TorchWeights

    return load_model(path, dtype, packer=TorchWeights(), progress=progress)


def stored(path: Path) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= safetensors_torch.load_file(file)
    return tensors


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the llama2 checkpoint with some tensors replaced (None: removed)."""

    def edit(variant: str = "llama2", **changes: Any) -> Path:
        path = shutil.copytree(cached_checkpoint(variant), tmp_path / "model")
        tensors = {**stored(path), **{name.replace("__", "."): t for name, t in changes.items()}}
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        safetensors_torch.save_file(kept, path / "model.safetensors")
        return path

    return edit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sharded", [False, True])
def test_fused_weights_hold_the_checkpoints_rows(dtype: str, sharded: bool) -> None:
    path = cached_checkpoint("llama_bias", dtype=dtype, sharded=sharded)
    assert (len(list(path.glob("*.safetensors"))) > 1) == sharded
    model = load(path, "fp32")
    tensors = {name: tensor.float() for name, tensor in stored(path).items()}
    layer, prefix = model.weights.layers[1], "model.layers.1."
    for linear, names in (
        (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
        (layer.down, ("mlp.down_proj",)),
    ):
        expected = torch.cat([tensors[f"{prefix}{name}.weight"] for name in names])
        assert torch.equal(linear.weight.matrix, expected)  # type: ignore[attr-defined]
        bias = torch.cat([tensors[f"{prefix}{name}.bias"] for name in names])
        np.testing.assert_array_equal(linear.bias, bias.numpy())
    final_norm = model.weights.final_norm
    assert final_norm is not None
    np.testing.assert_array_equal(final_norm.weight, tensors["model.norm.weight"].numpy())


@pytest.mark.parametrize("sharded", [False, True])
def test_the_native_engine_packs_the_same_matrices(sharded: bool) -> None:
    path = cached_checkpoint("llama_tied", dtype="bfloat16", sharded=sharded)
    model, tensors = load_model(path), stored(path)
    assert model.dtype == "bf16"
    prefix = "model.layers.2."
    for linear, names in (
        (model.weights.layers[2].qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (model.weights.layers[2].gate_up, ("mlp.gate_proj", "mlp.up_proj")),
    ):
        expected = torch.cat([tensors[f"{prefix}{name}.weight"] for name in names]).float()
        weight = linear.weight
        np.testing.assert_array_equal(weight.unpack(), expected.numpy())  # type: ignore[attr-defined]
    table = tensors["model.embed_tokens.weight"]
    np.testing.assert_array_equal(model.weights.embedding, table.view(torch.uint16).numpy())
    head = model.weights.head.weight
    np.testing.assert_array_equal(head.unpack(), table.float().numpy())  # type: ignore[attr-defined]
    assert not model.weights.embedding.flags.owndata


@pytest.mark.parametrize(
    ("stored_dtype", "expected", "table"),
    [
        ("float32", "fp32", np.float32),
        ("bfloat16", "bf16", np.uint16),
        ("float16", "bf16", np.float32),
    ],
)
def test_auto_dtype_follows_the_checkpoint(stored_dtype: str, expected: str, table: Any) -> None:
    model = load(cached_checkpoint("qwen2", dtype=stored_dtype))
    assert model.dtype == expected
    assert model.weights.embedding.dtype == table


def test_a_tied_model_keeps_the_embedding_in_its_file() -> None:
    path = cached_checkpoint("qwen2", dtype="bfloat16")
    model = load(path)
    assert not model.weights.embedding.flags.owndata
    assert not model.weights.embedding.flags.writeable
    file_bytes = (path / "model.safetensors").stat().st_size
    # Norms and biases are widened to float32; nothing else is held twice.
    assert file_bytes * 0.9 < model.weights.num_bytes < file_bytes * 1.05


@pytest.mark.parametrize("variant", ["llama2", "qwen2"])
def test_progress_ends_at_the_total(variant: str) -> None:
    calls: list[tuple[int, int]] = []
    load(cached_checkpoint(variant), progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] > 0


def test_rotary_buffers_and_a_tied_head_are_tolerated(edited: Callable[..., Path]) -> None:
    embedding = stored(cached_checkpoint("qwen2"))["model.embed_tokens.weight"]
    path = edited(
        "qwen2",
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8),
        lm_head__weight=embedding.clone(),
    )
    model = load(path)
    assert model.spec.tied_head
    assert model.spec.notes == ()
    assert torch.equal(model.weights.head.weight.matrix, embedding)  # type: ignore[attr-defined]


def test_a_head_that_differs_from_a_tied_embedding_is_the_head(
    edited: Callable[..., Path],
) -> None:
    """As in Transformers 5; a last row that differs is enough."""
    head = stored(cached_checkpoint("qwen2"))["model.embed_tokens.weight"].clone()
    head[-1] = 0.5
    path = edited("qwen2", lm_head__weight=head)
    model = load(path)
    assert torch.equal(model.weights.head.weight.matrix, head)  # type: ignore[attr-defined]
    [note] = find_model(EngineConfig(model=path)).notes
    assert "lm_head.weight differs from model.embed_tokens.weight" in note


def test_every_fault_is_reported_at_once(edited: Callable[..., Path]) -> None:
    path = edited(
        model__norm__weight=None,
        lm_head__weight=torch.zeros(380, 64),
        model__layers__1__mlp__up_proj__weight=torch.zeros(96, 64, dtype=torch.int8),
        model__layers__0__self_attn__q_proj__bias=torch.zeros(64),
    )
    with pytest.raises(ModelError) as caught:
        load(path)
    message = str(caught.value)
    assert "4 of the tensors don't fit config.json (LlamaForCausalLM, 3 layers)" in message
    assert "missing: model.norm.weight [64]" in message
    assert "wrong shape: lm_head.weight is [380, 64], expected [384, 64]" in message
    assert "wrong dtype: model.layers.1.mlp.up_proj.weight is I8" in message
    assert "unexpected: model.layers.0.self_attn.q_proj.bias [64]" in message


def test_scales_of_an_fp8_cache(edited: Callable[..., Path]) -> None:
    """Of both, else the common one, else none; any of the float types, as a scalar or not."""
    assert load(cached_checkpoint("llama2")).kv_scales == ()
    path = edited(
        model__layers__0__self_attn__k_scale=torch.tensor(0.25),
        model__layers__0__self_attn__v_scale=torch.tensor([0.5], dtype=torch.bfloat16),
        model__layers__0__self_attn__kv_scale=torch.tensor(3.0),
        model__layers__1__self_attn__kv_scale=torch.tensor(2.0),
        model__layers__2__self_attn__k_proj__k_scale=torch.tensor(4.0),
        model__layers__2__self_attn__v_proj__v_scale=torch.tensor(8.0),
    )
    assert load(path).kv_scales == ((0.25, 0.5), (2.0, 2.0), (4.0, 8.0))
    from lmi_core.ops.cpu import NativeWeights

    assert load_model(path, packer=NativeWeights()).kv_scales == load(path).kv_scales


def test_layers_without_scales_of_their_own(edited: Callable[..., Path]) -> None:
    path = edited(model__layers__1__self_attn__kv_scale=torch.tensor(2.0))
    assert load(path).kv_scales == ((1.0, 1.0), (2.0, 2.0), (1.0, 1.0))


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.tensor(-1.0), r"self_attn.k_scale is \[-1.0\]; it must be one positive number"),
        (torch.ones(2), r"is \[1.0, 1.0\]; it must be one positive number"),
        (torch.ones(1, dtype=torch.int32), "wrong dtype: .*k_scale is I32, must be F32"),
    ],
)
def test_no_scale_of_an_fp8_cache(
    edited: Callable[..., Path], scale: torch.Tensor, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(edited(model__layers__2__self_attn__k_scale=scale))


def test_many_faults_are_counted(edited: Callable[..., Path]) -> None:
    path = edited()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9}))
    with pytest.raises(ModelError, match=r"54 of the tensors[\s\S]*and 34 more$"):
        load(path)


def test_an_end_of_text_id_beyond_the_vocabulary(edited: Callable[..., Path]) -> None:
    path = edited()
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 384]}')
    with pytest.raises(ModelError, match="eos_token_id 384 is beyond the vocabulary of 384"):
        load(path)


def test_a_truncated_file(edited: Callable[..., Path]) -> None:
    path = edited()
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor .* outside"):
        load(path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    source = cached_checkpoint("llama2", dtype="bfloat16", sharded=True)
    return shutil.copytree(source, tmp_path / "model")


def rewrite_index(path: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    change(values["weight_map"])
    index.write_text(json.dumps(values))


def test_a_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"lacks 1 of 3 shards: {shard.name}"):
        load(sharded)


@pytest.mark.parametrize("file_name", ["../model.safetensors", "/etc/passwd", "model.bin", 5])
def test_an_index_that_points_elsewhere(sharded: Path, file_name: Any) -> None:
    rewrite_index(sharded, lambda weight_map: weight_map.update({"lm_head.weight": file_name}))
    with pytest.raises(ModelError, match="must be the name of a safetensors file beside it"):
        load(sharded)


def test_an_index_that_disagrees_with_its_shards(sharded: Path) -> None:
    first = sorted(sharded.glob("*.safetensors"))[0].name
    rewrite_index(sharded, lambda weight_map: weight_map.update({"model.norm.weight": first}))
    with pytest.raises(ModelError, match=f"'model.norm.weight' is in {first}, but it isn't"):
        load(sharded)


def test_an_index_without_a_map(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="has no weight_map"):
        load(sharded)


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match="3 safetensors files but no"):
        load(sharded)


def test_an_index_of_shards_that_were_merged(sharded: Path) -> None:
    tensors = stored(sharded)
    for shard in sharded.glob("*.safetensors"):
        shard.unlink()
    safetensors_torch.save_file(tensors, sharded / "model.safetensors")
    assert load(sharded).spec.num_layers == 3


def test_a_whole_file_comes_before_an_index(sharded: Path) -> None:
    tensors = stored(sharded)
    tensors["lm_head.weight"] = -tensors["lm_head.weight"]
    safetensors_torch.save_file(tensors, sharded / "model.safetensors")
    read = read_checkpoint(sharded)
    assert {tensor.path.name for tensor in read.values()} == {"model.safetensors"}
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(sharded, dtype="bfloat16")
    assert torch.equal(reference.lm_head.weight, tensors["lm_head.weight"])


def test_a_single_file_of_another_name(edited: Callable[..., Path]) -> None:
    path = edited()
    (path / "model.safetensors").rename(path / "weights.safetensors")
    assert load(path).spec.num_layers == 3


@pytest.mark.parametrize(
    ("file_name", "message"),
    [
        ("pytorch_model.bin", "the file is damaged, or holds more than the tensors of a model"),
        ("consolidated.00.pth", "found consolidated.00.pth, convert it: python -c"),
        ("model-q4.gguf", "model-q4.gguf: holds 0 bytes that don't begin as a GGUF file"),
        ("README.md", "it needs model.safetensors"),
    ],
)
def test_other_formats_name_the_conversion(
    edited: Callable[..., Path], file_name: str, message: str
) -> None:
    path = edited()
    (path / "model.safetensors").unlink()
    (path / file_name).write_bytes(b"")
    with pytest.raises(ModelError) as caught:
        load(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_answers_of_weights_that_overflow_fail_by_name(tmp_path: Path, quantize: Any) -> None:
    path = tmp_path / "model"
    shutil.copytree(cached_checkpoint("llama2"), path)
    tensors = safetensors_torch.load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"].view(-1)[:] = 3e38
    safetensors_torch.save_file(tensors, path / "model.safetensors")

    async def run() -> None:
        async with Engine(EngineConfig(model=path, quantize=quantize)) as engine:
            with pytest.raises(EngineError, match="logits aren't finite"):
                async for _ in engine.generate((5, 6), SamplingParams(max_new_tokens=2)):
                    pass

    asyncio.run(run())
