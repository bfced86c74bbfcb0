"""What is measured, point by point, and what each costs by a model: its bytes, its operations."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from bench.checkpoints import SHAPES, Shape
from lmi_core.bench.rooflines import ELEMENT_BYTES, head_bytes, kv_bytes

NUM_NEW = 32
"""And one for each of the batch: they begin one after the other."""
OWN_TOKENS = 64
"""Of a prompt whose prefix the cache has."""
ADAPTER_RANK = 16
MAX_POSITIONS = 1 << 16
SIZES: dict[str, tuple[int, ...]] = {
    "batch": (1, 2, 4, 8, 16, 32, 64, 128),
    "context": (256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    "prompt": (16, 64, 256, 1024, 4096, 16384),
    "shared prefix": (0, 256, 1024, 4096, 16384),
    "adapters": (0, 1, 2, 4, 8, 16),
    "vocabulary": (32000, 64000, 152064),
    "threads": (),
}
"""Of every series; threads go up to the machine's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A step of ``batch`` sequences that decode at ``context``; where ``prompt`` isn't 0, the first
    token of one prompt so long, of which the prefix cache has ``shared``."""

    series: str
    size: int
    batch: int = 1
    context: int = 192
    prompt: int = 0
    shared: int = 0
    num_adapters: int = 0
    vocab_size: int = 32000
    num_threads: int = 0

    @property
    def engine(self) -> tuple[int, int, int]:
        """Points of the same can be measured by one engine."""
        return self.vocab_size, self.num_threads, self.num_adapters

    @property
    def num_tokens(self) -> int:
        """Most that are in the KV cache at once."""
        return self.prompt + NUM_NEW if self.prompt else self.batch * self.max_model_len

    @property
    def num_new(self) -> int:
        return NUM_NEW + self.batch

    @property
    def max_model_len(self) -> int:
        return max(self.prompt, self.context) + self.num_new


def points_of(series: str, num_threads: int) -> list[Point]:
    """The cheapest first. ``num_threads``: of all series but the threads'."""
    if series == "threads":
        most = len(os.sched_getaffinity(0))
        counts = sorted({most, *(1 << i for i in range(most.bit_length()) if 1 << i <= most)})
        return [Point(series=series, size=n, batch=8, num_threads=n) for n in counts]
    plain = Point(series=series, size=0, num_threads=num_threads)
    made = {
        "batch": lambda n: replace(plain, batch=n),
        "context": lambda n: replace(plain, context=n),
        "prompt": lambda n: replace(plain, prompt=n),
        "shared prefix": lambda n: replace(plain, prompt=n + OWN_TOKENS, shared=n),
        "adapters": lambda n: replace(plain, batch=16, num_adapters=n),
        "vocabulary": lambda n: replace(plain, vocab_size=n),
    }[series]
    return [replace(made(n), size=n) for n in SIZES[series]]


def shape_of(name: str, vocab_size: int) -> Shape:
    """The named shape with that vocabulary, and positions for every context."""
    return replace(
        SHAPES[name],
        name=f"{name}-growth-{vocab_size}",
        vocab_size=vocab_size,
        max_positions=MAX_POSITIONS,
    )


def cost(point: Point, shape: Shape, dtype: str) -> tuple[float, float]:
    """Bytes read and operations done, both in 10^9: of weights, KV cache and adapters."""
    head = shape.vocab_size * shape.hidden_size
    layers = shape.linear_params - head
    kv_row = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * kv_bytes(dtype)
    per_key = 4 * shape.num_layers * shape.num_heads * shape.head_dim
    num_bytes = ELEMENT_BYTES[dtype] * layers + head_bytes(dtype) * head
    num_bytes += 2 * point.num_adapters * adapter_params(shape)
    if point.prompt:
        own = point.prompt - point.shared
        operations = 2 * layers * own + 2 * head
        operations += per_key * (own * point.shared + own * own / 2)
        num_bytes += kv_row * point.prompt
    else:
        operations = point.batch * (2 * shape.linear_params + per_key * point.context)
        operations += 2 * point.batch * adapter_params(shape) * bool(point.num_adapters)
        num_bytes += kv_row * point.batch * point.context
    return num_bytes * 1e-9, operations * 1e-9


def adapter_params(shape: Shape) -> int:
    """Of an adapter of every linear of a layer."""
    hidden, head, inner = shape.hidden_size, shape.head_dim, shape.intermediate_size
    query, key = shape.num_heads * head, shape.num_kv_heads * head
    sizes = 2 * (hidden + query) + 2 * (hidden + key) + 3 * (hidden + inner)
    return ADAPTER_RANK * shape.num_layers * sizes
