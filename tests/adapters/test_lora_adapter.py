"""Reading PEFT directories: ranks, scales, and what is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lmi_core.adapters.adapter import Adapter, read_adapter
from lmi_core.errors import ModelError
from lmi_core.models.lora_linears import LayerLinear, linear_id, linear_shapes
from lmi_core.models.registry import family_of
from lmi_core.weights.hf_config import read_hf_config
from tests.checkpoints import cached_checkpoint
from tests.lora_adapters import Tensors, adapter_tensors, write_adapter

PREFIX = "base_model.model.model.layers"
Q0 = f"{PREFIX}.0.self_attn.q_proj"


@pytest.fixture
def model() -> Path:
    return cached_checkpoint("llama3")


def read(model: Path, directory: Path, max_rank: int = 16) -> Adapter:
    family, config = family_of(read_hf_config(model))
    return read_adapter(directory, family.read_spec(config), max_rank=max_rank)


def test_parts_are_where_the_modules_are_in_fused_matrices(model: Path, tmp_path: Path) -> None:
    tensors = adapter_tensors(model, rank=4)
    adapter = read(model, write_adapter(tmp_path / "a", tensors, rank=4, alpha=4))
    family, config = family_of(read_hf_config(model))
    spec = family.read_spec(config)
    assert len(adapter) == len(linear_shapes(spec)) == 4 * spec.num_layers
    q_size, kv_size = spec.attention.q_size, spec.attention.kv_size
    firsts = {
        LayerLinear.QKV: [0, q_size, q_size + kv_size],
        LayerLinear.ATTENTION_OUTPUT: [0],
        LayerLinear.GATE_UP: [0, spec.intermediate_size],
        LayerLinear.DOWN: [0],
    }
    for layer_id in range(spec.num_layers):
        for linear, expected in firsts.items():
            parts = adapter[linear_id(layer_id, linear)]
            assert [part.first_output for part in parts] == expected
    key = adapter[linear_id(2, LayerLinear.QKV)][1]
    module = f"{PREFIX}.2.self_attn.k_proj"
    np.testing.assert_array_equal(key.a, tensors[f"{module}.lora_A.weight"])
    np.testing.assert_array_equal(key.b, tensors[f"{module}.lora_B.weight"])


def test_modules_of_some_layers_only(model: Path, tmp_path: Path) -> None:
    tensors = adapter_tensors(model, targets=("v_proj",), layers=[1])
    adapter = read(model, write_adapter(tmp_path / "a", tensors))
    assert [i for i, parts in enumerate(adapter) if parts] == [linear_id(1, LayerLinear.QKV)]


@pytest.mark.parametrize(
    "prefix", ["model.language_model.layers", "language_model.model.layers", "layers"]
)
def test_names_of_multimodal_models_and_of_models_without_a_head(
    model: Path, tmp_path: Path, prefix: str
) -> None:
    """Patterns are of the names in the file."""
    tensors, read_both = adapter_tensors(model, rank=4), []
    for start in (prefix, "model.layers"):
        named = {
            name.replace("model.model.layers", f"model.{start}"): t for name, t in tensors.items()
        }
        pattern = {f"^{start}.0.self_attn.q_proj": 8}
        path = write_adapter(tmp_path / start, named, rank=4, alpha=4, alpha_pattern=pattern)
        read_both.append([part.b for parts in read(model, path) for part in parts])
    assert len(read_both[0]) == len(tensors) // 2
    for one, other in zip(*read_both, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_module_under_two_names(model: Path, tmp_path: Path) -> None:
    tensors = adapter_tensors(model, rank=4, targets=("q_proj",), layers=[0])
    twice = {name.replace("model.model.", "model."): t for name, t in tensors.items()} | tensors
    with pytest.raises(ModelError, match="names a module twice"):
        read(model, write_adapter(tmp_path / "a", twice, rank=4))


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"rank": 4, "alpha": 16}, 4.0),
        ({"rank": 4, "alpha": 3.5}, 0.875),
        ({"rank": 4, "alpha": 16, "use_rslora": True}, 8.0),
        ({"rank": 4, "alpha": 4, "fan_in_fan_out": True}, 1.0),
        ({"rank": 4, "alpha": 4, "alpha_pattern": {"q_proj": 12}}, 3.0),
        ({"rank": 4, "alpha": 4, "alpha_pattern": {"k_proj": 12}}, 1.0),
        ({"rank": 4, "alpha": 4, "alpha_pattern": {r"layers\.[02]\.self_attn\..*": 2}}, 0.5),
        ({"rank": 4, "alpha": 4, "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 8}}, 2.0),
        ({"rank": 32, "alpha": 4, "rank_pattern": {"self_attn.q_proj": 4}}, 1.0),
    ],
)
def test_scales(model: Path, tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    tensors = adapter_tensors(model, rank=4, targets=("q_proj",), layers=[0])
    (part,) = read(model, write_adapter(tmp_path / "a", tensors, **config))[0]
    expected = tensors[f"{Q0}.lora_B.weight"] * np.float32(scale)
    np.testing.assert_array_equal(part.b, expected)


def test_ranks_of_single_modules(model: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj"
    tensors = adapter_tensors(model, rank=4, ranks={name: 9})
    path = write_adapter(
        tmp_path / "a", tensors, rank=4, alpha=4, rank_pattern={name: 9}, use_rslora=True
    )
    up = read(model, path)[linear_id(1, LayerLinear.GATE_UP)][1]
    assert up.a.shape[0] == up.b.shape[1] == 9
    scale = np.float32(4 / math.sqrt(9))
    np.testing.assert_array_equal(up.b, tensors[f"base_model.model.{name}.lora_B.weight"] * scale)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_stored_types(model: Path, tmp_path: Path, dtype: type) -> None:
    tensors = {
        name: values.astype(dtype)
        for name, values in adapter_tensors(model, targets=("q_proj",), layers=[0]).items()
    }
    (part,) = read(model, write_adapter(tmp_path / "a", tensors))[0]
    np.testing.assert_array_equal(part.a, tensors[f"{Q0}.lora_A.weight"].astype(np.float32))


REFUSED_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora is True: DoRA's magnitudes aren't served"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
    ({"bias": "lora_only"}, "bias is 'lora_only': trained biases aren't served"),
    ({"lora_bias": True}, "lora_bias is True"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA adapters"),
    ({"layer_replication": [[0, 2]]}, "layer_replication is"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changed"),
    ({"rank": 0}, "r is 0, but must be an integer >= 1"),
    ({"alpha": "16"}, "lora_alpha is '16', but must be a number above 0"),
    ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern of 'q_proj' is 2.5"),
    ({"rank_pattern": [8]}, r"rank_pattern is \[8\], but must map names"),
    ({"alpha_pattern": {"(": 1}}, r"alpha_pattern has '\(', no regular expression"),
    ({"use_rslora": "yes"}, "use_rslora is 'yes', but must be true or false"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED_SETTINGS)
def test_refused_settings(
    model: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    path = write_adapter(tmp_path / "a", adapter_tensors(model), **settings)
    with pytest.raises(ModelError, match=f"adapter_config.json: {message}"):
        read(model, path)


def without_b(tensors: Tensors) -> None:
    del tensors[f"{Q0}.lora_B.weight"]


def transposed(tensors: Tensors) -> None:
    tensors[f"{Q0}.lora_A.weight"] = tensors[f"{Q0}.lora_A.weight"].T.copy()


def of_another_rank(tensors: Tensors) -> None:
    for matrix in "AB":
        del tensors[f"{Q0}.lora_{matrix}.weight"]
    tensors[f"{Q0}.lora_A.weight"] = np.zeros((6, 64), np.float32)
    tensors[f"{Q0}.lora_B.weight"] = np.zeros((64, 6), np.float32)


def of_integers(tensors: Tensors) -> None:
    tensors[f"{Q0}.lora_A.weight"] = tensors[f"{Q0}.lora_A.weight"].astype(np.int32)


def with_nan(tensors: Tensors) -> None:
    tensors[f"{Q0}.lora_B.weight"][3, 1] = np.nan


def with_tensor(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: np.zeros((8, 64), np.float32)})


REFUSED_TENSORS: list[tuple[Callable[[Tensors], None], str]] = [
    (without_b, f"incomplete: {Q0}.lora_A.weight has no {Q0}.lora_B.weight beside it"),
    (transposed, rf"wrong shape: {Q0}.lora_A.weight is \[64, 8\], expected \[8, 64\] for rank 8"),
    (of_another_rank, r"lora_A.weight is \[6, 64\], expected \[8, 64\] for rank 8"),
    (with_nan, f"damaged: {Q0}.lora_B.weight holds numbers that aren't finite"),
    (of_integers, "wrong dtype: .*lora_A.weight is I32, must be F32, F16 or BF16"),
    (
        with_tensor("base_model.model.lm_head.lora_A.weight"),
        "unexpected: base_model.model.lm_head.lora_A.weight is of the embedding or the output head",
    ),
    (
        with_tensor("base_model.model.model.embed_tokens.lora_embedding_A"),
        "is of the embedding or the output head",
    ),
    (with_tensor(f"{Q0}.lora_magnitude_vector"), "is of DoRA, which isn't served"),
    (
        with_tensor(f"{PREFIX}.0.self_attn.w_pack.lora_A.weight"),
        "is of model.layers.0.self_attn.w_pack, which the model hasn't",
    ),
    (with_tensor(f"{PREFIX}.7.self_attn.q_proj.lora_A.weight"), "model.layers.7.self_attn.q_proj"),
    (with_tensor(f"{PREFIX}.0.input_layernorm.weight"), "only LoRA's own tensors are served"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED_TENSORS)
def test_refused_tensors(
    model: Path, tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    tensors = adapter_tensors(model)
    change(tensors)
    with pytest.raises(ModelError, match=message) as raised:
        read(model, write_adapter(tmp_path / "a", tensors))
    assert "adapter_model.safetensors" in str(raised.value)


def test_a_rank_above_the_limit(model: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", adapter_tensors(model, rank=17), rank=17)
    with pytest.raises(ModelError, match=r"is of rank 17; allowed are up to 16 \(max_lora_rank\)"):
        read(model, path)
    assert read(model, path, max_rank=17)


def test_directories_that_hold_no_adapter(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no adapter_config\.json: give the directory"):
        read(model, tmp_path / "nowhere")
    path = write_adapter(tmp_path / "a", adapter_tensors(model))
    weights = path / "adapter_model.safetensors"
    weights.rename(path / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapter_model\.bin: .*; the file is damaged"):
        read(model, path)
    (path / "adapter_model.bin").unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors; fetch it"):
        read(model, path)
    save_file({}, weights)
    with pytest.raises(ModelError, match="holds no tensors"):
        read(model, path)


def test_adapters_that_torch_saved_are_the_same(model: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors = adapter_tensors(model)
    whole = read(model, write_adapter(tmp_path / "a", tensors))
    path = write_adapter(tmp_path / "b", tensors)
    (path / "adapter_model.safetensors").unlink()
    arrays = {name: torch.from_numpy(array) for name, array in tensors.items()}
    torch.save(arrays, path / "adapter_model.bin")
    for ours, theirs in zip(read(model, path), whole, strict=True):
        for part, wanted in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(part.a, wanted.a)
            np.testing.assert_array_equal(part.b, wanted.b)
