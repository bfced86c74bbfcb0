"""From a GGUF file's metadata to what ``config.json`` says of such a model.

Format: keys as ggml's document on GGUF and llama.cpp's converter name them, below the
architecture's name.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from lmi_core.errors import ModelError
from lmi_core.weights.gguf.architectures import ARCHITECTURES, MIXTURES, mixture_settings
from lmi_core.weights.gguf.file import GgufFile, fault
from lmi_core.weights.gguf.metadata import Metadata
from lmi_core.weights.gguf.rotary import rotary
from lmi_core.weights.gguf.types import BLOCK_TYPES

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
    config |= mixture_settings(metadata) if has_experts else {}
    config |= rotary(metadata, config) | architecture.settings(metadata)
    if any(tensor.dtype in BLOCK_TYPES for tensor in file.tensors.values()):
        config["quantization_config"] = {"quant_method": "gguf"}
    types = Counter(tensor.dtype for tensor in file.tensors.values())
    prefix = f"{metadata.architecture}."
    described = {
        "architecture": metadata.architecture,
        "types": dict(types.most_common()),
        "keys": {ours: prefix + _named(metadata, keys) for ours, keys in _KEYS.items()},
        "notes": metadata.notes + _unread(metadata),
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
