"""From a GGUF file's metadata to what ``config.json`` says of such a model.

Format: keys as ggml's document on GGUF and llama.cpp's converter name them, below the
architecture's name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lmi_core.errors import ModelError
from lmi_core.weights.float_tensors import to_float32
from lmi_core.weights.gguf.file import GgufFile, fault
from lmi_core.weights.gguf.types import BLOCK_TYPES
from lmi_core.weights.safetensors_file import TensorInfo

_KEYS = {
    "hidden_size": ("embedding_length",),
    "num_hidden_layers": ("block_count",),
    "intermediate_size": ("feed_forward_length",),
    "num_attention_heads": ("attention.head_count",),
    "num_key_value_heads": ("attention.head_count_kv",),
    "head_dim": ("attention.key_length",),
    "max_position_embeddings": ("context_length",),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
    "rope_theta": ("rope.freq_base",),
    "sliding_window": ("attention.sliding_window",),
}
"""What settings are called, whichever the architecture."""
_NEEDED = (
    *("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads"),
    *("max_position_embeddings", "rms_norm_eps"),
)
_LAYER = "blk.0."
_SCALINGS = ("none", "linear", "yarn")
_CHANGES: dict[str, tuple[object, ...]] = {
    "expert_weights_scale": (0, 1),
    "expert_weights_norm": (False,),
    "expert_gating_func": (0, 1),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.output_scale": (0, 1),
    "attention.causal": (True,),
    "attention.temperature_scale": (0,),
    "attention.sliding_window_pattern": (),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "router_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_attn_factor": (0, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.alpha": (0, 1),
    "rope.dimension_sections": (),
    "pooling_type": (0,),
}
"""Settings that change a model's numbers, and the values with which they change nothing."""
_HARMLESS = (
    *("vocab_size", "attention.value_length", "attention.key_length_swa", "tensor_data_layout"),
    *("attention.value_length_swa", "rope.dimension_count_swa", "rope.scaling.finetuned"),
    *("rope.scaling.original_context_length", "rope.scaling.type", "expert_count"),
    *("expert_used_count", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
    *("rope.scaling.factor", "rope.freq_base_swa", "use_parallel_residual"),
)
"""Settings that are told by others, or by the tensors."""


@dataclass(frozen=True, slots=True)
class _Architecture:
    name: str
    """Of the same one in config.json."""
    settings: Callable[[Metadata], dict[str, Any]] = lambda metadata: {}
    """Those that aren't common to all."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """A file's metadata with checked access."""

    file: GgufFile
    architecture: str
    asked: set[str] = field(default_factory=set)
    """Keys that were read."""

    def get(self, key: str) -> Any:
        """A number or a string of the architecture; a list of layers' where all are alike."""
        name = f"{self.architecture}.{key}"
        self.asked.add(key)
        value = self.file.metadata.get(name)
        if isinstance(value, np.ndarray):
            if not len(value) or (value != value[0]).any():
                raise ModelError(
                    f"{self.file.path}: {name} differs by layer, which is not supported here",
                    field=self.file.path.name,
                )
            value = value[0].item()
        if isinstance(value, list):
            raise fault(self.file.path, f"has a list of strings as {name}")
        return value

    def number(self, key: str) -> Any:
        """As ``get``, an int or a float."""
        value = self.get(key)
        if value is not None and (isinstance(value, str) or not math.isfinite(value)):
            name = f"{self.architecture}.{key}"
            raise fault(self.file.path, f"has {str(value)[:40]!r} as {name}, which isn't a number")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def has_in_layers(self, tensor: str) -> bool:
        return self.has(_LAYER + tensor)


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


def _mixture(metadata: Metadata) -> dict[str, Any]:
    keys = {
        "num_experts": "expert_count",
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    }
    found = {ours: metadata.number(key) for ours, key in keys.items()}
    return {ours: value for ours, value in found.items() if value is not None}


def _shared_expert(metadata: Metadata) -> dict[str, Any]:
    size = metadata.number("expert_shared_feed_forward_length")
    return {} if size is None else {"shared_expert_intermediate_size": size}


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    """Its scores are the softmax of those that were chosen."""
    metadata.asked.add("expert_gating_func")
    scaling = _scaling(metadata, {})
    return {} if scaling is None else {"rope_scaling": {**scaling, "truncate": False}}


ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM"),
    "qwen2": _Architecture("Qwen2ForCausalLM"),
    "qwen3": _Architecture("Qwen3ForCausalLM"),
    "gemma": _Architecture("GemmaForCausalLM"),
    "gemma2": _Architecture("Gemma2ForCausalLM", _gemma(46)),
    "gemma3": _Architecture("Gemma3ForCausalLM", _gemma(62)),
    "phi2": _Architecture("PhiForCausalLM"),
    "phi3": _Architecture("Phi3ForCausalLM"),
    "gpt2": _Architecture("GPT2LMHeadModel"),
    "gptneox": _Architecture(
        "GPTNeoXForCausalLM",
        lambda metadata: {"use_parallel_residual": metadata.get("use_parallel_residual") is True},
    ),
    "falcon": _Architecture("FalconForCausalLM", _falcon),
    "starcoder2": _Architecture("Starcoder2ForCausalLM"),
    "stablelm": _Architecture("StableLmForCausalLM", _parallel),
    "olmo2": _Architecture("Olmo2ForCausalLM"),
    "granite": _Architecture("GraniteForCausalLM", _granite),
    "command-r": _Architecture("CohereForCausalLM", _cohere),
    "cohere2": _Architecture("Cohere2ForCausalLM", _cohere),
    "nemotron": _Architecture("NemotronForCausalLM"),
    "smollm3": _Architecture("SmolLM3ForCausalLM"),
}
"""By what files call them."""
MIXTURES = {
    "llama": _Architecture("MixtralForCausalLM"),
    "qwen2moe": _Architecture("Qwen2MoeForCausalLM", _shared_expert),
    "qwen3moe": _Architecture("Qwen3MoeForCausalLM", lambda metadata: {"norm_topk_prob": True}),
    "olmoe": _Architecture("OlmoeForCausalLM"),
    "granitemoe": _Architecture("GraniteMoeForCausalLM", _granite),
    "gpt-oss": _Architecture("GptOssForCausalLM", _gpt_oss),
}
"""The same of mixtures of experts."""
INTERLEAVED = ("llama", "granite", "granitemoe", "smollm3")
"""Whose query and key rows the converter puts into the order of interleaved rotation."""


def read_config(file: GgufFile) -> dict[str, Any]:
    """The content of a ``config.json`` for ``file``.

    Raises ModelError for a model that can't be read, naming what it has.
    """
    metadata = _metadata(file)
    has_experts = _has_experts(file, metadata.architecture)
    architecture = (MIXTURES if has_experts else ARCHITECTURES)[metadata.architecture]
    config: dict[str, Any] = {"architectures": [architecture.name], "model_type": "gguf"}
    for ours, keys in _KEYS.items():
        value = next((found for key in keys if (found := metadata.number(key)) is not None), None)
        if value is not None:
            config[ours] = value
        elif ours in _NEEDED:
            raise fault(file.path, f"has no metadata {metadata.architecture}.{keys[0]}")
    if not config.get("sliding_window"):
        config["sliding_window"] = None
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise fault(file.path, "has no matrix token_embd.weight")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = not metadata.has("output.weight")
    config |= _mixture(metadata) if has_experts else {}
    config |= _rotary(metadata, config) | architecture.settings(metadata)
    if any(tensor.dtype in BLOCK_TYPES for tensor in file.tensors.values()):
        config["quantization_config"] = {"quant_method": "gguf"}
    types = Counter(tensor.dtype for tensor in file.tensors.values())
    prefix = f"{metadata.architecture}."
    described = {
        "architecture": metadata.architecture,
        "types": dict(types.most_common()),
        "keys": {ours: prefix + _named(metadata, keys) for ours, keys in _KEYS.items()},
        "notes": _unread(metadata),
    }
    return config | {"gguf": described}


def _named(metadata: Metadata, keys: tuple[str, ...]) -> str:
    """Which of ``keys`` the file has, else the first."""
    prefix = f"{metadata.architecture}."
    return next((key for key in keys if prefix + key in metadata.file.metadata), keys[0])


def _unread(metadata: Metadata) -> list[str]:
    """What is said of settings that nothing here reads; ModelError for one that is known to change
    the model's numbers."""
    prefix, unknown = f"{metadata.architecture}.", []
    for name, value in metadata.file.metadata.items():
        key = name.removeprefix(prefix)
        if key == name or key in metadata.asked or key in _HARMLESS:
            continue
        if key not in _CHANGES:
            unknown.append(name)
        elif isinstance(value, list | np.ndarray) or value not in _CHANGES[key]:
            raise ModelError(
                f"{metadata.file.path} has {name} {str(value)[:40]}, which changes the model's "
                "numbers and is not supported here",
                field=metadata.file.path.name,
            )
    if not unknown:
        return []
    return [f"metadata that isn't known here is left out: {', '.join(unknown)[:200]}"]


def _metadata(file: GgufFile) -> Metadata:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise fault(file.path, "has no general.architecture")
    has_experts = _has_experts(file, name)
    known = MIXTURES if has_experts else ARCHITECTURES
    if name not in known:
        what = f"of architecture {name[:40]!r}"
        kind = "GGUF files"
        if has_experts:
            what, kind = f"a mixture of experts ({name[:40]})", "mixtures in GGUF"
        raise ModelError(
            f"{file.path} is {what}; of {kind} {', '.join(known)} are supported",
            field="general.architecture",
        )
    return Metadata(file, name)


def _has_experts(file: GgufFile, architecture: str) -> bool:
    count = file.metadata.get(f"{architecture}.expert_count")
    return bool(isinstance(count, int) and count) or any("_exps." in name for name in file.tensors)


def _rotary(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or (config["hidden_size"] // heads if heads else 0)
    settings: dict[str, Any] = {}
    if (rotated := metadata.number("rope.dimension_count")) and head_dim:
        settings["partial_rotary_factor"] = rotated / head_dim
    if (scaling := _scaling(metadata, config)) is not None:
        settings["rope_scaling"] = scaling
    return settings


def _scaling(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any] | None:
    original = metadata.number("rope.scaling.original_context_length")
    factor = metadata.number("rope.scaling.factor")
    linear = metadata.number("rope.scale_linear")
    long, short = (
        _numbers(metadata, name)
        for name in ("rope_factors_long.weight", "rope_factors_short.weight")
    )
    if (freqs := _numbers(metadata, "rope_freqs.weight")) is not None:
        # Frequencies of Llama 3 are divided by numbers that the file lists.
        return {
            "rope_type": "longrope",
            "factor": 1.0,
            "attention_factor": 1.0,
            "short_factor": freqs,
            "long_factor": freqs,
        }
    if long is not None and short is not None:
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": metadata.number("rope.scaling.attn_factor") or 1.0,
            "original_max_position_embeddings": original or config["max_position_embeddings"],
        }
    kind = str(metadata.get("rope.scaling.type") or ("linear" if linear else "none"))
    factor = factor or linear
    if kind not in _SCALINGS:
        raise ModelError(
            f"{metadata.file.path} has {metadata.architecture}.rope.scaling.type {kind[:40]!r}; "
            f"{', '.join(_SCALINGS)} are supported",
            field=metadata.file.path.name,
        )
    if kind == "none" or not factor:
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        if original:
            scaling["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if (value := metadata.number(f"rope.scaling.yarn_{name}")) is not None:
                scaling[name] = value
    return scaling


def _numbers(metadata: Metadata, name: str) -> list[float] | None:
    tensor = metadata.file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.num_bytes > 1 << 16:
        raise fault(metadata.file.path, f"has {name} as {tensor.dtype} {[*tensor.shape]}")
    return _read(tensor)


def _read(tensor: TensorInfo) -> list[float]:
    values = np.fromfile(tensor.path, np.float32, tensor.num_bytes // 4, offset=tensor.offset)
    return [float(value) for value in to_float32(values, tensor.dtype)]
