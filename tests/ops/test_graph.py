"""What a graph says of its nodes, and what the CPU makes of them."""

from __future__ import annotations

import numpy as np
import pytest

from lmi_core import _native, ops
from lmi_core.ops import Graph, Handle
from lmi_core.ops.cpu import lower
from lmi_core.ops.device.value_uses import last_uses, narrow_products
from lmi_core.ops.graph import quantized_rows

COLUMNS = 64


def pack(format: str, num_outputs: int = COLUMNS, group_size: int = 0) -> _native.LinearWeight:
    values = np.random.default_rng(num_outputs).standard_normal((num_outputs, COLUMNS))
    return _native.LinearWeight.pack(
        [values.astype(np.float32)], format=format, group_size=group_size
    )


def embed(graph: Graph) -> Handle:
    return ops.embed(graph, np.ones((8, COLUMNS), np.float32))


def norm(x: Handle) -> Handle:
    return ops.rms_norm(x, np.ones(COLUMNS, np.float32), 1e-5)


def lowered(graph: Graph) -> tuple[list[str], int]:
    """The ops of the CPU's nodes, and the arena's bytes."""
    target = _native.Graph(
        max_tokens=16,
        max_seqs=2,
        max_logit_rows=4,
        max_blocks_per_seq=2,
        block_size=16,
        act_dtype=graph.act_dtype,
    )
    lower(graph, target)
    target.finish()
    return [line.split()[0] for line in target.describe()], target.arena_bytes


def test_values_are_last_used_where_no_later_node_reads_or_adds_to_them() -> None:
    graph = Graph("fp32")
    x = embed(graph)
    h = norm(x)
    y = ops.linear(h, pack("fp32"))
    ops.linear(h, pack("fp32"), residual=x)
    ops.sample(ops.linear(norm(x), pack("fp32")))
    names = [[handle.name for handle in handles] for handles in last_uses(graph)]
    assert names == [[], [], [], [h.name], [x.name], ["norm4"], ["linear5"]]
    assert y.name == "linear2"


def test_rows_are_quantized_by_their_maker_where_all_readers_want_them_alike() -> None:
    int8, other_int8, int4 = pack("int8"), pack("int8", 32), pack("int4", group_size=32)
    for readers, expected in (
        ([int8], int8),
        ([int8, other_int8], int8),
        ([int8, int4], None),
        ([int8, pack("bf16")], None),
        ([pack("bf16")], None),
    ):
        graph = Graph("bf16")
        h = norm(embed(graph))
        for weight in readers:
            ops.linear(h, weight)
        assert quantized_rows(graph) == ({} if expected is None else {h: expected})


def test_a_residual_is_not_quantized() -> None:
    graph = Graph("fp32")
    x = embed(graph)
    ops.linear(norm(x), pack("int8"), residual=x)
    ops.linear(x, pack("int8"))
    assert list(quantized_rows(graph)) == [graph.nodes[1].result]


def test_products_may_be_narrow_where_only_a_rotation_or_an_activation_reads_them() -> None:
    graph = Graph("bf16")
    x = embed(graph)
    h = norm(x)
    cache = _native.KvCache(
        num_layers=1, num_blocks=2, block_size=16, num_kv_heads=1, head_dim=32, dtype="bf16"
    )
    angles = np.ones((16, 16), np.float32)
    bias, weight = np.ones(2 * COLUMNS, np.float32), pack("bf16", 2 * COLUMNS)

    def rotated(qkv: Handle) -> Handle:
        return ops.rope_cache_write(qkv, cache, 0, num_q_heads=2, cos=angles, sin=angles)

    narrow = ops.linear(h, weight)
    rotated(narrow)
    rotated(ops.linear(h, weight, bias=bias))
    read_twice = ops.linear(h, weight)
    rotated(read_twice)
    ops.clip(read_twice, 1.0)
    gated = ops.linear(h, weight, activation="silu")
    ops.linear(gated, pack("bf16"), residual=x)
    coded = ops.linear(h, weight, activation="silu")
    ops.linear(coded, pack("int8"), residual=x)
    ops.sample(ops.linear(h, weight))
    assert narrow_products(graph) == {narrow, gated}


def test_the_cpu_quantizes_in_the_norm_once_for_all_products() -> None:
    def num_quantizers(formats: list[str]) -> int:
        graph = Graph("bf16")
        h = norm(ops.gather_logit_rows(embed(graph)))
        for format in formats:
            y = ops.linear(h, pack(format))
        ops.sample(y)
        return lowered(graph)[0].count("quantize_rows")

    assert num_quantizers(["int8", "int8"]) == 0
    assert num_quantizers(["int8", "bf16"]) == 1


def test_quantized_rows_go_to_products_that_take_them() -> None:
    target = _native.Graph(
        max_tokens=16,
        max_seqs=2,
        max_logit_rows=4,
        max_blocks_per_seq=2,
        block_size=16,
        act_dtype="bf16",
    )
    x = target.embed(np.ones((8, COLUMNS), np.float32))
    h = target.rms_norm(x, np.ones(COLUMNS, np.float32), 1e-5, pack("int8"))
    with pytest.raises(_native.NativeError, match=r"linear takes bf16, norm1 is int8"):
        target.linear(h, pack("bf16"))
