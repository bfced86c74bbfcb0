"""The same decoder in plain torch: what our kernels and our engine have to beat here.

    python -m bench.gpu.baseline --shape llama3-8b --json baseline.json

Linears and torch's own attention over contiguous keys and values, captured into a graph, without
rotation, sampling, scheduler and paging: less work than an engine has. It runs while the engine is
being built, so nothing of that is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.checkpoints import Shape
from bench.gpu.measure import attempt, median_s, parse, read_roofs, write
from bench.gpu.shapes import GPU_SHAPES, STANDARD_DEVIATION

CONTEXT, PREFILL, BATCHES = 1024, 2048, (1, 16, 64, 256)


class Decoder:
    """Random weights of a shape, on the device."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self._device = shape, device
        hidden, kv_size = shape.hidden_size, shape.num_kv_heads * shape.head_dim
        q_size = shape.num_heads * shape.head_dim
        self._splits = [q_size, kv_size, kv_size]
        sizes = {
            "qkv": (sum(self._splits), hidden),
            "o": (hidden, q_size),
            "gate_up": (2 * shape.intermediate_size, hidden),
            "down": (hidden, shape.intermediate_size),
        }
        self._layers = [
            {name: self._random(*size) for name, size in sizes.items()}
            for _ in range(shape.num_layers)
        ]
        self._table = self._random(shape.vocab_size, hidden)
        self._head = self._table if shape.tied else self._random(shape.vocab_size, hidden)

    def _random(self, *size: int) -> Tensor:
        matrix = torch.empty(*size, dtype=torch.bfloat16, device=self._device)
        return matrix.normal_(std=STANDARD_DEVIATION)

    def step(self, ids: Tensor, caches: list[Tensor] | None) -> Tensor:
        """The next ids of sequences [batch, rows]: decoded over ``caches`` of each layer
        [2, batch, kv heads, tokens, head size], or a prompt's."""
        x = self._table[ids]
        for number, layer in enumerate(self._layers):
            x = x + F.linear(
                self._attend(self._normed(x), layer, caches and caches[number]), layer["o"]
            )
            gate, up = F.linear(self._normed(x), layer["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return F.linear(self._normed(x[:, -1]), self._head).argmax(-1)

    def _attend(self, x: Tensor, layer: dict[str, Tensor], cache: Tensor | None) -> Tensor:
        parts = F.linear(x, layer["qkv"]).split(self._splits, -1)
        q, k, v = (part.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2) for part in parts)
        if cache is not None:
            cache[0, :, :, -1:], cache[1, :, :, -1:] = k, v
            k, v = cache
        is_causal = cache is None
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)

    def _normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=1e-5)

    def caches(self, batch: int, num_tokens: int) -> list[Tensor]:
        size = (2, batch, self.shape.num_kv_heads, num_tokens, self.shape.head_dim)
        return [self._random(*size) for _ in self._layers]


def captured(run: Callable[[], object], device: str) -> Callable[[], object]:
    """``run`` as a graph, on a GPU."""
    if device == "cpu":
        return run
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def decode(
    decoder: Decoder, batch: int, context: int, device: str, rates: dict[str, float]
) -> dict[str, Any]:
    caches = decoder.caches(batch, context)
    ids = torch.zeros(batch, 1, dtype=torch.long, device=device)
    seconds = median_s(captured(lambda: decoder.step(ids, caches), device), device, 10)
    row = {"tokens_per_s": batch / seconds, "ms": seconds * 1e3}
    if rates:
        num_bytes = 2 * decoder.shape.linear_params + 2 * sum(cache.numel() for cache in caches)
        row["share_of_read_rate"] = num_bytes / seconds / (rates["read_gb_per_s"] * 1e9)
    return row


def prefill(
    decoder: Decoder, num_tokens: int, device: str, rates: dict[str, float]
) -> dict[str, Any]:
    ids = torch.zeros(1, num_tokens, dtype=torch.long, device=device)
    seconds = median_s(lambda: decoder.step(ids, None), device, 5)
    row = {"tokens_per_s": num_tokens / seconds, "ms": seconds * 1e3}
    if rates:
        num_operations = 2 * num_tokens * decoder.shape.linear_params
        row["share_of_products"] = num_operations / seconds / (rates["bf16_tflops"] * 1e12)
    return row


@torch.inference_mode()
def main() -> None:
    arguments = parse(__doc__, shape={"choices": sorted(GPU_SHAPES), "default": "llama3-8b"})
    device, rates = arguments.device, read_roofs(arguments.json)
    context, tokens, batches = (16, 32, (1, 2)) if arguments.tiny else (CONTEXT, PREFILL, BATCHES)
    decoder = Decoder(GPU_SHAPES[arguments.shape], device)
    rows = [attempt(f"prefill {tokens}", partial(prefill, decoder, tokens, device, rates))]
    for batch in batches:
        work = partial(decode, decoder, batch, context, device, rates)
        rows.append(attempt(f"decode batch {batch}", work))
        write(arguments.json, rows)


if __name__ == "__main__":
    main()
