"""Tiny random checkpoints of every family, written by transformers, for tests.

Weights are drawn so that activations keep a scale of about 1 and logits a standard deviation of
about 1; norms and biases are random too, so that a forgotten one shows.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_tokenizer

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_theta": 10000.0, "rope_type": rope_type, **parameters}


LLAMA3_ROPE = _rope(
    "llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
GLOBAL_ROPE = _rope("linear", rope_theta=1000000.0, factor=8.0)
YARN_ROPE = _rope("yarn", factor=4.0, original_max_position_embeddings=128)

PARTIAL_ROPE = _rope("default", partial_rotary_factor=0.25)
LONG_ROPE = {
    **_rope("longrope", original_max_position_embeddings=256, partial_rotary_factor=0.75),
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}
FULL_LONG_ROPE = {
    **_rope("longrope", original_max_position_embeddings=256, factor=2.0),
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0],
}

# name -> (model type, configuration beyond SHAPE)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama1": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-6}),
    "llama2": ("llama", {"rms_norm_eps": 1e-5}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5}),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_linear": ("llama", {"rope_parameters": _rope("linear", factor=2.0)}),
    "llama_dynamic": ("llama", {"rope_parameters": _rope("dynamic", factor=4.0)}),
    "llama_yarn": ("llama", {"rope_parameters": YARN_ROPE}),
    "mistral": ("mistral", {"sliding_window": 24, "head_dim": 32}),
    "mistral_full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN_ROPE}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_window": (
        "qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 2,
        },
    ),
}

# The same of families whose tests are tests/models/test_families.py.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": (
        "gemma2",
        {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 20}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 20}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma3_scaled": (  # as from 4B up
        "gemma3_text",
        {"sliding_window": 20, "tie_word_embeddings": True, "final_logit_softcapping": 4.0}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {
            "rope_parameters": {
                "sliding_attention": _rope("default"),
                "full_attention": GLOBAL_ROPE,
            }
        },
    ),
    "phi3": (
        "phi3",
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 256},
    ),
    "phi3_long": (
        "phi3",
        {"rope_parameters": LONG_ROPE | {"original_max_position_embeddings": 2}}
        | {"original_max_position_embeddings": 2, "sliding_window": 24},
    ),
    "granite": (
        "granite",
        {"attention_multiplier": 0.3, "residual_multiplier": 0.4, "embedding_multiplier": 3.0}
        | {"logits_scaling": 1.3, "attention_bias": True, "mlp_bias": True},
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "olmo": ("olmo", {"clip_qkv": 0.7, "attention_bias": True}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {"sliding_window": 24}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": {"sliding_attention": _rope("default"), "full_attention": YARN_ROPE}},
    ),
    "glm": ("glm", {"head_dim": 32}),
    "glm4": ("glm4", {"head_dim": 32}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm_parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "cohere": ("cohere", {"logit_scale": 0.9}),
    "cohere_plus": ("cohere", {"logit_scale": 0.9, "use_qk_norm": True}),
    "cohere2": (
        "cohere2",
        {"logit_scale": 0.9, "sliding_window": 24}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "nemotron": ("nemotron", {"attention_bias": True, "mlp_bias": True}),
    "exaone4": (
        "exaone4",
        {"sliding_window": 24}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gpt_neox": ("gpt_neox", {"rope_parameters": PARTIAL_ROPE}),
    "gpt_neox_serial": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "phi": ("phi", {"num_key_value_heads": 4}),
    "phi_norms": ("phi", {"qk_layernorm": True}),
    "gpt2": ("gpt2", {"tie_word_embeddings": True, "n_inner": 96}),
    "gpt_bigcode": ("gpt_bigcode", {"tie_word_embeddings": True}),
    "gpt_bigcode_heads": ("gpt_bigcode", {"multi_query": False, "tie_word_embeddings": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 24, "tie_word_embeddings": True}),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "codegen": ("codegen", {"rotary_dim": 8}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "tie_word_embeddings": True}),
    "opt_350m": (
        "opt",
        {"ffn_dim": 96, "word_embed_proj_dim": 48, "do_layer_norm_before": False},
    ),
    "gpt_neo": (
        "gpt_neo",
        {"num_layers": 3, "num_heads": 4, "window_size": 24}
        | {"attention_types": [[["global"], 1], [["local"], 2]]},
    ),
    "falcon_7b": ("falcon", {"num_attention_heads": 8, "tie_word_embeddings": True}),
    "falcon_40b": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "falcon_rw": (
        "falcon",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "bloom": ("bloom", {"n_layer": 3, "n_head": 4, "tie_word_embeddings": True}),
    "bloom_heads": ("bloom", {"n_layer": 2, "n_head": 6, "hidden_size": 96}),
    "mpt": (
        "mpt",
        {"d_model": 64, "n_layers": 3, "n_heads": 4, "tie_word_embeddings": True}
        | {"attn_config": {"clip_qkv": 0.7}},
    ),
    "mpt_heads": ("mpt", {"d_model": 96, "n_layers": 2, "n_heads": 6}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True}
        | {"moe_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
        | {"decoder_sparse_step": 2, "shared_expert_intermediate_size": 80},
    ),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 0.9}),
    "granite_moe": (
        "granitemoe",
        {"attention_multiplier": 0.3, "residual_multiplier": 0.4, "embedding_multiplier": 3.0}
        | {"logits_scaling": 1.3, "num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    "phimoe": (
        "phimoe",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "router_jitter_noise": 0.3}
        | {"attention_bias": True, "lm_head_bias": True}
        | {"rope_parameters": FULL_LONG_ROPE | {"short_mscale": 1.1, "long_mscale": 1.1}},
    ),
    "glm4_moe": (
        "glm4_moe",
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "use_qk_norm": True}
        | {"attention_bias": True, "head_dim": 32, "first_k_dense_replace": 1},
    ),
    "gpt_oss": (
        "gpt_oss",
        {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 24}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": {**YARN_ROPE, "truncate": False}},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {**LATENT, "q_lora_rank": None, "n_routed_experts": 8, "topk_method": "greedy"}
        | {"routed_scaling_factor": 1.7, "attention_bias": True},
    ),
    "deepseek_v2_groups": (
        "deepseek_v2",
        {**LATENT, "n_routed_experts": 12, "topk_method": "group_limited_greedy"}
        | {"n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**LATENT, "n_routed_experts": 12, "n_group": 4, "topk_group": 2}
        | {"rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.8}},
    ),
    "dbrx": (
        "dbrx",
        {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 512}
        | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 500000}}
        | {"ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 6, "moe_top_k": 3}}
        | {"rope_parameters": _rope("default", rope_theta=500000)},
    ),
    "internlm3": ("internlm3", {"head_dim": 32, "qkv_bias": True, "bias": True}),
    # Of tests/published_models.py.
    "baichuan": ("baichuan", {"rms_norm_eps": 1e-6}),
    "baichuan2_13b": ("baichuan13b", {"rms_norm_eps": 1e-6, "z_loss_weight": 0}),
    "chatglm2": (
        "chatglm",
        {"kv_channels": 32, "multi_query_attention": True, "multi_query_group_num": 2}
        | {"layernorm_epsilon": 1e-5, "add_qkv_bias": True, "rmsnorm": True},
    ),
    "chatglm3_32k": (
        "chatglm",
        {"kv_channels": 16, "multi_query_attention": True, "multi_query_group_num": 1}
        | {"layernorm_epsilon": 1e-5, "add_qkv_bias": True, "rope_ratio": 50},
    ),
    "internlm": (
        "internlm",
        {"rms_norm_eps": 1e-6, "num_key_value_heads": 4}
        | {"rotary": {"base": 9000, "type": "dynamic"}},
    ),
    "internlm2": ("internlm2", {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "bias": False}),
    "qwen": (
        "qwen",
        {"kv_channels": 16, "layer_norm_epsilon": 1e-6, "intermediate_size": 192, "seq_length": 256}
        | {"rotary_emb_base": 9000, "use_logn_attn": True, "use_dynamic_ntk": True},
    ),
    "exaone": ("exaone", {"layer_norm_epsilon": 1e-5, "rope_theta": 5e5}),
    "minicpm": (
        "minicpm",
        {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 60, "rms_norm_eps": 1e-5}
        | {"tie_word_embeddings": True},
    ),
}


def make_checkpoint(
    directory: Path,
    variant: str,
    *,
    dtype: str = "float32",
    sharded: bool = False,
    seed: int = 0,
    tokenizer: bool = True,
    **config: Any,
) -> Path:
    """Write config.json, safetensors and a tokenizer to ``directory``, of an entry of ``VARIANTS``
    or ``FAMILIES``.

    ``dtype``: float32, bfloat16 or float16. ``config`` overrides the model's configuration.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    import tests.published_models  # noqa: F401

    logging.disable_progress_bar()

    model_type, extra = (VARIANTS | FAMILIES)[variant]
    settings = {**SHAPE, **extra, **config}
    torch_dtype = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **settings), dtype=torch.float32
    )
    draw_weights(model, seed)
    model.to(torch_dtype)
    model.config.dtype = torch_dtype
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size="100KB" if sharded else "1GB")
    if tokenizer:
        write_tokenizer(directory)
    return directory


@functools.cache
def cached_checkpoint(
    variant: str, *, dtype: str = "float32", sharded: bool = False, seed: int = 0
) -> Path:
    """A checkpoint shared by all tests of the session; it must not be written to."""
    name = f"{variant}-{dtype}-{seed}" + ("-sharded" if sharded else "")
    if (_root() / name / "tokenizer.json").exists():
        return _root() / name
    return make_checkpoint(_root() / name, variant, dtype=dtype, sharded=sharded, seed=seed)


@functools.cache
def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="lmi-checkpoints-")


def _root() -> Path:
    """A directory of the session, or one that keeps what was made elsewhere."""
    kept = os.environ.get("LMI_TEST_CHECKPOINTS")
    return Path(kept or _temporary_directory().name)


def draw_weights(model: Any, seed: int) -> None:
    """As the module says."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight") or (parameter.ndim == 1 and "bias" not in name):
                parameter.copy_(1.0 + 0.1 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            elif "embed_tokens" in name and not tied:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
