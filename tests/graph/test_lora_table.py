"""What a table of adapters and a graph over it refuse."""

from collections.abc import Callable

import numpy as np
import pytest

from lmi_core import _native

Parts = list[tuple[_native.LinearWeight, _native.LinearWeight, int]]


def weight(num_outputs: int, num_inputs: int, dtype: str = "fp32") -> _native.LinearWeight:
    return _native.LinearWeight.pack(
        [np.zeros((num_outputs, num_inputs), np.float32)],
        format=dtype,  # type: ignore[arg-type]
    )


REFUSED: list[tuple[Callable[[], Parts], str]] = [
    (lambda: [(weight(4, 9), weight(5, 4), 0)], "A has 9 inputs, not 8"),
    (lambda: [(weight(4, 8), weight(5, 3), 0)], "A has the rank 4 and B 3"),
    (lambda: [(weight(4, 8), weight(5, 4), 12)], "B has 5 outputs from 12 on, of 16"),
    (lambda: [(weight(4, 8), weight(5, 4), -1)], "B has 5 outputs from -1 on, of 16"),
    (lambda: [(weight(4, 8, "bf16"), weight(5, 4), 0)], "A is bf16 and B fp32, not fp32"),
    (lambda: [(weight(1025, 8), weight(5, 1025), 0)], "at most 1024"),
    (lambda: [(weight(4, 8), weight(5, 4), 0)] * 4, "4 parts of a linear, at most 3"),
]


@pytest.mark.parametrize(("parts", "message"), REFUSED)
def test_adapters_that_do_not_fit(parts: Callable[[], Parts], message: str) -> None:
    table = _native.LoraTable([(8, 16)], dtype="fp32")
    with pytest.raises(_native.NativeError, match=message):
        table.set(0, [parts()])


def test_slots_and_linears_that_are_not_there() -> None:
    table = _native.LoraTable([(8, 16)], dtype="fp32")
    for slot in (-1, 1 << 16):
        with pytest.raises(_native.NativeError, match=f"adapter slot {slot} of 65536"):
            table.set(slot, [[]])
    with pytest.raises(_native.NativeError, match="an adapter of 2 linears for a table of 1"):
        table.set(0, [[], []])


class Model:
    """y = x W + adapter, of one token per step."""

    def __init__(self, table: _native.LoraTable) -> None:
        sizes = {"max_tokens": 4, "max_seqs": 4, "max_logit_rows": 4, "block_size": 16}
        self.graph = _native.Graph(**sizes, max_blocks_per_seq=1, act_dtype="fp32")
        embedded = self.graph.embed(np.eye(4, 8, dtype=np.float32))
        x = self.graph.rms_norm(embedded, np.ones(8, np.float32), 1e-6)
        y = self.graph.linear(x, weight(16, 8))
        self.y = self.graph.lora_add(x, y, table, 0)
        self.graph.output(self.y)
        self.graph.finish()
        tables = _native.BlockTables(4, 1)
        tables.set(0, [0])
        self.step = _native.Step(
            **sizes,
            max_logprobs=0,
            max_copies=0,
            block_tables=tables,
            sampling=_native.SamplingTable(4, 4),
        )
        self.worker = _native.Worker(1)

    def run(self, adapter: int) -> np.ndarray:
        self.step.clear()
        self.step.add([1], 0, 0, -1, "none", adapter)
        self.worker.run(self.graph, self.step)
        return self.graph.read(self.y, 1)[0]


def ones(first_output: int) -> Parts:
    matrices = np.ones((1, 8), np.float32), np.ones((4, 1), np.float32)
    a, b = (_native.LinearWeight.pack([matrix], format="fp32") for matrix in matrices)
    return [(a, b, first_output)]


def test_slots_are_set_cleared_and_set_again() -> None:
    table = _native.LoraTable([(8, 16)], dtype="fp32")
    model = Model(table)
    assert not model.run(-1).any()
    with pytest.raises(_native.NativeError, match="the step's adapter slot 2 is empty"):
        model.run(2)
    table.set(2, [ones(0)])
    assert np.flatnonzero(model.run(2)).tolist() == [0, 1, 2, 3]
    assert not model.run(-1).any()
    table.clear(2)
    with pytest.raises(_native.NativeError, match="the step's adapter slot 2 is empty"):
        model.run(2)
    table.set(2, [ones(8)])
    assert np.flatnonzero(model.run(2)).tolist() == [8, 9, 10, 11]


def test_rows_of_neighbours_with_one_adapter_are_one_run() -> None:
    tables = _native.BlockTables(4, 1)
    for row in range(4):
        tables.set(row, [row])
    step = _native.Step(
        max_tokens=16,
        max_seqs=4,
        max_logit_rows=4,
        block_size=16,
        max_logprobs=0,
        max_copies=0,
        block_tables=tables,
        sampling=_native.SamplingTable(4, 4),
    )
    for row, (count, adapter) in enumerate([(3, 5), (2, 5), (1, -1), (4, 5)]):
        step.add([1] * count, 0, row, -1, "none", adapter)
    names = ("adapter_first_rows", "adapter_num_rows", "adapter_slots")
    assert [step.view(name).tolist() for name in names] == [[0, 6], [5, 4], [5, 5]]
    step.clear()
    assert [len(step.view(name)) for name in names] == [0, 0, 0]
