"""What a step list refuses; tests/runners/device/test_cuda_runner.py compares what it does."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core import _native  # noqa: E402
from lmi_core.ops.device import packed_weight as limits  # noqa: E402
from lmi_core.ops.device.recorded_steps import RecordedSteps, Value, assign_offsets  # noqa: E402
from lmi_core.ops.device.step_list import StepList, StepListSizes  # noqa: E402
from lmi_core.ops.device.step_recorder import NotNativeError, StepRecorder  # noqa: E402
from lmi_core.ops.device.torch_weights import DeviceWeight  # noqa: E402
from lmi_core.ops.kernels import select  # noqa: E402
from lmi_core.ops.recorder import Handle  # noqa: E402
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


def recorder() -> StepRecorder:
    return StepRecorder(select.select("cpu", "native"), CPU, "bf16")


def embed(recorder: StepRecorder) -> Handle:
    rng = np.random.default_rng(0)
    return recorder.embed(rng.standard_normal((VOCAB_SIZE, COLUMNS)).astype(np.float32), 1.0)


def weight(num_outputs: int, dtype: str = "bfloat16") -> DeviceWeight:
    generator = torch.Generator().manual_seed(num_outputs)
    matrix = torch.randn(num_outputs, COLUMNS, generator=generator)
    return DeviceWeight(matrix.to(getattr(torch, dtype)))


def linear(recorder: StepRecorder, x: Handle, num_outputs: int, **changes: object) -> Handle:
    options = {"bias": None, "activation": "", "residual": None, "out_dtype": "fp32", **changes}
    return recorder.linear(x, weight(num_outputs), **options)  # type: ignore[arg-type]


def norm(recorder: StepRecorder, x: Handle) -> Handle:
    return recorder.rms_norm(x, np.ones(COLUMNS, np.float32), 1e-5)


def recorded() -> RecordedSteps:
    """A model without attention: a token's logits depend on nothing but itself."""
    steps = recorder()
    x = embed(steps)
    steps.sample(linear(steps, norm(steps, steps.gather_logit_rows(x)), VOCAB_SIZE))
    return steps.build(SIZES)


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


def test_what_has_no_kernel_is_named() -> None:
    steps = recorder()
    x = embed(steps)
    with pytest.raises(NotNativeError, match="linear: the CUDA kernel has no float32 rows"):
        linear(steps, x, 8)
    h = norm(steps, x)
    with pytest.raises(NotNativeError, match="linear: no kernel rounds its results to bf16"):
        linear(steps, h, 8, out_dtype="act")
    with pytest.raises(NotNativeError, match="has no float16 weights for bfloat16 rows"):
        steps.linear(
            h, weight(8, "float16"), bias=None, activation="", residual=None, out_dtype="fp32"
        )
    linear(steps, h, COLUMNS, residual=x)
    with pytest.raises(NotNativeError, match="linear: two sums follow one another"):
        linear(steps, h, COLUMNS, residual=x)
    wide = steps.embed(np.zeros((2, 20000), np.float32), 1.0)
    with pytest.raises(NotNativeError, match="rms_norm: the CUDA kernel has no rows of 20000"):
        steps.rms_norm(wide, np.ones(20000, np.float32), 1e-5)


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
    """In the arena, which the memory plan measures, and shared by all weights."""

    def arena_bytes(max_packed_rows: int, num_weights: int) -> int:
        monkeypatch.setattr(limits, "MAX_PACKED_ROWS", max_packed_rows)
        steps = recorder()
        x = embed(steps)
        for _ in range(num_weights):
            packed, _ = packed_weight(4096, COLUMNS, 32, False)
            linear = steps.linear(
                norm(steps, x), packed, bias=None, activation="", residual=None, out_dtype="fp32"
            )
        steps.sample(linear)
        built = steps.build(SIZES)
        num_bytes = built._arena.numel()
        built.close()
        return num_bytes

    assert arena_bytes(7, 1) == arena_bytes(8, 1) + 2 * 4096 * COLUMNS
    assert arena_bytes(7, 3) - arena_bytes(7, 1) < 1024  # what else there is grows a little


def product(recorder: StepRecorder, x: Handle, num_outputs: int) -> Handle:
    """With int8 weights."""
    packed, _ = packed_weight(num_outputs, COLUMNS, 0, False)
    return recorder.linear(x, packed, bias=None, activation="", residual=None, out_dtype="fp32")


def test_norms_quantize_their_rows_where_products_want_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And are stored as well where something else reads them."""

    def built(reads_too: bool) -> tuple[list[str], bool]:
        steps = recorder()
        h = norm(steps, embed(steps))
        y = product(steps, h, COLUMNS)
        if reads_too:
            linear(steps, h, VOCAB_SIZE)
            product(steps, h, COLUMNS)
        steps.sample(product(steps, norm(steps, y), VOCAB_SIZE))
        recorded = steps.build(SIZES)
        is_stored = recorded._nodes[1].arguments["y"] is not None
        names = [node.name for node in recorded._nodes]
        recorded.close()
        return names, is_stored

    first, second = ["embed", "rms_norm", "linear_quantized"], ["rms_norm", "linear_quantized"]
    assert built(False) == ([*first, *second, "sample"], False)
    between = ["linear", "quantize_rows", "linear_quantized"]
    assert built(True) == ([*first, *between, *second, "sample"], True)


def test_wide_activations_are_quantized_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(columns: int) -> list[str]:
        steps = recorder()
        gate_up = steps.embed(np.zeros((2, 2 * columns), np.float32), 1.0)
        y = steps._gated(gate_up.value, "silu")  # type: ignore[arg-type]
        packed, _ = packed_weight(4, columns, 0, False)
        steps.sample(
            steps.linear(y, packed, bias=None, activation="", residual=None, out_dtype="fp32")
        )
        built = steps.build(SIZES)
        built.close()
        return [node.name for node in steps._nodes]

    assert "quantize_rows" not in names(8192)
    assert "quantize_rows" in names(8193)


def test_algorithms_are_chosen_while_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the most rows; captured steps have few."""
    num_heuristics = ctypes.CDLL(str(CUBLASLT_EMULATOR)).cublaslt_num_heuristics
    steps = recorder()
    steps.sample(linear(steps, norm(steps, embed(steps)), 23))
    before = num_heuristics()
    built = steps.build(replace(SIZES, max_tokens=29, row_counts=(2, 13)))
    assert num_heuristics() == before + 2
    built.close()
