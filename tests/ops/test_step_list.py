"""What a step list refuses; tests/runners/device/test_cuda_runner.py compares what it does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core import _native, ops  # noqa: E402
from lmi_core.ops.device import packed_weight as limits  # noqa: E402
from lmi_core.ops.device.adapter_table import AdapterTable  # noqa: E402
from lmi_core.ops.device.product_lowering import NotNativeError  # noqa: E402
from lmi_core.ops.device.recorded_steps import RecordedSteps, Value, assign_offsets  # noqa: E402
from lmi_core.ops.device.step_list import StepList, StepListSizes  # noqa: E402
from lmi_core.ops.device.step_lowering import StepLowering  # noqa: E402
from lmi_core.ops.device.torch_weights import DeviceWeight  # noqa: E402
from lmi_core.ops.graph import Graph, Handle  # noqa: E402
from lmi_core.ops.kernels import select  # noqa: E402
from lmi_core.ops.kernels.cuda.nccl import NcclRanks, make_id  # noqa: E402
from tests.ops.cuda_kernels import CUBLASLT_EMULATOR, use_cuda_kernels  # noqa: E402
from tests.ops.device_ops import packed_weight  # noqa: E402

CPU = torch.device("cpu")
COLUMNS, VOCAB_SIZE = 16, 40
SIZES = StepListSizes(
    max_tokens=8,
    max_seqs=4,
    max_logit_rows=4,
    max_copies=1,
    max_blocks_per_seq=2,
    block_size=16,
    max_top=2,
    num_attention_slots=8,
    split_tokens=0,
    scratch_block=0,
    num_misses=8,
    row_counts=(2, 4),
    key_counts=(32,),
)


@pytest.fixture(autouse=True)
def _in_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda_kernels(CPU, monkeypatch)


def lowered(graph: Graph) -> StepLowering:
    return StepLowering(graph, select.select("cpu", "native"), CPU)


def embed(graph: Graph, columns: int = COLUMNS) -> Handle:
    rng = np.random.default_rng(0)
    return ops.embed(graph, rng.standard_normal((VOCAB_SIZE, columns)).astype(np.float32))


def weight(num_outputs: int, dtype: str = "bfloat16") -> DeviceWeight:
    generator = torch.Generator().manual_seed(num_outputs)
    matrix = torch.randn(num_outputs, COLUMNS, generator=generator)
    return DeviceWeight(matrix.to(getattr(torch, dtype)))


def norm(x: Handle) -> Handle:
    return ops.rms_norm(x, np.ones(x.columns, np.float32), 1e-5)


def recorded() -> RecordedSteps:
    """A model without attention: a token's logits depend on nothing but itself."""
    graph = Graph("bf16")
    x = ops.gather_logit_rows(embed(graph))
    ops.sample(ops.linear(norm(x), weight(VOCAB_SIZE)))
    return lowered(graph).build(SIZES)


def native_step(max_tokens: int = 8) -> _native.Step:
    tables, sampling = _native.BlockTables(4, 2), _native.SamplingTable(4, VOCAB_SIZE)
    for row in range(4):
        tables.set(row, [row])
    return _native.Step(
        max_tokens=max_tokens,
        max_seqs=4,
        max_logit_rows=4,
        max_logprobs=2,
        max_copies=1,
        block_size=16,
        block_tables=tables,
        sampling=sampling,
    )


def test_a_step_and_the_same_step_padded_and_captured() -> None:
    steps = recorded()
    worker = _native.DeviceWorker(str(steps.list.library.path), steps.list.address)
    results = []
    for _ in range(2):
        step = native_step()
        for row, token_id in enumerate((3, 9, 4)):
            step.add([token_id], 0, row, row, "last")
        worker.run(step)
        # The worker may capture as soon as it has nothing to do, which writes to the arena.
        results.append((step.view("sampled_ids").tolist(), step.logprobs()))
        steps.list.capture(1, 0)
    assert results[0] == results[1]
    assert len(set(results[0][1])) == 3
    state = steps.list.state()
    assert (state.num_captured, state.num_replayed, state.capture_error) == (1, 1, "")
    worker.close()
    steps.close()


def test_a_slot_without_an_adapter_is_refused() -> None:
    graph = Graph("bf16")
    x = embed(graph)
    ops.lora_add(norm(x), x, AdapterTable(8), 0)
    ops.sample(ops.linear(norm(ops.gather_logit_rows(x)), weight(VOCAB_SIZE)))
    with closing(lowered(graph).build(SIZES)) as steps:
        with closing(_native.DeviceWorker(str(steps.list.library.path), steps.list.address)) as one:
            step = native_step()
            step.add([3], 0, 0, 0, "last", adapter=7)
            with pytest.raises(RuntimeError, match="the step's adapter slot 7 has no adapter"):
                one.run(step)
        with pytest.raises(RuntimeError, match="adapter slot 65536 of 65536"):
            steps.list.set_adapter(1 << 16, 1)


def test_a_rank_that_does_not_sample_has_no_results() -> None:
    """The others' ids come to it; all else of its results is whatever the memory held."""
    ranks = NcclRanks(make_id(), 0, 1, CPU)
    steps = StepList(SIZES, CPU)
    struct = steps.library.interface.kernels["share_tokens"]
    steps.add("share_tokens", "L", struct(ranks=ranks.address))
    steps.start()
    assert steps._memory is not None
    steps._memory.fill_(0x7F)
    worker = _native.DeviceWorker(str(steps.library.path), steps.address)
    step = native_step()
    step.add([3], 0, 0, 0, "last")
    worker.run(step)
    assert step.view("sampled_ids").tolist() == [-1]
    worker.close()
    steps.close()
    ranks.close()


def test_the_end_of_ranks_waits_for_graphs_and_nobody_for_it() -> None:
    with ExitStack() as opened:
        ranks = opened.enter_context(closing(NcclRanks(make_id(), 0, 1, CPU)))
        steps = opened.enter_context(closing(recorded()))
        steps.list.capture(1, 0)
        ending = ranks.abort()
        late = opened.enter_context(closing(StepList(SIZES, CPU)))
        late.add("share_tokens", "L", late.library.interface.kernels["share_tokens"](ranks.address))
        late.start()
        worker = _native.DeviceWorker(str(late.library.path), late.address)
        opened.callback(worker.close)
        step = native_step()
        step.add([3], 0, 0, 0, "last")

        def run_on() -> None:
            while True:  # the end may not have begun
                worker.run(step)

        with pytest.raises(RuntimeError, match="token ids: another rank is lost"):
            run_on()
        assert ending.is_alive()
    assert not ending.is_alive()


def test_a_step_that_is_too_large_fails() -> None:
    steps = recorded()
    worker = _native.DeviceWorker(str(steps.list.library.path), steps.list.address)
    step = native_step(max_tokens=12)
    step.add([1] * 9, 0, 0, 0, "last")
    with pytest.raises(RuntimeError, match="a step of 9 tokens, 1 sequences"):
        worker.run(step)
    worker.close()
    steps.close()


def test_lists_that_cannot_be() -> None:
    with pytest.raises(RuntimeError, match="a step list for 0 tokens"):
        StepList(replace(SIZES, max_tokens=0), CPU)
    steps = StepList(SIZES, CPU)
    with pytest.raises(RuntimeError, match="no sample node"):
        steps.start()
    steps.close()
    built = recorded()
    with pytest.raises(RuntimeError, match="was started: nothing can be added"):
        built.list.add("rms_norm", "T", built.list.library.interface.structs["RmsNorm"]())
    with pytest.raises(RuntimeError, match="no shape has row count 2 and key count 0"):
        built.list.capture(2, 0)
    built.close()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda x: ops.linear(x, weight(8)), "linear: the CUDA kernel has no float32 rows"),
        (lambda x: ops.linear(norm(x), weight(8), out_dtype="act"), ""),
        (
            lambda x: ops.linear(norm(x), weight(8, "float16")),
            "has no float16 weights for bfloat16 rows",
        ),
        (
            lambda x: [ops.linear(norm(x), weight(COLUMNS), residual=x) for _ in range(2)],
            "",
        ),
        (
            lambda x: [
                ops.linear(h, weight(COLUMNS), residual=x) for h in [norm(x)] for _ in range(2)
            ],
            "",
        ),
        (
            lambda x: norm(embed(x.graph, 20000)),
            "rms_norm: the CUDA kernel has no rows of 20000",
        ),
        (
            lambda x: ops.lora_add(norm(embed(x.graph, 20)), x, AdapterTable(8), 0),
            "lora_add: the CUDA kernel has no rows of 20 inputs",
        ),
    ],
)
def test_what_has_no_kernel_is_named(record: Callable[[Handle], object], message: str) -> None:
    graph = Graph("bf16")
    record(embed(graph))
    if not message:
        lowered(graph)
        return
    with pytest.raises(NotNativeError, match=message):
        lowered(graph)


def test_sums_that_follow_one_another_are_added_in_order() -> None:
    """The last by the norm that reads them, others by a node of their own."""
    graph = Graph("bf16")
    x = embed(graph)
    h = norm(x)
    for _ in range(3):
        ops.linear(h, weight(COLUMNS), residual=x)
    ops.sample(ops.linear(norm(x), weight(VOCAB_SIZE)))
    nodes = lowered(graph).nodes
    names = ["embed", "rms_norm", "linear", *["linear", "norm"] * 2, "rms_norm", "linear", "sample"]
    assert [node.name for node in nodes] == names
    for node in (nodes[4], nodes[6]):
        assert node.arguments["y"] is None
        assert node.arguments["x"] is nodes[0].arguments["y"]
    addends = [nodes[i].arguments["addend"] for i in (4, 6, 7)]
    assert addends == [nodes[i].arguments["y"] for i in (2, 3, 5)]


def test_an_op_that_has_no_kernel_is_named() -> None:
    graph = Graph("bf16")
    x = embed(graph)
    graph.add("turn", x, {"x": x})
    with pytest.raises(NotNativeError, match="turn: it has no CUDA kernel"):
        lowered(graph)


def test_activations_share_memory_unless_they_live_together() -> None:
    def value(columns: int, first: int, last: int) -> Value:
        return Value(torch.float32, columns, "T", first, last)

    values = [value(64, 0, 4), value(128, 1, 2), value(128, 2, 3), value(100, 3, 4), value(1, 4, 4)]
    num_bytes = assign_offsets(values, {"T": 2})
    assert num_bytes == (64 + 128 + 128) * 2 * 4
    for i, one in enumerate(values):
        assert one.offset % 256 == 0
        for other in values[:i]:
            lives_with = one.first <= other.last and other.first <= one.last
            begins, ends = one.offset, one.offset + one.num_bytes(2)
            overlaps = begins < other.offset + other.num_bytes(2) and other.offset < ends
            assert not (lives_with and overlaps)


def test_room_for_unpacked_weights_where_steps_have_rows_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the arena, which is measured, and shared by all weights."""

    def arena_bytes(max_packed_rows: int, num_weights: int) -> int:
        monkeypatch.setattr(limits, "MAX_PACKED_ROWS", max_packed_rows)
        graph = Graph("bf16")
        x = embed(graph)
        for _ in range(num_weights):
            y = ops.linear(norm(x), packed_weight(4096, COLUMNS, 32, False)[0])
        ops.sample(y)
        built = lowered(graph).build(SIZES)
        num_bytes = built._arena.numel()
        built.close()
        return num_bytes

    assert arena_bytes(7, 1) == arena_bytes(8, 1) + 2 * 4096 * COLUMNS
    assert arena_bytes(7, 3) - arena_bytes(7, 1) < 1024  # what else there is grows a little


def product(x: Handle, num_outputs: int) -> Handle:
    """With int8 weights."""
    return ops.linear(x, packed_weight(num_outputs, x.columns, 0, False)[0])


def test_norms_quantize_their_rows_where_nothing_else_reads_them() -> None:
    """Else a node does, once for all products."""

    def names(num_products: int, reads_too: bool) -> list[str]:
        graph = Graph("bf16")
        h = norm(embed(graph))
        for _ in range(num_products):
            y = product(h, COLUMNS)
        if reads_too:
            ops.linear(h, weight(VOCAB_SIZE))
        ops.sample(product(norm(y), VOCAB_SIZE))
        return [node.name for node in lowered(graph).nodes]

    first, second = ["embed", "rms_norm"], ["rms_norm", "linear_quantized", "sample"]
    assert names(1, False) == [*first, "linear_quantized", *second]
    assert names(2, False) == [*first, "linear_quantized", "linear_quantized", *second]
    products = ["quantize_rows", "linear_quantized", "linear_quantized", "linear"]
    assert names(2, True) == [*first, *products, *second]


def test_wide_activations_are_quantized_apart() -> None:
    def names(columns: int) -> list[str]:
        graph = Graph("bf16")
        y = ops.gated_activation(embed(graph, 2 * columns), "silu")
        ops.sample(product(y, 4))
        return [node.name for node in lowered(graph).nodes]

    assert "quantize_rows" not in names(8192)
    assert "quantize_rows" in names(8193)


def ones_on_64_bytes(num_rows: int, num_columns: int) -> torch.Tensor:
    """bf16, on no more than 64: what torch's own memory starts on may differ from call to call, and
    products that differ in it are different shapes."""
    ones = torch.ones(num_rows * num_columns + 64, dtype=torch.bfloat16)
    start = (64 - ones.data_ptr()) % 128 // 2
    return ones[start : start + num_rows * num_columns].view(num_rows, num_columns)


def test_the_fastest_algorithm_of_a_shape_is_kept() -> None:
    library = ctypes.CDLL(str(CUBLASLT_EMULATOR))
    library.cublaslt_set_costs((ctypes.c_int * 5)(60, 40, 0, 40, 0), 5)
    num_columns = 48  # of a shape that no other test has
    matrix = ones_on_64_bytes(VOCAB_SIZE, num_columns)

    def build(row_counts: tuple[int, ...]) -> RecordedSteps:
        graph = Graph("bf16")
        x = norm(ops.gather_logit_rows(embed(graph, num_columns)))
        ops.sample(ops.linear(x, DeviceWeight(matrix)))
        sizes = replace(SIZES, max_tokens=16, max_logit_rows=12, row_counts=row_counts)
        return lowered(graph).build(sizes)

    try:
        build((9,)).close()
        # The fifth isn't asked for; each is run once before it is timed, for 9 rows and for 12.
        assert [library.cublaslt_num_products(i) for i in range(5)] == [8, 8, 8, 8, 0]
        steps = build((9,))
        steps.list.warm_up()
        assert [library.cublaslt_num_products(i) for i in range(5)] == [8, 8, 9, 8, 0]
        steps.close()
    finally:
        library.cublaslt_set_costs((ctypes.c_int * 1)(0), 1)


def test_algorithms_are_chosen_while_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the most rows; captured steps have few."""
    num_heuristics = ctypes.CDLL(str(CUBLASLT_EMULATOR)).cublaslt_num_heuristics
    graph = Graph("bf16")
    ops.sample(ops.linear(norm(embed(graph)), weight(23)))
    steps = lowered(graph)
    before = num_heuristics()
    built = steps.build(replace(SIZES, max_tokens=29, row_counts=(2, 13)))
    assert num_heuristics() == before + 2
    built.close()
