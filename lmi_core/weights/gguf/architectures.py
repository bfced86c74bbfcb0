"""The architectures that GGUF files name, and what each says beside common settings.

Format: keys as ggml's document on GGUF and llama.cpp's converter name them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lmi_core.weights.gguf.file import fault
from lmi_core.weights.gguf.metadata import Metadata
from lmi_core.weights.gguf.rotary import scaling_of


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str
    """Of the same one in config.json."""
    settings: Callable[[Metadata], dict[str, Any]] = lambda metadata: {}
    """Those that aren't common to all."""


SOFTMAX, SIGMOID = 1, 2
"""Of the ways to score experts."""
_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _gemma(num_layers: int) -> Callable[[Metadata], dict[str, Any]]:
    """The largest one, of ``num_layers``, scales scores by the hidden size of a head."""

    def settings(metadata: Metadata) -> dict[str, Any]:
        caps = {name: metadata.number(name) for name in _SOFT_CAPS}
        scale, base = metadata.number("attention.scale"), metadata.number("rope.freq_base_swa")
        size = metadata.number("attention.key_length") or 256
        if metadata.get("block_count") == num_layers:
            heads = metadata.number("attention.head_count") or 1
            size = metadata.number("embedding_length") / heads
        metadata.asked.add("attention.sliding_window_pattern")
        return {
            "query_pre_attn_scalar": scale**-2 if scale else size,
            "rope_local_base_freq": base or 10000.0,
            **{name: cap for name, cap in caps.items() if cap is not None},
        }

    return settings


def _falcon(metadata: Metadata) -> dict[str, Any]:
    heads, kv_heads = (metadata.number(f"attention.head_count{end}") for end in ("", "_kv"))
    has_two = metadata.has_in_layers("attn_norm_2.weight")
    return {
        "new_decoder_architecture": has_two or kv_heads not in (None, 1, heads),
        "num_ln_in_parallel_attn": 2 if has_two else 1,
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads or heads,
    }


def _granite(metadata: Metadata) -> dict[str, Any]:
    keys = {
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "embedding_multiplier": "embedding_scale",
        "logits_scaling": "logit_scale",
    }
    return {ours: metadata.number(key) or 1.0 for ours, key in keys.items()}


def _cohere(metadata: Metadata) -> dict[str, Any]:
    scale = metadata.number("logit_scale")
    has_norms = metadata.has_in_layers("attn_q_norm.weight")
    return {"use_qk_norm": has_norms} | ({} if scale is None else {"logit_scale": scale})


def _parallel(metadata: Metadata) -> dict[str, Any]:
    """Attention and MLP read one norm where there is but one."""
    return {
        "use_parallel_residual": not metadata.has_in_layers("ffn_norm.weight"),
        "qk_layernorm": metadata.has_in_layers("attn_q_norm.weight"),
    }


def mixture_settings(metadata: Metadata) -> dict[str, Any]:
    """Those that mixtures have in common."""
    keys = {
        "num_experts": "expert_count",
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    }
    found = metadata.numbers(keys)
    return {ours: value for ours, value in found.items() if value is not None}


def _baichuan(metadata: Metadata) -> dict[str, Any]:
    """The one of 40 layers has ALiBi, which no key says."""
    if metadata.get("block_count") != 40:
        return {}
    metadata.asked.add("attention.max_alibi_bias")
    return {
        "model_max_length": metadata.number("context_length"),
        "max_position_embeddings": None,
    }


def _chatglm(metadata: Metadata) -> dict[str, Any]:
    return {"multi_query_group_num": metadata.number("attention.head_count_kv")}


def _minicpm(metadata: Metadata) -> dict[str, Any]:
    """Where files of before these keys have none, they are those of the first models."""
    layers, hidden = (metadata.number(key) for key in ("block_count", "embedding_length"))
    residual = metadata.number("residual_scale")
    logits = metadata.number("logit_scale")
    return {
        "scale_emb": metadata.number("embedding_scale") or 12.0,
        "scale_depth": residual * layers**0.5 if residual else 1.4,
        "dim_model_base": round(hidden / logits) if logits else 256,
    }


def _clipped(metadata: Metadata) -> dict[str, Any]:
    clip = metadata.number("attention.clamp_kqv")
    return {"clip_qkv": clip} if clip else {}


def _mpt(metadata: Metadata) -> dict[str, Any]:
    inner, hidden = (metadata.number(f"{part}_length") for part in ("feed_forward", "embedding"))
    bias = metadata.number("attention.max_alibi_bias") or 8
    return {
        "expansion_ratio": inner // hidden,
        "attn_config": {"alibi_bias_max": bias, **_clipped(metadata)},
    }


def _shared_expert(metadata: Metadata) -> dict[str, Any]:
    size = metadata.number("expert_shared_feed_forward_length")
    return {} if size is None else {"shared_expert_intermediate_size": size}


def _experts_beside_shared(metadata: Metadata) -> dict[str, Any]:
    """GLM-4.5's and DeepSeek's, whose last layers, if there are some, predict further tokens."""
    further = metadata.number("nextn_predict_layers") or 0
    keys = {
        "routed_scaling_factor": "expert_weights_scale",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
    }
    found = metadata.numbers(keys)
    return {
        "n_shared_experts": metadata.number("expert_shared_count") or 0,
        "n_routed_experts": metadata.number("expert_count"),
        "num_hidden_layers": metadata.number("block_count") - further,
        "num_nextn_predict_layers": further,
        "first_k_dense_replace": metadata.number("leading_dense_block_count") or 0,
        **{ours: value for ours, value in found.items() if value},
    }


def _glm4_moe(metadata: Metadata) -> dict[str, Any]:
    scoring = metadata.number("expert_gating_func")
    if scoring not in (None, 0, SIGMOID):
        raise fault(metadata.file.path, f"has expert_gating_func {scoring}, not {SIGMOID}")
    return {
        **_experts_beside_shared(metadata),
        "norm_topk_prob": metadata.get("expert_weights_norm") is not False,
        "attention_bias": metadata.has_in_layers("attn_q.bias"),
        "use_qk_norm": metadata.has_in_layers("attn_q_norm.weight"),
    }


def _deepseek(metadata: Metadata) -> dict[str, Any]:
    """Of V2, or of V3, whose experts are chosen by sigmoids. Lengths of heads are those of the
    latent space where there are others besides."""
    scoring = metadata.number("expert_gating_func") or SOFTMAX
    if scoring not in (SOFTMAX, SIGMOID):
        known = f"{SOFTMAX} or {SIGMOID}"
        raise fault(metadata.file.path, f"has expert_gating_func {scoring}, not {known}")
    rotated = _needed(metadata, "rope.dimension_count")
    key, value = (
        metadata.number(f"attention.{part}_length_mla")
        or _needed(metadata, f"attention.{part}_length")
        for part in ("key", "value")
    )
    settings = {
        **_experts_beside_shared(metadata),
        "q_lora_rank": metadata.number("attention.q_lora_rank"),
        "kv_lora_rank": _needed(metadata, "attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "head_dim": rotated,
        "partial_rotary_factor": 1.0,
        "attention_bias": metadata.has_in_layers("attn_kv_a_mqa.bias"),
        "norm_topk_prob": metadata.get("expert_weights_norm") is True,
    }
    settings |= _groups(metadata, settings)
    if settings["n_group"] > 1:
        settings["topk_method"] = "group_limited_greedy"
    if scoring == SIGMOID:
        settings["architectures"] = ["DeepseekV3ForCausalLM"]
    return settings | _scores_of_yarn(metadata)


def _needed(metadata: Metadata, key: str) -> Any:
    if (value := metadata.number(key)) is None:
        raise fault(metadata.file.path, f"has no metadata {metadata.architecture}.{key}")
    return value


_GROUPS = {160: (8, 3), 256: (8, 4)}
"""How many there are and are taken in the models of so many experts, V2 and V3."""


def _groups(metadata: Metadata, settings: Mapping[str, Any]) -> dict[str, int]:
    """Files of before llama.cpp had groups don't name them."""
    found = {key: settings.get(key, 1) for key in ("n_group", "topk_group")}
    count = settings["n_routed_experts"]
    if "n_group" in settings or count not in _GROUPS:
        return found
    num_groups, num_taken = _GROUPS[count]
    metadata.notes.append(
        f"{metadata.architecture}.expert_group_count isn't there: experts are chosen from the best "
        f"{num_taken} of {num_groups} groups, as in the models of {count} experts"
    )
    return {"n_group": num_groups, "topk_group": num_taken}


def _scores_of_yarn(metadata: Metadata) -> dict[str, Any]:
    """A tenth of the factor with which scores grow, which is that of the rotation, too."""
    scaling, tenth = scaling_of(metadata, {}), metadata.number("rope.scaling.yarn_log_multiplier")
    if scaling is None or not tenth:
        return {}
    factor = round(10 * tenth, 6)  # a number in fp32
    return {"rope_scaling": {**scaling, "mscale": factor, "mscale_all_dim": factor}}


def _dbrx(metadata: Metadata) -> dict[str, Any]:
    keys = {
        "moe_num_experts": "expert_count",
        "moe_top_k": "expert_used_count",
        "ffn_hidden_size": "feed_forward_length",
    }
    heads, theta = metadata.number("attention.head_count_kv"), metadata.number("rope.freq_base")
    attention = {"kv_n_heads": heads, "rope_theta": theta, **_clipped(metadata)}
    return {
        "d_model": metadata.number("embedding_length"),
        "n_layers": metadata.number("block_count"),
        "n_heads": metadata.number("attention.head_count"),
        "max_seq_len": metadata.number("context_length"),
        "attn_config": {key: value for key, value in attention.items() if value is not None},
        "ffn_config": metadata.numbers(keys),
    }


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    """Its scores are the softmax of those that were chosen."""
    metadata.asked.add("expert_gating_func")
    scaling = scaling_of(metadata, {})
    return {} if scaling is None else {"rope_scaling": {**scaling, "truncate": False}}


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM"),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "gemma": Architecture("GemmaForCausalLM"),
    "gemma2": Architecture("Gemma2ForCausalLM", _gemma(46)),
    "gemma3": Architecture("Gemma3ForCausalLM", _gemma(62)),
    "phi2": Architecture("PhiForCausalLM"),
    "phi3": Architecture("Phi3ForCausalLM"),
    "gpt2": Architecture("GPT2LMHeadModel"),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        lambda metadata: {"use_parallel_residual": metadata.get("use_parallel_residual") is True},
    ),
    "falcon": Architecture("FalconForCausalLM", _falcon),
    "starcoder2": Architecture("Starcoder2ForCausalLM"),
    "stablelm": Architecture("StableLmForCausalLM", _parallel),
    "olmo2": Architecture("Olmo2ForCausalLM"),
    "granite": Architecture("GraniteForCausalLM", _granite),
    "command-r": Architecture("CohereForCausalLM", _cohere),
    "cohere2": Architecture("Cohere2ForCausalLM", _cohere),
    "nemotron": Architecture("NemotronForCausalLM"),
    "smollm3": Architecture("SmolLM3ForCausalLM"),
    "baichuan": Architecture("BaichuanForCausalLM", _baichuan),
    "bloom": Architecture("BloomForCausalLM"),
    "chatglm": Architecture("ChatGLMForConditionalGeneration", _chatglm),
    "exaone": Architecture("ExaoneForCausalLM"),
    "internlm2": Architecture("InternLM2ForCausalLM"),
    "minicpm": Architecture("MiniCPMForCausalLM", _minicpm),
    "mpt": Architecture("MPTForCausalLM", _mpt),
    "olmo": Architecture("OlmoForCausalLM", _clipped),
    "qwen": Architecture("QWenLMHeadModel"),
    "starcoder": Architecture(
        "GPTBigCodeForCausalLM",
        lambda metadata: {"multi_query": metadata.number("attention.head_count_kv") == 1},
    ),
}
"""By what files call them."""
MIXTURES = {
    "llama": Architecture("MixtralForCausalLM"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", _shared_expert),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", lambda metadata: {"norm_topk_prob": True}),
    "olmoe": Architecture("OlmoeForCausalLM", _clipped),
    "granitemoe": Architecture("GraniteMoeForCausalLM", _granite),
    "gpt-oss": Architecture("GptOssForCausalLM", _gpt_oss),
    "glm4moe": Architecture("Glm4MoeForCausalLM", _glm4_moe),
    "deepseek2": Architecture("DeepseekV2ForCausalLM", _deepseek),
    "dbrx": Architecture("DbrxForCausalLM", _dbrx),
    "phimoe": Architecture("PhiMoEForCausalLM"),
}
"""The same of mixtures of experts."""
INTERLEAVED = (
    *("baichuan", "granite", "granitemoe", "internlm2", "llama", "minicpm", "olmo", "smollm3"),
)
"""Whose query and key rows the converter puts into the order of interleaved rotation."""
