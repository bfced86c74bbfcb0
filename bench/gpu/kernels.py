"""Kernels alone, ours beside torch's and FlashInfer's: GB/s, TFLOP/s and shares of the roofs.

    python -m bench.gpu.kernels --json kernels.json

Attention counts the bytes of K and V that a decode reads once, and the products that a causal
prefill needs; a matrix product the bytes of its weight, or its operations.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from bench.gpu.attention_case import Attention, Inputs, make_inputs
from bench.gpu.measure import Item, attempt_each, median_s, parse, read_roofs
from bench.gpu.other_attention import flashinfer_decode, torch_attention, torch_varlen
from bench.gpu.random_model import random_packed
from lmi_core.ops.device import packed_weight
from lmi_core.ops.device.packed_weight import PackedWeight
from lmi_core.ops.kernels import select
from lmi_core.runners.device.widest_step import widest_sampling

IMPLEMENTATIONS = ("native", "triton", "torch")


DECODES = [
    Attention(64, 1024, 1, 32, 32),
    Attention(64, 1024, 1),
    Attention(64, 1024, 1, 64, 8),
    Attention(64, 1024, 1, 128, 1, 576),
    Attention(64, 1024, 1, kv_dtype="int8"),
    Attention(64, 1024, 1, kv_dtype="fp8_e4m3fn"),
    Attention(1, 65536, 1),
    Attention(16, 8192, 1),
]
PREFILLS = [
    Attention(1, 8192, 8192),
    Attention(1, 8192, 8192, kv_dtype="int8"),
    Attention(8, 1024, 1024),
]
LINEARS = [(1, 4096, 6144), (16, 4096, 28672), (64, 14336, 4096), (2048, 4096, 28672)]
"""Rows, inputs, outputs."""
UNPACKED = [(rows, 4096, 28672) for rows in (64, 128, 192, 256, 512)]
UNPACKED += [(rows, 14336, 4096) for rows in (64, 128, 192, 256)]
CODED = [(rows, 4096, 28672) for rows in (128, 256, 512, 1024, 2048)]
CODED += [(rows, 14336, 4096) for rows in (128, 256, 512)]
"""Where int4 weights, and int8 and fp8 ones, packed or unpacked first, may be faster."""
MADE_ROWS = [(rows, 4096, 14336) for rows in (1, 64, 2048)]
"""Rows, columns of norms and of activations."""
SAMPLES = [(1, 128256), (64, 128256)]
"""Rows, tokens of the vocabulary."""
TINY_CASES = [Attention(2, 33, 1, 4, 2, 16), Attention(1, 20, 20, 4, 2, 16)]
TINY_CASES += [case._replace(kv_dtype=name) for case in TINY_CASES for name in ("int8", "fp8_e5m2")]
TINY_LINEARS = [(2, 128, 32), (9, 128, 32)]
TINY_MADE_ROWS = [(2, 96, 160)]
TINY_SAMPLES = [(2, 500)]


def ours(case: Attention, inputs: Inputs, name: str, device: str) -> Callable[[], object]:
    attention = _op("attention", name, device)
    scale = case.head_dim**-0.5
    heads = {"num_q_heads": case.num_q_heads, "scale": scale, "window": 0, "soft_cap": 0.0}
    *tensors, scales = inputs
    return lambda: attention(*tensors, scales=scales, **heads)


def attention_items(case: Attention, device: str, roofs: dict[str, float]) -> list[Item]:
    sides: dict[str, Callable[[], Callable[[], object]]] = {
        name: lambda name=name: ours(case, _inputs_of(case, device), name, device)
        for name in IMPLEMENTATIONS
    }
    if device == "cuda" and case.kv_dtype == "bf16" and not case.is_latent:
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
            name = f"torch {backend.lower()}, contiguous"
            sides[name] = partial(torch_attention, case, backend, device)
        sides["torch varlen, contiguous"] = partial(torch_varlen, case, device)
        if case.num_rows == 1:
            sides["flashinfer"] = lambda: flashinfer_decode(case, _inputs_of(case, device))
        else:
            sides["flash-attn"] = lambda: ours(case, _inputs_of(case, device), "flash", device)

    def figures(make: Callable[[], Callable[[], object]]) -> dict[str, Any]:
        seconds = median_s(make(), device)
        return rates(seconds, case.num_bytes, case.num_operations, roofs)

    return [Item(f"{case.name}: {name}", partial(figures, make)) for name, make in sides.items()]


@functools.lru_cache(maxsize=1)
def _inputs_of(case: Attention, device: str) -> Inputs:
    return make_inputs(case, device)


def linear_items(
    rows: int, inputs: int, outputs: int, device: str, roofs: dict[str, float]
) -> list[Item]:
    def figures(op: str, format: str, name: str) -> dict[str, Any]:
        multiply = _op(op, name, device)
        x, weight, num_bytes = _operands(rows, inputs, outputs, format, device)
        options = {"unpacked": _room_for(weight)} if op == "linear_packed" else {}
        seconds = median_s(lambda: multiply(x, weight, None, **options), device)
        return rates(seconds, num_bytes, 2 * rows * inputs * outputs, roofs)

    items = []
    for op, format in (
        ("linear", "bf16"),
        ("linear_packed", "int4"),
        ("linear_quantized", "int8"),
        ("linear_quantized", "fp8"),
    ):
        for name in IMPLEMENTATIONS:
            if name in select.IMPLEMENTATIONS[op]:
                what = f"{op} {format} {rows}x{inputs}x{outputs}: {name}"
                items.append(Item(what, partial(figures, op, format, name)))
    return items


@functools.lru_cache(maxsize=1)
def _operands(
    rows: int,
    inputs: int,
    outputs: int,
    format: Literal["bf16", "int8", "int4", "fp8"],
    device: str,
) -> tuple[Tensor, Any, int]:
    """Rows, a weight, and its bytes."""
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=device)
    if format == "bf16":
        dense = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device)
        return x, dense, 2 * dense.numel()
    packed = random_packed(outputs, inputs, format, is_gated=False, device=torch.device(device))
    return x, packed, packed.num_bytes


def _room_for(weight: PackedWeight) -> Tensor:
    return torch.empty(weight.unpacked_bytes, dtype=torch.uint8, device=weight.panels.device)


def unpacked_items(
    op: str, shape: tuple[int, int, int], device: str, roofs: dict[str, float]
) -> list[Item]:
    """Both ways of one product: a limit of ``packed_weight`` belongs where they cross."""
    rows, inputs, outputs = shape

    def figures(format: Any, name: str, most_rows: int) -> dict[str, Any]:
        multiply = _op(op, name, device)
        x, weight, num_bytes = _operands(rows, inputs, outputs, format, device)
        options = {"unpacked": _room_for(weight)} if op == "linear_packed" else {}
        panels = patch.dict(packed_weight.MAX_PANEL_ROWS, {format: most_rows})
        with panels, patch.object(packed_weight, "MAX_PACKED_ROWS", most_rows):
            seconds = median_s(lambda: multiply(x, weight, None, **options), device)
        return rates(seconds, num_bytes, 2 * rows * inputs * outputs, roofs)

    what = f"{rows}x{inputs}x{outputs}"
    return [
        Item(f"{op} {format} {what}: {name}, {way}", partial(figures, format, name, most))
        for format, name in _UNPACKED[op]
        for way, most in (("packed", rows), ("unpacked", 0))
    ]


_UNPACKED = {
    "linear_packed": [("int4", "native"), ("int4", "triton")],
    "linear_quantized": [("int8", "native"), ("fp8", "native")],
}


def made_row_items(
    rows: int, columns: int, activations: int, device: str, roofs: dict[str, float]
) -> list[Item]:
    """Norms and activations that quantise their rows to int8, and others that do it afterwards."""

    def figures(op: str, name: str, is_fused: bool) -> dict[str, Any]:
        make, quantize_rows = _op(op, name, device), _quantize_rows_of(name)
        codes = "int8" if is_fused else None
        if op == "rms_norm":
            x, addend = (torch.randn(rows, columns, device=device) for _ in range(2))
            weight = torch.ones(columns, device=device)
            call = partial(make, x, weight, 1e-5, addend=addend)
            num_bytes = 13 * x.numel()
        else:
            x = torch.randn(rows, 2 * activations, device=device)
            call = partial(make, x, "silu")
            num_bytes = 9 * rows * activations

        def run() -> None:
            y = call(out_dtype=torch.bfloat16, codes=codes)
            if not is_fused:
                quantize_rows(y, "int8")

        return rates(median_s(run, device), num_bytes, 0, roofs)

    return [
        Item(f"{op} {rows} rows to int8: {name}, {way}", partial(figures, op, name, is_fused))
        for op in ("rms_norm", "gated_activation")
        for name in IMPLEMENTATIONS
        for way, is_fused in (("on the way", True), ("afterwards", False))
    ]


def sample_items(rows: int, vocab_size: int, device: str, roofs: dict[str, float]) -> list[Item]:
    """The most likely token, and draws from what filters leave, of which nothing is sorted."""

    def figures(name: str, **settings: float) -> dict[str, Any]:
        sample, logits = _op("sample", name, device), torch.randn(rows, vocab_size, device=device)
        fields = {"temperature": 1, "typical_p": 1, "top_p": 1, **settings}
        inputs = replace(
            widest_sampling(rows, 0),
            biases=(np.zeros(0, np.int32),) * 2 + (np.zeros(0, np.float32),),
            **{field: np.full(rows, value, np.float32) for field, value in fields.items()},
        )
        seconds = median_s(lambda: sample(logits, inputs), device)
        return rates(seconds, 4 * logits.numel(), 0, roofs)

    kinds = {"greedy": {"temperature": 0.0}, "drawn": {}, "top-p": {"top_p": 0.9}}
    return [
        Item(f"sample {rows}x{vocab_size} {kind}: {name}", partial(figures, name, **settings))
        for kind, settings in kinds.items()
        for name in select.IMPLEMENTATIONS["sample"]
    ]


def _quantize_rows_of(name: str) -> Callable[..., Any]:
    module = sys.modules[select.function("linear_quantized", name).__module__]
    quantize_rows: Callable[..., Any] = module.quantize_rows
    return quantize_rows


def rates(
    seconds: float, num_bytes: int, num_operations: int, roofs: dict[str, float]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "us": seconds * 1e6,
        "gb_per_s": num_bytes / seconds * 1e-9,
        "tflops": num_operations / seconds * 1e-12,
    }
    if roofs:
        roof_s = max(
            num_bytes / (roofs["read_gb_per_s"] * 1e9),
            num_operations / (roofs["bf16_tflops"] * 1e12),
        )
        row["share_of_roof"] = roof_s / seconds
        row["share_of_copy_rate"] = row["gb_per_s"] / roofs["copy_gb_per_s"]
    return row


def _op(op: str, name: str, device: str) -> Callable[..., Any]:
    """That implementation; an error where another one would run in its place."""
    chosen = select.select(device, f"{op}:{name}")
    if chosen[op] != name:
        raise RuntimeError(f"{op} would run in {chosen[op]}")
    return select.function(op, name)


def _rank(item: Item) -> int:
    """Native kernels first, then what they are compared with, then those that run instead."""
    name = item.what.split(": ")[1]
    return 0 if name.startswith("native") else 2 if name in IMPLEMENTATIONS else 1


def main() -> None:
    others = {"action": "store_true", "help": "what native kernels are compared with"}
    hidden = {"action": "store_true", "help": argparse.SUPPRESS}
    arguments = parse(__doc__, others=others, is_child=hidden)
    device, roofs = arguments.device, read_roofs(arguments.json)
    items = []
    for case in TINY_CASES if arguments.tiny else DECODES + PREFILLS:
        items += attention_items(case, device, roofs)
    for shape in TINY_LINEARS if arguments.tiny else LINEARS:
        items += linear_items(*shape, device, roofs)
    for op, shapes in (("linear_packed", UNPACKED), ("linear_quantized", CODED)):
        for shape in TINY_LINEARS[:1] if arguments.tiny else shapes:
            items += unpacked_items(op, shape, device, roofs)
    for made in TINY_MADE_ROWS if arguments.tiny else MADE_ROWS:
        items += made_row_items(*made, device, roofs)
    for sampled in TINY_SAMPLES if arguments.tiny else SAMPLES:
        items += sample_items(*sampled, device, roofs)
    items = [item for item in items if (_rank(item) > 0) == arguments.others]
    items.sort(key=_rank)
    with torch.inference_mode():
        attempt_each("bench.gpu.kernels", items, arguments)


if __name__ == "__main__":
    main()
