"""Shapes of other families than the benchmarks' own: configurations, whose tensors and roofs the
engine's families know.

``mixture`` routes nearly uniformly, as random routers do; ``mixture-zipf`` takes the experts of
each layer about in inverse proportion to their ranks; ``mixture-1`` has one layer, to try things.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bench.checkpoints import (
    SHAPES,
    MakeTensor,
    Shape,
    make_checkpoint,
    random_bf16,
    write_checkpoint,
)
from lmi_core.bench.rooflines import ModelShape, RoofShape
from lmi_core.models.registry import family_of
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.tensor_check import expected_shapes
from lmi_core.weights.hf_config import HfConfig

ROOT = Path("build/models")
_IDS = {"bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16"}


def _config(
    architecture: str, model_type: str, vocab_size: int, sizes: tuple[int, ...], **more: Any
) -> dict[str, Any]:
    """``sizes``: layers, hidden and inner size, heads, KV heads."""
    keys = ("num_hidden_layers", "hidden_size", "intermediate_size")
    keys += ("num_attention_heads", "num_key_value_heads")
    named = {"architectures": [architecture], "model_type": model_type, "vocab_size": vocab_size}
    return named | dict(zip(keys, sizes, strict=True)) | _IDS | more


def _mixture(num_layers: int) -> dict[str, Any]:
    """Qwen3-30B-A3B's layers, fewer of them."""
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    more = {"head_dim": 128, "norm_topk_prob": True, "tie_word_embeddings": False, **experts}
    more |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6}
    sizes = num_layers, 2048, 6144, 32, 4
    return _config("Qwen3MoeForCausalLM", "qwen3_moe", 32000, sizes, **more)


CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        **_config("GPT2LMHeadModel", "gpt2", 50257, (12, 768, 3072, 12, 12)),
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "n_positions": 1024,
    },
    "gemma2": _config(
        *("Gemma2ForCausalLM", "gemma2", 256000, (13, 1152, 4608, 8, 4)),
        head_dim=128,
        query_pre_attn_scalar=128,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=4096,
    ),
    "phi3": _config(
        *("Phi3ForCausalLM", "phi3", 32064, (16, 1536, 4096, 16, 16)),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        pad_token_id=0,
    ),
    "mixture": _mixture(9),
    "mixture-zipf": _mixture(9),
    "mixture-1": _mixture(1),
    "bert-base": _config(
        *("BertModel", "bert", 30522, (12, 768, 3072, 12, 12)),
        max_position_embeddings=512,
        type_vocab_size=2,
        layer_norm_eps=1e-12,
        hidden_act="gelu",
        pad_token_id=0,
    ),
}
DENSE = Shape("dense-16", "LlamaForCausalLM", 16, 2048, 32, 4, 5632, False)
"""About as many bytes of int4 as a row of ``mixture`` reads."""
ALL_SHAPES = (*SHAPES, DENSE.name, *CONFIGS)


def shape_of(name: str) -> RoofShape:
    if name in CONFIGS:
        return ModelShape.of(_spec(name))
    return DENSE if name == DENSE.name else SHAPES[name]


def checkpoint(name: str) -> Path:
    """The checkpoint of a shape under build/models, made if it isn't there."""
    if name not in CONFIGS:
        return make_checkpoint(DENSE if name == DENSE.name else SHAPES[name], ROOT / name)
    tensors = expected_shapes(_spec(name))
    return write_checkpoint(ROOT / name, CONFIGS[name], tensors, _maker(name))


def _spec(name: str) -> DecoderSpec:
    config = HfConfig(Path("config.json"), CONFIGS[name])
    family, text = family_of(config)
    return family.read_spec(text)


def _maker(name: str) -> MakeTensor:
    """Random numbers; experts of a layer are all alike, which saves a minute."""
    rng = np.random.default_rng(0)
    drawn: dict[tuple[int, ...], bytes] = {}

    def make(tensor: str, dims: tuple[int, ...]) -> Iterable[bytes]:
        if ".experts." in tensor:
            if dims not in drawn:
                drawn[dims] = random_bf16(rng, dims, False)
            return [drawn[dims]]
        data = random_bf16(rng, dims, tensor.endswith("weight") and len(dims) == 1)
        if name == "mixture-zipf" and len(dims) == 2:
            data = _uneven(rng, tensor, dims, data)
        return [data]

    return make


def _uneven(rng: np.random.Generator, tensor: str, dims: tuple[int, ...], data: bytes) -> bytes:
    """One column of the stream is large in every token, and nothing is added to it; routers make
    of it logits by the ranks of their experts."""
    rows = np.frombuffer(data, np.uint16).reshape(dims).copy()
    if "embed_tokens" in tensor:
        rows[:, 0] = 0x4348  # 200, where what layers add to others stays around 1
    elif tensor.endswith(("o_proj.weight", "down_proj.weight")):
        rows[0] = 0
    elif tensor.endswith("mlp.gate.weight"):
        ranks = 1 + rng.permutation(dims[0]).astype(np.float32)
        # The norm leaves about 40 of it.
        rows[:, 0] = (-np.log(ranks) / np.float32(40.0)).view(np.uint32) >> 16
    return rows.tobytes()
