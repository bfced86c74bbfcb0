"""What a GGUF file says of a model: the keys of its architecture, from config.json and the spec.

Format: keys as llama.cpp's converters write them; ``lmi_core/weights/gguf/config.py`` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lmi_core.models.found_model import FoundModel
from lmi_core.models.rope import inverse_frequencies
from lmi_core.models.spec import DecoderSpec, RopeSpec
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.gguf.architectures import ARCHITECTURES, MIXTURES, SIGMOID, SOFTMAX
from lmi_core.weights.hf_config import HfConfig

_SAME = {
    "MistralForCausalLM": "LlamaForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "RWForCausalLM": "FalconForCausalLM",
    "DeepseekV3ForCausalLM": "DeepseekV2ForCausalLM",
}
"""What has another's name in GGUF."""
_QUANTIZATION_VERSION = 2
_EPS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")


def architecture_of(found: FoundModel) -> str | None:
    """What GGUF calls the model's architecture; None: it has no name for it."""
    known = ARCHITECTURES if found.spec.experts is None else MIXTURES
    name = _SAME.get(found.config.architecture, found.config.architecture)
    return next((ours for ours, kind in known.items() if kind.name == name), None)


def model_metadata(found: FoundModel, architecture: str, file_type: int) -> dict[str, Any]:
    """All but the tokenizer's."""
    spec, config = found.spec, found.config
    own = _common(spec, config) | _rope(_long_rope(spec)) | _experts(spec)
    if (more := _MORE.get(architecture)) is not None:
        own |= more(spec, config)
    return {
        "general.architecture": architecture,
        "general.name": found.checkpoint.path.resolve().name,
        "general.file_type": file_type,
        "general.quantization_version": _QUANTIZATION_VERSION,
        **{f"{architecture}.{key}": value for key, value in own.items()},
    }


def factor_tensors(spec: DecoderSpec) -> dict[str, FloatArray]:
    """What frequencies are divided by, where no key says it."""
    rope = _long_rope(spec)
    if rope.kind == "llama3":
        exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
        scaled = inverse_frequencies(rope, spec.max_positions)
        return {"rope_freqs.weight": (rope.theta**-exponents / scaled).astype(np.float32)}
    if rope.kind == "longrope":
        return {
            f"rope_factors_{name}.weight": np.array(factors, np.float32)
            for name, factors in (("long", rope.long_factors), ("short", rope.short_factors))
        }
    return {}


def _long_rope(spec: DecoderSpec) -> RopeSpec:
    """That of layers that see everything."""
    windows = spec.attention.windows or (0,) * len(spec.ropes)
    return next(
        (rope for rope, window in zip(spec.ropes, windows, strict=True) if not window),
        spec.ropes[0],
    )


def _common(spec: DecoderSpec, config: HfConfig) -> dict[str, Any]:
    attention = spec.attention
    rms = "rms_" if spec.norm.kind == "rms" else ""
    longest = config.get("max_position_embeddings")
    # Families that scale their streams divide it.
    eps = next((value for key in _EPS if (value := config.get(key))), spec.norm.eps)
    values: dict[str, Any] = {
        "context_length": longest if isinstance(longest, int) else spec.max_positions,
        "embedding_length": spec.hidden_size,
        "block_count": spec.num_layers,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": attention.num_q_heads,
        "attention.head_count_kv": attention.num_kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        f"attention.layer_norm_{rms}epsilon": float(eps),
        "vocab_size": spec.vocab_size,
    }
    if window := max(attention.windows, default=0):
        values["attention.sliding_window"] = window
    if attention.soft_cap:
        values["attn_logit_softcapping"] = float(attention.soft_cap)
    if spec.logit_soft_cap:
        values["final_logit_softcapping"] = float(spec.logit_soft_cap)
    if attention.clip:
        values["attention.clamp_kqv"] = float(attention.clip)
    return values


def _rope(rope: RopeSpec) -> dict[str, Any]:
    if rope.kind == "none":
        return {}
    values: dict[str, Any] = {
        "rope.dimension_count": rope.rotary_dim,
        "rope.freq_base": float(rope.theta),
    }
    if rope.kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(rope.factor)}
    if rope.kind == "longrope":
        values["rope.scaling.attn_factor"] = float(rope.attention_factor)
    if rope.kind in ("yarn", "longrope"):
        values["rope.scaling.original_context_length"] = rope.original_max_positions
    if rope.kind == "yarn":
        values["rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
        values["rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
    return values


def _experts(spec: DecoderSpec) -> dict[str, Any]:
    experts = spec.experts
    if experts is None:
        return {}
    values = {
        "expert_count": experts.num_experts,
        "expert_used_count": experts.top_k,
        "expert_feed_forward_length": experts.intermediate_size,
    }
    if experts.gates_shared:
        values["expert_shared_feed_forward_length"] = experts.shared_size
    return values


def _gemma(spec: DecoderSpec, config: HfConfig) -> dict[str, Any]:
    scale = {}
    if not np.isclose(spec.attention.scale, spec.attention.head_dim**-0.5):
        scale["attention.scale"] = float(spec.attention.scale)
    local = [
        rope for rope, window in zip(spec.ropes, spec.attention.windows, strict=False) if window
    ]
    if local and local[0].theta != _long_rope(spec).theta:
        scale["rope.freq_base_swa"] = float(local[0].theta)
    return scale


def _of_config(keys: Mapping[str, str]) -> Callable[[DecoderSpec, HfConfig], dict[str, Any]]:
    """Numbers of config.json by the names that GGUF has for them."""

    def settings(spec: DecoderSpec, config: HfConfig) -> dict[str, Any]:
        found = {ours: config.get(theirs) for ours, theirs in keys.items()}
        return {ours: float(value) for ours, value in found.items() if value is not None}

    return settings


_granite = _of_config(
    {
        "attention.scale": "attention_multiplier",
        "residual_scale": "residual_multiplier",
        "embedding_scale": "embedding_multiplier",
        "logit_scale": "logits_scaling",
    }
)


def _minicpm(spec: DecoderSpec, config: HfConfig) -> dict[str, Any]:
    return {
        "embedding_scale": float(config.get("scale_emb", 1)),
        "residual_scale": config.get("scale_depth", 1) / spec.num_layers**0.5,
        "logit_scale": spec.hidden_size / config.get("dim_model_base", spec.hidden_size),
    }


def _experts_beside_shared(spec: DecoderSpec, config: HfConfig) -> dict[str, Any]:
    experts = spec.experts
    assert experts is not None
    return {
        "expert_shared_count": experts.shared_size // experts.intermediate_size,
        "leading_dense_block_count": experts.sparse.index(True),
        "expert_weights_scale": float(experts.scale),
        "expert_weights_norm": experts.normalizes,
        "expert_gating_func": SIGMOID if experts.scoring == "sigmoid" else SOFTMAX,
        "expert_group_count": experts.num_groups,
        "expert_group_used_count": experts.top_groups,
    }


def _deepseek(spec: DecoderSpec, config: HfConfig) -> dict[str, Any]:
    """Heads are as long as the latent space's vectors, keys' and values' lengths are besides."""
    latent, rope = spec.attention.latent, spec.ropes[0]
    assert latent is not None
    head_dim = latent.nope_dim + latent.rope_dim
    values = _experts_beside_shared(spec, config) | {
        "attention.kv_lora_rank": latent.kv_rank,
        "attention.key_length": latent.kv_rank + latent.rope_dim,
        "attention.value_length": latent.kv_rank,
        "attention.key_length_mla": head_dim,
        "attention.value_length_mla": latent.value_dim,
    }
    if latent.q_rank:
        values["attention.q_lora_rank"] = latent.q_rank
    if rope.kind == "yarn" and rope.factor > 1:
        growth = (spec.attention.scale * head_dim**0.5) ** 0.5 - 1
        values["rope.scaling.yarn_log_multiplier"] = growth / math.log(rope.factor)
    return values


_MORE: dict[str, Callable[[DecoderSpec, HfConfig], dict[str, Any]]] = {
    "gemma2": _gemma,
    "gemma3": _gemma,
    "granite": _granite,
    "granitemoe": _granite,
    "glm4moe": _experts_beside_shared,
    "deepseek2": _deepseek,
    "minicpm": _minicpm,
    "command-r": lambda spec, config: {"logit_scale": float(spec.logit_scale)},
    "cohere2": lambda spec, config: {"logit_scale": float(spec.logit_scale)},
    "mpt": lambda spec, config: {"attention.max_alibi_bias": 8.0},
    "qwen": lambda spec, config: {"feed_forward_length": 2 * spec.intermediate_size},
    "gptneox": lambda spec, config: {"use_parallel_residual": spec.parallel},
}
"""What only some have."""
