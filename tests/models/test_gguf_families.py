"""Dense families in GGUF: the same model as the checkpoint that they were made of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from lmi_core.weights.gguf.directory import model_directory
from tests.checkpoints import cached_checkpoint
from tests.gguf_files import bpe_metadata, interleaved, write_gguf
from tests.loading import load_model
from tests.models.forward import logits_of

pytest.importorskip("torch")
Array = npt.NDArray[Any]
FIRST = r"^(?:transformer\.|model\.)?"
NAMES = {
    rf"{FIRST}(wte|embed_tokens|tok_embeddings|embedding.word_embeddings|word_embeddings)\.": (
        "token_embd."
    ),
    r"^transformer.word_embeddings_layernorm": "token_embd_norm",
    r"^transformer.wpe": "position_embd",
    rf"{FIRST}(ln_f|norm_f|encoder.final_layernorm|norm)\.": "output_norm.",
    r"^(lm_head|transformer.output_layer)\.": "output.",
    rf"{FIRST}(h|blocks|encoder.layers|layers)\.": "blk.",
    r"\.(input_layernorm|ln_1|attention_norm|norm_1)\.": ".attn_norm.",
    r"\.(post_attention_layernorm|ln_2|norm_2)\.": ".ffn_norm.",
    r"(self_attn|attn.attention)\.([qkv])_proj": r"attn_\2",
    r"self_attn\.([qk])_norm": r"attn_\1_norm",
    r"pre_feedforward_layernorm": "ffn_norm",
    r"post_feedforward_layernorm": "post_ffw_norm",
    r"(self_attn.o_proj|attn.attention.out_proj|attention.wo|attn.out_proj)\.": "attn_output.",
    r"(self_attention.dense|attn.c_proj)\.": "attn_output.",
    r"(self_attn.W_pack|attn.Wqkv|attn.c_attn|attention.wqkv)\.": "attn_qkv.",
    r"self_attention.query_key_value": "attn_qkv",
    r"(mlp.gate_proj|mlp.c_fc_0|mlp.w2|feed_forward.w1)\.": "ffn_gate.",
    r"(mlp.up_proj|mlp.c_fc_1|mlp.c_fc|mlp.w1|feed_forward.w3|ffn.up_proj)\.": "ffn_up.",
    r"mlp.dense_h_to_4h": "ffn_up",
    r"(mlp.down_proj|mlp.c_proj|mlp.dense_4h_to_h|feed_forward.w2|ffn.down_proj)\.": "ffn_down.",
}
Change = Callable[[dict[str, Array], Any], dict[str, Array]]


def permuted(tensors: dict[str, Array], spec: Any) -> dict[str, Array]:
    """Rows of queries and keys in the order of neighbours that rotate together."""
    heads = {"attn_q.": spec.attention.num_q_heads, "attn_k.": spec.attention.num_kv_heads}
    for name, values in tensors.items():
        for part, count in heads.items():
            if part in name:
                tensors[name] = interleaved(values, count)
    return tensors


def split(tensors: dict[str, Array], spec: Any) -> dict[str, Array]:
    """Fused projections by key and value head, or all queries first, as three."""
    attention, found = spec.attention, {}
    for name, values in tensors.items():
        if "attn_qkv" not in name:
            found[name] = values
        elif spec.family == "internlm2":
            groups = values.reshape(attention.num_kv_heads, -1, attention.head_dim, values.shape[1])
            parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
            own = [part.reshape(-1, values.shape[1]) for part in parts]
            found |= {name.replace("qkv", part): own[i] for i, part in enumerate("qkv")}
        else:
            parts = np.split(values, 3)
            found |= {name.replace("qkv", part): parts[i] for i, part in enumerate("qkv")}
    return permuted(found, spec)


def in_blocks(tensors: dict[str, Array], spec: Any) -> dict[str, Array]:
    """BLOOM's query, key and value of each head, with all queries first."""
    for name, values in tensors.items():
        if "attn_qkv" in name:
            heads = values.reshape(spec.attention.num_q_heads, 3, -1, *values.shape[1:])
            tensors[name] = heads.swapaxes(0, 1).reshape(values.shape)
    return tensors


def turned(tensors: dict[str, Array], spec: Any) -> dict[str, Array]:
    """GPT-2's matrices of layers, the usual way."""
    return {n: v.T if "blk" in n and v.ndim == 2 else v for n, v in tensors.items()}


def one_more(tensors: dict[str, Array], spec: Any) -> dict[str, Array]:
    """Weights of norms with the 1 that the model adds to them."""
    return {n: v + np.float32(1) if "norm.weight" in n else v for n, v in tensors.items()}


def as_it_is(tensors: dict[str, Array], spec: Any) -> dict[str, Array]:
    return tensors


FAMILIES: dict[str, tuple[str, Change]] = {
    "baichuan": ("baichuan", split),
    "bloom": ("bloom", in_blocks),
    "chatglm2": ("chatglm", as_it_is),
    "chatglm3_32k": ("chatglm", as_it_is),
    "exaone": ("exaone", as_it_is),
    "internlm2": ("internlm2", split),
    "minicpm": ("minicpm", permuted),
    "mpt": ("mpt", as_it_is),
    "olmo": ("olmo", permuted),
    "qwen": ("qwen", as_it_is),
    "gpt_bigcode": ("starcoder", as_it_is),
    "gpt2": ("gpt2", turned),
    "gemma2": ("gemma2", one_more),
    "granite": ("granite", permuted),
    "nemotron": ("nemotron", one_more),
    "olmo2": ("olmo2", as_it_is),
    "qwen2": ("qwen2", as_it_is),
    "qwen3": ("qwen3", as_it_is),
    "starcoder2": ("starcoder2", as_it_is),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def metadata(variant: str, name: str, spec: Any) -> dict[str, Any]:
    """As a converter writes it."""
    source = cached_checkpoint(variant)
    config = json.loads((source / "config.json").read_text())
    attention = spec.attention
    eps = next((config[k] for k in config if "epsilon" in k or "norm_eps" in k), 1e-5)
    rms = "rms_" if spec.norm.kind == "rms" else ""
    values = {
        "context_length": spec.max_positions,
        "embedding_length": spec.hidden_size,
        "block_count": spec.num_layers,
        "feed_forward_length": spec.intermediate_size * (2 if name == "qwen" else 1),
        "attention.head_count": attention.num_q_heads,
        "attention.head_count_kv": attention.num_kv_heads,
        "attention.key_length": attention.head_dim,
        f"attention.layer_norm_{rms}epsilon": float(eps),
    }
    if spec.ropes[0].kind != "none":
        values["rope.freq_base"] = float(spec.ropes[0].theta)
        values["rope.dimension_count"] = spec.ropes[0].rotary_dim
    if attention.clip:
        values["attention.clamp_kqv"] = attention.clip
    if name == "mpt":
        values["attention.max_alibi_bias"] = 8.0
    if name == "minicpm":
        values["embedding_scale"] = float(config["scale_emb"])
        values["residual_scale"] = config["scale_depth"] / spec.num_layers**0.5
        values["logit_scale"] = spec.hidden_size / config["dim_model_base"]
    if name == "granite":
        keys = {"attention.scale": "attention_multiplier", "logit_scale": "logits_scaling"}
        keys |= {"residual_scale": "residual_multiplier"}
        keys |= {"embedding_scale": "embedding_multiplier"}
        values |= {ours: float(config[theirs]) for ours, theirs in keys.items()}
    if name == "gemma2":
        values["attn_logit_softcapping"] = float(config["attn_logit_softcapping"])
        values["final_logit_softcapping"] = float(config["final_logit_softcapping"])
        values["attention.scale"] = config["query_pre_attn_scalar"] ** -0.5
    if name in ("gemma2", "starcoder2"):
        values["attention.sliding_window"] = config["sliding_window"]
    prefixed = {f"{name}.{key}": value for key, value in values.items()}
    return {"general.architecture": name, **prefixed, **bpe_metadata(source, "gpt-2")}


@pytest.mark.parametrize("variant", FAMILIES)
def test_fp32_gives_the_checkpoints_logits(variant: str, tmp_path: Path) -> None:
    name, change = FAMILIES[variant]
    source = cached_checkpoint(variant)
    wanted = load_model(source)
    tensors = {}
    after = {"post_attention_layernorm": "post_attention_norm"}
    names = {**(after if name in ("gemma2", "olmo2") else {}), **NAMES}
    for theirs, values in load_file(source / "model.safetensors").items():
        ours = theirs
        for pattern, new in names.items():
            ours = re.sub(pattern, new, ours)
        tensors[ours] = values
    stored = {
        ours: ("F32", values.shape, np.ascontiguousarray(values))
        for ours, values in change(tensors, wanted.spec).items()
    }
    path = write_gguf(tmp_path / "model.gguf", metadata(variant, name, wanted.spec), stored)
    exact = logits_of(wanted)
    found = logits_of(load_model(model_directory(path)))
    # Multipliers and epsilons are fp32 in a file.
    assert np.abs(found - exact).max() <= 1e-5 * exact.std()
