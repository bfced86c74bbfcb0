"""Mixtures of experts in GGUF: the same model as the checkpoint that they were made of."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from lmi_core.ops.cpu import NativeWeights
from lmi_core.weights.gguf.directory import model_directory
from tests.block_reference import dequantize
from tests.checkpoints import cached_checkpoint
from tests.gguf_files import (
    Stored,
    bpe_metadata,
    interleaved,
    random_blocks,
    stored,
    write_gguf,
)
from tests.loading import load_model
from tests.models.forward import logits_of

pytest.importorskip("torch")
Arrays = dict[str, npt.NDArray[Any]]
NAMES = {
    r"transformer.wte": "token_embd",
    r"transformer.norm_f": "output_norm",
    r"transformer.blocks": "blk",
    r"norm_attn_norm.norm_1": "attn_norm",
    r"norm_attn_norm.norm_2": "attn_output_norm",
    r"norm_attn_norm.attn.Wqkv": "attn_qkv",
    r"norm_attn_norm.attn.out_proj": "attn_output",
    r"ffn.router.layer": "ffn_gate_inp",
    r"mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    r"model.embed_tokens": "token_embd",
    r"model.norm": "output_norm",
    r"lm_head": "output",
    r"model.layers": "blk",
    r"input_layernorm": "attn_norm",
    r"post_attention_layernorm": "ffn_norm",
    r"self_attn.o_proj": "attn_output",
    r"self_attn.sinks": "attn_sinks.weight",
    r"self_attn.([qkv])_(proj|norm)": r"attn_\1_\2",
    r"(block_sparse_moe.gate|mlp.gate|mlp.router|block_sparse_moe.router.layer)\.": "ffn_gate_inp.",
    r"_proj\.": ".",
    r"mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    r"mlp.shared_experts?.(\w+)": r"ffn_\1_shexp",
    r"(mlp|block_sparse_moe).experts": "experts",
    r"\.w1\.": ".gate.",
    r"\.w3\.": ".up.",
    r"\.w2\.": ".down.",
    r"mlp.(gate|up|down)": r"ffn_\1",
}
WITH_FLOATS = ("granite_moe", "glm4_moe", "phimoe", "dbrx")
"""Among whose settings are some that a file has as fp32."""
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
IN_USUAL_NAMES = {
    "max_position_embeddings": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "clip_qkv": 0.7,
}
"""What DBRX' settings are called elsewhere."""
OF_GLM = {
    "block_count": 4,
    "nextn_predict_layers": 1,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.7,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "rope.dimension_count": 16,
}
ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "granite_moe": "granitemoe",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "phimoe": "phimoe",
    "dbrx": "dbrx",
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def converted(variant: str) -> Arrays:
    """A checkpoint's tensors as a converter names and joins them."""
    source = cached_checkpoint(variant)
    config = json.loads((source / "config.json").read_text())
    found: Arrays = {}
    for name, values in load_file(source / "model.safetensors").items():
        for pattern, ours in NAMES.items():
            name = re.sub(pattern, ours, name)
        if ARCHITECTURES[variant] in ("llama", "granitemoe") and (
            "attn_q." in name or "attn_k." in name
        ):
            key = "num_attention_heads" if "attn_q." in name else "num_key_value_heads"
            values = interleaved(values, config[key])
        found[name] = values
    return _joined(found, variant)


def _joined(found: Arrays, variant: str) -> Arrays:
    """Experts of all layers in three tensors each."""
    joined: Arrays = {}
    experts: dict[str, list[npt.NDArray[Any]]] = {}
    for name, values in sorted(found.items(), key=_by_expert):
        layer = ".".join(name.split(".")[:2])
        if match := re.search(r"experts\.\d+\.(\w+)\.weight", name):
            experts.setdefault(f"{layer}.ffn_{match[1]}_exps.weight", []).append(values)
        elif "input_linear" in name:
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                joined[f"{layer}.ffn_{part}_exps.weight"] = half
        elif "output_linear" in name:
            joined[f"{layer}.ffn_down_exps.weight"] = values
        elif match := re.search(r"experts\.(gate_up|down)_proj(_bias)?", name):
            end = "bias" if match[2] else "weight"
            turned = values if match[2] else values.swapaxes(1, 2)
            parts = {"down": turned}
            if match[1] == "gate_up":
                parts = {"gate": turned[:, ::2], "up": turned[:, 1::2]}
            joined |= {f"{layer}.ffn_{part}_exps.{end}": v for part, v in parts.items()}
        elif match := re.search(r"ffn.experts.mlp.(w1|v1|w2)", name):
            part = {"w1": "gate", "v1": "up", "w2": "down"}[match[1]]
            each = values.reshape(6, -1, values.shape[1])
            turned = each.swapaxes(1, 2) if part == "down" else each
            joined[f"{layer}.ffn_{part}_exps.weight"] = turned
        else:
            joined[name] = values
    if variant == "glm4_moe":
        joined["blk.3.nextn.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    if variant == "phimoe":
        rope = json.loads((cached_checkpoint(variant) / "config.json").read_text())
        for name in ("long", "short"):
            factors = rope["rope_parameters"][f"{name}_factor"]
            joined[f"rope_factors_{name}.weight"] = np.array(factors, np.float32)
    if variant in ("gpt_oss", "glm4_moe"):
        joined = {name.replace("ffn_norm", "post_attention_norm"): v for name, v in joined.items()}
    return joined | {name: np.stack(parts) for name, parts in experts.items()}


def _by_expert(item: tuple[str, object]) -> tuple[int, str]:
    match = re.search(r"experts\.(\d+)\.", item[0])
    return int(match[1]) if match else -1, item[0]


def metadata(variant: str) -> dict[str, Any]:
    source, name = cached_checkpoint(variant), ARCHITECTURES[variant]
    config = json.loads((source / "config.json").read_text())
    if variant == "dbrx":
        config = config | IN_USUAL_NAMES
    rope = config.get("rope_parameters") or {}
    values = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "expert_count": next(config[key] for key in COUNTS if config.get(key)),
        "expert_used_count": config["num_experts_per_tok"],
        "attention.key_length": config.get("head_dim"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "attention.sliding_window": config.get("sliding_window"),
    }
    if "clip_qkv" in config:
        values["attention.clamp_kqv"] = config["clip_qkv"]
    if variant == "glm4_moe":
        values |= OF_GLM
    if rope.get("rope_type") == "longrope":
        values |= {
            "rope.scaling.attn_factor": rope["long_mscale"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if variant == "granite_moe":
        values |= {
            "attention.scale": config["attention_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "embedding_scale": config["embedding_multiplier"],
            "logit_scale": config["logits_scaling"],
        }
    if rope.get("rope_type") == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    return {
        "general.architecture": name,
        **{f"{name}.{key}": value for key, value in values.items() if value is not None},
        **bpe_metadata(source, "gpt-2"),
    }


def without_jitter(variant: str, directory: Path) -> Path:
    """The checkpoint, with the threshold of SparseMixer that it has where no setting says one."""
    source = cached_checkpoint(variant)
    shutil.copytree(source, directory)
    config = json.loads((source / "config.json").read_text())
    config.pop("router_jitter_noise", None)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def written(directory: Path, variant: str, tensors: dict[str, Stored]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return model_directory(write_gguf(directory / "model.gguf", metadata(variant), tensors))


@pytest.mark.parametrize("variant", ARCHITECTURES)
def test_fp32_gives_the_checkpoints_logits_to_the_bit(variant: str, tmp_path: Path) -> None:
    tensors = {name: ("F32", v.shape, v) for name, v in converted(variant).items()}
    found = load_model(written(tmp_path, variant, tensors))
    exact = logits_of(load_model(without_jitter(variant, tmp_path / "checkpoint")))
    most = 1e-5 if variant in WITH_FLOATS else 0.0
    assert np.abs(logits_of(found) - exact).max() <= most * exact.std()


@pytest.mark.parametrize(("variant", "kind"), [("mixtral", "Q4_0"), ("gpt_oss", "MXFP4")])
def test_experts_stay_in_their_blocks(variant: str, kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    coded: dict[str, Stored] = {}
    exact: dict[str, Stored] = {}
    for name, values in converted(variant).items():
        coded[name] = exact[name] = (
            stored(values, "F32") if "_inp" in name else stored(values, "BF16")
        )
        if values.ndim < 3:
            continue
        raw = random_blocks(kind, values.shape[0] * values.shape[1], values.shape[2], rng)
        weights = dequantize(kind, raw).reshape(values.shape).astype(np.float32)
        coded[name], exact[name] = (kind, values.shape, raw), ("F32", values.shape, weights)
    path = written(tmp_path / "coded", variant, coded)
    model = load_model(path)
    assert (model.dtype, model.quantize) == ("bf16", kind.lower())
    wanted = logits_of(load_model(written(tmp_path / "exact", variant, exact)))
    for activations, most in (("bf16", 1e-4), ("auto", 0.1)):
        packer = NativeWeights(activations=activations)
        found = logits_of(load_model(path, "fp32", packer=packer))
        # Where rounding makes a row take other experts, it has other logits.
        assert np.median(np.abs(found - wanted)) < most * wanted.std()
