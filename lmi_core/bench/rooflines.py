"""How fast a model's steps could be at most, from its shape and the machine's roofs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lmi_core.bench.roofs import Roofs
from lmi_core.models.expert_tensors import idle_params
from lmi_core.models.registry import family_of
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.tensor_check import expected_shapes
from lmi_core.runners.runner import RunnerInfo
from lmi_core.weights.hf_config import read_hf_config


class RoofShape(Protocol):
    """What the roofs of a model follow from."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def kv_columns(self) -> int:
        """Of what a layer's cache keeps of a token."""
        ...

    @property
    def linear_params(self) -> int:
        """Weights of all linears that a decode step of one row reads, the head included."""
        ...

    def params_read(self, num_rows: int) -> float:
        """The same of so many rows: of a mixture, whose rows choose their experts at random, so
        many as they choose between them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A ``RoofShape`` of a model's files."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    kv_columns: int
    linear_params: int
    idle_params: int = 0
    """Of the experts that a row doesn't take."""
    share_taken: float = 1.0
    """Of a layer's experts, by a row."""

    @classmethod
    def read(cls, directory: Path) -> ModelShape:
        """Raises ModelError for a model of no family of ours."""
        config = read_hf_config(directory)
        family, text = family_of(config)
        return cls.of(family.read_spec(text))

    @classmethod
    def of(cls, spec: DecoderSpec) -> ModelShape:
        head = spec.vocab_size * spec.hidden_size
        names = spec.names
        linears = sum(
            math.prod(shape)
            for name, shape in expected_shapes(spec).items()
            if len(shape) == 2
            and name not in (names.embedding, names.positions, f"{names.head}.weight")
        )
        experts, attention = spec.experts, spec.attention
        idle = 0 if experts is None else idle_params(experts, spec.hidden_size)
        return cls(
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            num_layers=spec.num_layers,
            num_heads=attention.num_q_heads,
            head_dim=attention.head_dim,
            kv_columns=attention.kv_size * (1 if attention.latent is not None else 2),
            linear_params=linears - idle + head,
            idle_params=idle,
            share_taken=1.0 if experts is None else experts.top_k / experts.num_experts,
        )

    def params_read(self, num_rows: int) -> float:
        left = (1 - self.share_taken) ** (num_rows - 1)
        return self.linear_params + self.idle_params * (1 - left)


def dtype_of(runner: RunnerInfo) -> str:
    """The dtype that the model's roof counts with."""
    return runner.quantize or runner.dtype


ELEMENT_BYTES = {"bf16": 2.0, "fp32": 4.0, "int8": 1.0, "int4": 4.25 / 8}
"""Bytes of a layer's weight, for the dtypes that have a roof; int4 with the scale and zero point of
128 weights."""
GGUF_BYTES = {"q4_0": 18 / 32, "q4_k": 144 / 256, "q6_k": 210 / 256, "q8_0": 34 / 32}
"""The same of GGUF files whose matrices are all of one type: a block's bytes over its weights."""


def weight_bytes(dtype: str) -> float:
    """Of a layer's weight; raises KeyError."""
    return GGUF_BYTES[dtype] if dtype in GGUF_BYTES else ELEMENT_BYTES[dtype]


def head_bytes(dtype: str) -> float:
    """Of a weight of the output head, which int4 leaves at int8."""
    return 1.0 if dtype == "int4" else weight_bytes(dtype)


def kv_bytes(dtype: str) -> int:
    """Of a key's or value's element."""
    return 4 if dtype == "fp32" else 2


def gflops_of(dtype: str, roofs: Roofs) -> float:
    """Of the linears; int4 and GGUF's types compute as int8 does."""
    return {"bf16": roofs.bf16_gflops, "fp32": roofs.fp32_gflops}.get(dtype, roofs.int8_gops)


def prefill_roof_s(shape: RoofShape, dtype: str, num_tokens: int, roofs: Roofs) -> float:
    """Operations of the linears, of causal attention, and of the head for one token."""
    head = shape.vocab_size * shape.hidden_size
    linear = 2 * (shape.linear_params - head) * num_tokens + 2 * head
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * num_tokens**2
    attention_gflops = roofs.fp32_gflops if dtype == "fp32" else roofs.bf16_gflops
    return (linear / gflops_of(dtype, roofs) + attention / attention_gflops) * 1e-9


def decode_roof_s(shape: RoofShape, dtype: str, batch: int, context: float, roofs: Roofs) -> float:
    """One step: its bytes (linears, head, KV) or its operations, whichever takes longer."""
    kv_row = shape.num_layers * shape.kv_columns
    head = shape.vocab_size * shape.hidden_size
    num_bytes = (
        weight_bytes(dtype) * (shape.params_read(batch) - head)
        + head_bytes(dtype) * head
        + kv_bytes(dtype) * batch * context * kv_row
    )
    return max(
        num_bytes / (roofs.read_gb_per_s * 1e9),
        2 * shape.linear_params * batch / (gflops_of(dtype, roofs) * 1e9),
    )
