"""Every native kernel once beside torch, in one process: what breaks at first contact.

    python -m bench.gpu.smoke --json smoke.json

``difference`` is the largest difference to what torch gives for the same operands, over the largest
result; ``allowed`` follows from the formats: sums of tensor cores are truncated, not rounded, and
results in 16 or 8 bits differ by a last bit. The last row says which kernels nothing here called.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu.attention_case import Attention, make_inputs
from bench.gpu.comparison import ALLOWED, randoms, within
from bench.gpu.measure import Item, attempt_each, parse
from bench.gpu.random_model import random_packed
from bench.gpu.step_list_items import adapter_items, rank_items
from lmi_core.ops.device.expert_rows import ExpertTable
from lmi_core.ops.device.paged_cache import CacheScales
from lmi_core.ops.device.quantized_rows import QuantizedRows, RowFormat, StaticFp8
from lmi_core.ops.device.torch_weights import DeviceWeight
from lmi_core.ops.kernels import select
from lmi_core.runners.device.widest_step import widest_sampling

EXPERTS = 8
_called: set[str] = set()
"""Kernels, also in processes of this run that ended before."""


def sides(op: str, run: Callable[[Callable[..., Any]], Tensor], format: str) -> dict[str, Any]:
    """Run an op in both implementations and compare."""
    native, plain = (run(select.function(op, name)).double().cpu() for name in ("native", "torch"))
    largest = max(plain.abs().max().item(), 1e-30)
    return within((native - plain).abs().max().item() / largest, ALLOWED[format])


def _values_of(rows: Tensor | QuantizedRows) -> Tensor:
    if isinstance(rows, Tensor):
        return rows
    return rows.codes.float() * rows.scales.unsqueeze(1)


def row_items(device: str) -> list[Item]:
    """Norms, activations and rows in codes."""

    def norm(codes: RowFormat | None) -> dict[str, Any]:
        def run(op: Callable[..., Any]) -> Tensor:
            x, addend = randoms(device, 5, 1024), randoms(device, 5, 1024) + 1
            weight = torch.ones(1024, device=device)
            y = op(x, weight, 1e-5, out_dtype=torch.bfloat16, addend=addend, codes=codes)
            return _values_of(y)

        return sides("rms_norm", run, "codes" if codes else "bf16")

    def activation(codes: RowFormat | None, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        def run(op: Callable[..., Any]) -> Tensor:
            x = randoms(device, 5, 2048).to(dtype)
            return _values_of(op(x, "silu", out_dtype=torch.bfloat16, codes=codes))

        return sides("gated_activation", run, "codes" if codes else "bf16")

    def layer_norm(kind: str) -> dict[str, Any]:
        x, weight = randoms(device, 5, 1024) + 2, torch.ones(1024, device=device)
        given = (x, weight, weight, 1e-5)
        return sides("norm", lambda op: op(*given, kind=kind, out_dtype=torch.bfloat16), "bf16")

    def other_activation(op_name: str, name: str) -> dict[str, Any]:
        x = randoms(device, 5, 2048)
        return sides(op_name, lambda op: op(x, name, out_dtype=torch.bfloat16), "bf16")

    activations = ("silu", "gelu_tanh", "gelu", "relu", "relu2")
    pairs = [("activation", name) for name in activations]
    pairs += [("gated_activation", name) for name in (*activations[2:], "clamped_swiglu")]
    items = [Item(f"norm, {kind}", partial(layer_norm, kind)) for kind in ("layer", "rms", "none")]
    items += [Item(f"{op}, {name}", partial(other_activation, op, name)) for op, name in pairs]
    items.append(Item("gated_activation of bf16", partial(activation, None, torch.bfloat16)))
    return items + [
        Item(f"{name}, {codes or 'bf16'}", partial(check, codes))
        for codes in (None, "int8", "fp8", StaticFp8(0.01))
        for name, check in (("rms_norm", norm), ("gated_activation", activation))
    ]


def linear_items(device: str) -> list[Item]:
    def narrow(rows: int) -> dict[str, Any]:
        """As of qkv, gate and up."""
        x, weight = (
            randoms(device, rows, 256).bfloat16(),
            randoms(device, 96, 256).bfloat16(),
        )
        return sides("linear", lambda op: op(x, weight, None, out_dtype=torch.bfloat16), "bf16")

    def product(op_name: str, format: str, rows: int) -> dict[str, Any]:
        x = randoms(device, rows, 256).bfloat16()
        weight: Any = randoms(device, 96, 256).bfloat16()
        if format != "bf16":
            weight = random_packed(96, 256, format, False, torch.device(device))  # type: ignore[arg-type]
        bias = randoms(device, 96)
        return sides(
            op_name, lambda op: op(x, weight, bias), "codes" if format == "fp8" else "fp32"
        )

    def tiled() -> dict[str, Any]:
        """Of shapes that cuBLASLt has no algorithm for."""
        from lmi_core.ops.kernels.cuda import library

        x, weight = (
            randoms(device, 20, 264).bfloat16(),
            randoms(device, 40, 264).bfloat16(),
        )
        y = torch.empty(20, 40, device=device)
        sizes = {"num_rows": 20, "num_outputs": 40, "num_inputs": 264, "y_stride": 40}
        library.call("linear_tiled", x, x=x, weight=weight, y=y, dtype=x.dtype, **sizes)
        expected = x.double() @ weight.double().T
        return within(((y - expected).abs().max() / expected.abs().max()).item(), ALLOWED["fp32"])

    result = [Item("linear_tiled", tiled)]
    result += [Item(f"linear to bf16, {rows} rows", partial(narrow, rows)) for rows in (8, 40)]
    result += [
        Item(f"{op} {format}, {rows} rows", partial(product, op, format, rows))
        for op, format, counts in (
            ("linear", "bf16", (1, 8, 40)),
            ("linear_packed", "int4", (1, 8, 64, 200)),
            ("linear_quantized", "int8", (1, 8, 100, 520)),
            ("linear_quantized", "fp8", (1, 8, 100, 520)),
        )
        for rows in counts
    ]
    return result


def _routes(device: str, op: Callable[..., Any], num_rows: int, scoring: str = "softmax") -> Tensor:
    """Of two of ``EXPERTS`` for each row."""
    groups = {"num_groups": 1, "top_groups": 1, "group_best": 1}
    fixed = {"normalizes": False, "scale": 1.0, "threshold": 0.1, "bias": None, **groups}
    routes: Tensor = op(randoms(device, num_rows, EXPERTS), top_k=2, scoring=scoring, **fixed)
    return routes


def expert_items(device: str) -> list[Item]:
    plain = select.function("route", "torch")

    def route(scoring: str) -> dict[str, Any]:
        return sides("route", lambda op: _routes(device, op, 9, scoring), "fp32")

    def group() -> dict[str, Any]:
        def run(op: Callable[..., Any]) -> Tensor:
            found = op(_routes(device, plain, 40), EXPERTS)
            return torch.cat([found.token_rows, found.places.flatten(), found.first_rows])

        return sides("group_rows", run, "fp32")

    def product(format: str, num_rows: int) -> dict[str, Any]:
        """In tiles of few rows and of many, after what each expert has on average."""
        x, bias = (
            randoms(device, num_rows, 256).bfloat16(),
            randoms(device, EXPERTS, 96),
        )
        routes, table = _routes(device, plain, num_rows), _random_experts(device, format)
        rows = select.function("group_rows", "torch")(routes, EXPERTS)

        def run(op: Callable[..., Any]) -> Tensor:
            sums = torch.zeros(num_rows, 96, device=device)
            op(x, routes, rows, table, bias, is_by_token=True, sums=sums)
            return sums

        return sides("grouped_linear", run, "codes" if format == "fp8" else "fp32")

    scorings, formats = ("softmax", "sigmoid", "sparsemixer"), ("bf16", "int4", "int8", "fp8")

    def heads(num_rows: int) -> dict[str, Any]:
        """Each head's own matrix, in tiles of few rows and of many."""
        x = randoms(device, num_rows, EXPERTS * 256).bfloat16()
        table = _random_experts(device, "bf16")
        return sides("head_linear", lambda op: op(x, table, out_dtype=torch.float32), "fp32")

    return [
        *(Item(f"head_linear, {num_rows} rows", partial(heads, num_rows)) for num_rows in (3, 40)),
        *(Item(f"route, {scoring}", partial(route, scoring)) for scoring in scorings),
        Item("group_rows", group),
        *(
            Item(f"experts {format}, {num_rows} rows", partial(product, format, num_rows))
            for format in formats
            for num_rows in (3, 40, 300)
        ),
    ]


def _random_experts(device: str, format: Any) -> ExpertTable:
    """Of 256 inputs and 96 outputs."""
    if format == "bf16":
        matrices = [randoms(device, 96, 256 + i)[:, i:].bfloat16() for i in range(EXPERTS)]
        linear = select.function("linear", "torch")
        dense = [DeviceWeight(matrix.contiguous()) for matrix in matrices]
        return ExpertTable(dense, lambda expert, *given: _by(linear, dense[expert].matrix, *given))
    packed = [random_packed(96, 256, format, False, torch.device(device)) for _ in range(EXPERTS)]
    op = select.function("linear_packed" if format == "int4" else "linear_quantized", "torch")
    return ExpertTable(packed, lambda expert, *given: _by(op, packed[expert], *given))


def _by(op: Callable[..., Tensor], weight: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    return op(x, weight, bias)


def attention_items(device: str) -> list[Item]:
    def attend(case: Attention, *, has_slopes: bool = False) -> dict[str, Any]:
        *tensors, scales = make_inputs(case, device)
        heads: dict[str, Any] = {"num_q_heads": case.num_q_heads, "scale": case.head_dim**-0.5}
        if has_slopes:
            numbers = torch.arange(1, case.num_q_heads + 1, device=device)
            heads |= {"slopes": 2.0**-numbers, "sinks": numbers.float() / 4}
        return sides(
            "attention",
            lambda op: op(*tensors, scales=scales, window=0, soft_cap=0.0, **heads),
            "bf16",
        )

    def rotate(case: Attention, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        inputs = make_inputs(case, device)
        num_heads = case.num_q_heads + (1 if case.is_latent else 2) * case.num_kv_heads
        qkv = randoms(device, len(inputs.q), num_heads * case.head_dim).to(dtype)
        angles = randoms(device, case.num_keys, case.head_dim // 2)

        def run(op: Callable[..., Any]) -> Tensor:
            keys, values = inputs.keys.clone(), inputs.values.clone()
            scales = inputs.scales
            if isinstance(scales, CacheScales):
                scales = CacheScales(*(one.clone() for one in scales))
            q = op(
                qkv, keys, None if case.is_latent else values,
                inputs.step.positions, inputs.step.slots,
                angles.cos(), angles.sin(), num_q_heads=case.num_q_heads, q_norm=None,
                k_norm=None, norm_eps=1e-5, out_dtype=torch.bfloat16, scales=scales,
            )  # fmt: skip
            slots = inputs.step.slots
            return torch.cat([q.float().flatten(), keys[slots].float().flatten()])

        return sides("rope_cache_write", run, "codes" if case.kv_dtype != "bf16" else "bf16")

    cases = [
        Attention(num_seqs, num_keys, num_rows, 8, num_kv_heads, head_dim, kv_dtype)
        for num_seqs, num_keys, num_rows in ((3, 700, 1), (2, 70, 70))
        for num_kv_heads, head_dim, kv_dtype in (
            (8, 64, "bf16"), (2, 128, "bf16"), (1, 256, "bf16"), (2, 128, "int8"),
            (2, 128, "fp8_e4m3fn"), (2, 128, "fp8_e5m2"), (1, 576, "bf16"), (1, 576, "int8"),
        )
    ]  # fmt: skip
    return [
        Item(f"{op}, {case.name}", partial(check, case))
        for case in cases
        for op, check in (
            ("attention", attend),
            ("attention with slopes and sinks", partial(attend, has_slopes=True)),
            ("rope_cache_write", rotate),
            ("rope_cache_write of bf16", partial(rotate, dtype=torch.bfloat16)),
        )
        if not case.is_latent or "slopes" not in op
    ]


def other_items(device: str) -> list[Item]:
    def sample() -> dict[str, Any]:
        """Filters leave one token: draws from several agree in distribution alone."""
        logits = randoms(device, 6, 5000)
        inputs = replace(widest_sampling(6, 5), top_p=np.full(6, 1e-6, np.float32))
        return sides(
            "sample",
            lambda op: torch.from_numpy(np.asarray(op(logits.clone(), inputs).wait().logprobs)),
            "fp32",
        )

    def gather() -> dict[str, Any]:
        from lmi_core.ops.kernels.cuda.rows import gather_rows

        table, ids = (
            randoms(device, 50, 96).bfloat16(),
            torch.tensor([3, 3, 49], device=device),
        )
        rows = gather_rows(table, ids.int(), 2.0)
        return within((rows - 2 * table[ids].float()).abs().max().item(), 0.0)

    def copy() -> dict[str, Any]:
        from lmi_core.ops.kernels.cuda.rows import copy_blocks

        store = randoms(device, 2, 64, 2, 16)
        expected = store.clone()
        expected[:, 32:48] = store[:, 0:16]
        ids = (torch.tensor([number], dtype=torch.int32, device=device) for number in (0, 2))
        copy_blocks(store, *ids, block_size=16)
        return within((store - expected).abs().max().item(), 0.0)

    return [Item("sample", sample), Item("gather_rows", gather), Item("copy_blocks", copy)]


def note_calls(file: Path | None = None) -> None:
    """``file``: where processes of one run leave one another the names."""
    from lmi_core.ops.kernels.cuda.library import Library

    call = Library.call_with
    if file is not None and file.exists():
        _called.update(file.read_text().split())

    def noted(self: Library, name: str, *arguments: Any) -> None:
        if name not in _called and file is not None:
            with file.open("a") as names:
                print(name, file=names)
        _called.add(name)
        call(self, name, *arguments)

    Library.call_with = noted  # type: ignore[method-assign]


def not_called() -> dict[str, Any]:
    """The step list calls all of them, too: the tests of captured steps have that."""
    from lmi_core.ops.kernels.cuda import library

    missing = sorted(library.load().interface.kernels.keys() - _called)
    if missing:
        raise AssertionError(", ".join(missing))
    return {"num_kernels": len(_called)}


def items_of(device: str) -> list[Item]:
    makers = (row_items, linear_items, expert_items, attention_items)
    makers += (rank_items, adapter_items, other_items)
    items = [item for make in makers for item in make(device)]
    return [*items, Item("kernels that nothing called", not_called)]


def main() -> None:
    hidden = {"action": "store_true", "help": argparse.SUPPRESS}
    arguments = parse(__doc__, is_child=hidden)
    select.select(arguments.device, "native")  # loads the library
    names = arguments.json and arguments.json.with_suffix(".calls")
    if names and not arguments.is_child:
        names.unlink(missing_ok=True)
    note_calls(names)
    with torch.inference_mode():
        attempt_each("bench.gpu.smoke", items_of(arguments.device), arguments)


if __name__ == "__main__":
    main()
