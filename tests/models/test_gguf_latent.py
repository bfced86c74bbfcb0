"""DeepSeek in GGUF: latent attention and experts, as converters have written them over time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from lmi_core.errors import ModelError
from lmi_core.models.found_model import find_model
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.weights.gguf.architectures import MIXTURES
from lmi_core.weights.gguf.directory import model_directory
from lmi_core.weights.gguf.file import GgufFile
from lmi_core.weights.gguf.metadata import Metadata
from tests.checkpoints import cached_checkpoint, make_checkpoint
from tests.gguf_files import bpe_metadata, quantize_q8_0, write_gguf
from tests.loading import load_model
from tests.models.test_gguf_mixtures import logits_of

pytest.importorskip("torch")
Arrays = dict[str, npt.NDArray[Any]]
YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "mscale": 0.8}
YARN |= {"original_max_position_embeddings": 128, "mscale_all_dim": 0.8}
NAMES = {
    r"model.embed_tokens": "token_embd",
    r"model.norm": "output_norm",
    r"lm_head": "output",
    r"model.layers": "blk",
    r"input_layernorm": "attn_norm",
    r"post_attention_layernorm": "ffn_norm",
    r"self_attn.o_proj": "attn_output",
    r"self_attn.q_(a|b)_proj": r"attn_q_\1",
    r"self_attn.q_proj": "attn_q",
    r"self_attn.q_a_layernorm": "attn_q_a_norm",
    r"self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    r"self_attn.kv_a_layernorm": "attn_kv_a_norm",
    r"self_attn.kv_b_proj": "attn_kv_b",
    r"mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    r"mlp.gate\.": "ffn_gate_inp.",
    r"mlp.shared_experts.(\w+)_proj": r"ffn_\1_shexp",
    r"mlp.(gate|up|down)_proj": r"ffn_\1",
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose YaRN is as in the published models."""
    return make_checkpoint(tmp_path_factory.mktemp("v3"), "deepseek_v3", rope_parameters=YARN)


@pytest.fixture
def source(request: pytest.FixtureRequest, v3: Path) -> Path:
    return v3 if request.param == "deepseek_v3" else cached_checkpoint(request.param)


def converted(source: Path, *, is_split: bool, is_fused: bool) -> Arrays:
    """``is_split``: keys' and values' matrices apart; ``is_fused``: experts' gate and up in one."""
    config = json.loads((source / "config.json").read_text())
    found: Arrays = {}
    experts: dict[str, list[npt.NDArray[Any]]] = {}
    for theirs, values in load_file(source / "model.safetensors").items():
        name = theirs
        for pattern, ours in NAMES.items():
            name = re.sub(pattern, ours, name)
        if match := re.match(r"(blk.\d+.)mlp.experts.(\d+).(\w+)_proj", name):
            parts = experts.setdefault(f"{match[1]}ffn_{match[3]}_exps.weight", [])
            parts += [values] * (int(match[2]) + 1 - len(parts))
            parts[int(match[2])] = values
        elif is_split and "attn_kv_b" in name:
            keys = config["qk_nope_head_dim"]
            heads = values.reshape(config["num_attention_heads"], -1, values.shape[1])
            found[name.replace("kv_b", "k_b")] = heads[:, :keys].swapaxes(1, 2)
            found[name.replace("kv_b", "v_b")] = heads[:, keys:]
        else:
            found[name] = values
    found |= {name: np.stack(parts) for name, parts in experts.items()}
    if is_fused:
        for name in [name for name in found if "gate_exps" in name]:
            up = found.pop(name.replace("gate", "up"))
            fused = np.concatenate([found.pop(name), up], axis=1)
            found[name.replace("gate", "gate_up")] = fused
    return found


def metadata(source: Path, *, is_split: bool, **changes: Any) -> dict[str, Any]:
    """As converters write it; ``changes``: None leaves a key out."""
    config = json.loads((source / "config.json").read_text())
    rotated, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    lengths = {"key_length": config["qk_nope_head_dim"] + rotated}
    lengths |= {"value_length": config["v_head_dim"]}
    if is_split:
        lengths = {f"{key}_mla": value for key, value in lengths.items()}
        lengths |= {"key_length": rank + rotated, "value_length": rank}
    is_v3 = config["model_type"] == "deepseek_v3"
    rope = config.get("rope_parameters") or {}
    values = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": 1 if is_split else config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.q_lora_rank": config.get("q_lora_rank"),
        "attention.kv_lora_rank": rank,
        **{f"attention.{key}": value for key, value in lengths.items()},
        "rope.freq_base": 10000.0,
        "rope.dimension_count": rotated,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": True if is_v3 else None,
        "expert_gating_func": 2 if is_v3 else None,
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "vocab_size": config["vocab_size"],
    }
    if rope.get("rope_type") == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    values |= changes
    return {
        "general.architecture": "deepseek2",
        **{f"deepseek2.{key}": value for key, value in values.items() if value is not None},
        **bpe_metadata(source, "gpt-2"),
    }


def written(path: Path, source: Path, tensors: Arrays, **form: Any) -> Path:
    stored = {name: ("F32", v.shape, np.ascontiguousarray(v)) for name, v in tensors.items()}
    return write_gguf(path, metadata(source, **form), stored)


@pytest.mark.parametrize("is_split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize(
    "source", ["deepseek_v2", "deepseek_v2_groups", "deepseek_v3"], indirect=True
)
def test_fp32_gives_the_checkpoints_logits(source: Path, is_split: bool, tmp_path: Path) -> None:
    tensors = converted(source, is_split=is_split, is_fused=not is_split)
    path = written(tmp_path / "model.gguf", source, tensors, is_split=is_split)
    exact = logits_of(load_model(source))
    found = logits_of(load_model(model_directory(path)))
    # Scales and epsilons are fp32 in a file.
    assert np.abs(found - exact).max() <= 1e-5 * exact.std()


def test_files_with_both_forms_and_in_blocks_are_read(v3: Path, tmp_path: Path) -> None:
    """Of keys and values; in blocks, they are what the blocks stand for."""
    tensors = converted(v3, is_split=False, is_fused=False)
    spare = converted(v3, is_split=True, is_fused=False)
    both = tensors | {name: v for name, v in spare.items() if "_k_b." in name or "_v_b." in name}
    path = written(tmp_path / "both.gguf", v3, both, is_split=False)
    exact = logits_of(load_model(v3))
    assert np.abs(logits_of(load_model(model_directory(path))) - exact).max() <= 1e-5 * exact.std()

    wide = make_checkpoint(tmp_path / "wide", "deepseek_v3", kv_lora_rank=32, rope_parameters=YARN)
    tensors = converted(wide, is_split=True, is_fused=False)
    coded = {name: ("F32", v.shape, np.ascontiguousarray(v)) for name, v in tensors.items()}
    for name in [name for name in tensors if "_v_b." in name]:
        blocks = quantize_q8_0(tensors[name].reshape(-1, 32))
        coded[name] = "Q8_0", tensors[name].shape, blocks
        raw = blocks.reshape(-1, 34)
        codes = raw[:, 2:].view(np.int8) * raw[:, :2].copy().view(np.float16).astype(np.float32)
        tensors[name] = codes.reshape(tensors[name].shape)
    path = write_gguf(tmp_path / "coded.gguf", metadata(wide, is_split=True), coded)
    floats = written(tmp_path / "floats.gguf", wide, tensors, is_split=True)
    found, wanted = (logits_of(load_model(model_directory(p), "fp32")) for p in (path, floats))
    np.testing.assert_array_equal(found, wanted)


def test_all_layers_may_have_experts(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "deepseek", "deepseek_v2", first_k_dense_replace=0)
    tensors = converted(path, is_split=True, is_fused=False)
    directory = model_directory(written(tmp_path / "model.gguf", path, tensors, is_split=True))
    assert json.loads((directory / "config.json").read_text())["first_k_dense_replace"] == 0
    found, exact = (logits_of(load_model(each)) for each in (directory, path))
    assert np.abs(found - exact).max() <= 1e-5 * exact.std()
    said = {"block_count": 3, "expert_count": 8, "leading_dense_block_count": 0}
    glm = Metadata(GgufFile(path, {f"glm4moe.{k}": v for k, v in said.items()}, {}), "glm4moe")
    assert MIXTURES["glm4moe"].settings(glm)["first_k_dense_replace"] == 0


def test_old_files_have_the_groups_of_their_model(v3: Path, tmp_path: Path) -> None:
    wide = make_checkpoint(
        tmp_path / "wide", "deepseek_v3", n_routed_experts=256, num_hidden_layers=2, n_group=8,
        topk_group=4,
    )  # fmt: skip
    tensors = converted(wide, is_split=False, is_fused=False)
    changes = {"expert_group_count": None, "expert_group_used_count": None}
    file = written(tmp_path / "model.gguf", wide, tensors, is_split=False, **changes)
    found = find_model(EngineConfig(model=model_directory(file)))
    assert found.spec.experts is not None
    assert (found.spec.experts.num_groups, found.spec.experts.top_groups) == (8, 4)
    assert any("the best 4 of 8 groups" in note for note in found.notes)
    tensors = converted(v3, is_split=False, is_fused=False)
    file = written(tmp_path / "small.gguf", v3, tensors, is_split=False, **changes)
    found = find_model(EngineConfig(model=model_directory(file)))
    assert found.spec.experts is not None
    assert found.spec.experts.num_groups == 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"expert_gating_func": 3}, "has expert_gating_func 3, not 1 or 2"),
        ({"attention.kv_lora_rank": None}, "has no metadata deepseek2.attention.kv_lora_rank"),
        ({"rope.dimension_count": None}, "has no metadata deepseek2.rope.dimension_count"),
        ({"expert_gating_func": 1}, "norm_topk_prob"),
        ({"attention.kv_lora_rank": 32}, "wrong shape: blk.0.attn_kv_a_mqa.weight"),
        ({"rope.dimension_count": 20}, "qk_nope_head_dim"),
    ],
)
def test_settings_that_do_not_fit_are_named(
    changes: dict[str, Any], problem: str, v3: Path, tmp_path: Path
) -> None:
    tensors = converted(v3, is_split=True, is_fused=False)
    file = written(tmp_path / "model.gguf", v3, tensors, is_split=True, **changes)
    with pytest.raises(ModelError, match=problem):
        find_model(EngineConfig(model=model_directory(file)))
