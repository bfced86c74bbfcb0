"""The adapters' kernel of every instruction set against numpy; the same bits in any company."""

import itertools

import numpy as np
import pytest

from lmi_core import _native
from tests.kernels.bf16 import as_float, to_bf16

kernels = _native.kernels
LinearWeight = _native.LinearWeight
LEVELS = _native.instruction_sets()
DTYPES = ["fp32", "bf16"]
pytestmark = [pytest.mark.parametrize("level", LEVELS), pytest.mark.parametrize("dtype", DTYPES)]


def make_matrix(rng, rows, columns, dtype):
    x = rng.standard_normal((rows, columns), dtype=np.float32)
    return x if dtype == "fp32" else to_bf16(x)


def make_adapter(rng, shapes, dtype):
    """Parts of one linear from (rank, inputs, outputs, first output): packed, and as arrays."""
    packed, arrays = [], []
    for rank, num_inputs, num_outputs, first in shapes:
        a = make_matrix(rng, rank, num_inputs, dtype)
        b = make_matrix(rng, num_outputs, rank, dtype)
        weights = (LinearWeight.pack([matrix], format=dtype) for matrix in (a, b))
        packed.append((*weights, first))
        arrays.append((as_float(a), as_float(b), first))
    return packed, arrays


def reference(x, y, arrays, dtype):
    y = y.astype(np.float64)
    for a, b, first in arrays:
        z = (as_float(x) @ a.T).astype(np.float32)
        z = z if dtype == "fp32" else as_float(to_bf16(z))
        y[:, first : first + len(b)] += z.astype(np.float64) @ b.T
    return y


@pytest.mark.parametrize("num_inputs", [1, 7, 64, 513])
@pytest.mark.parametrize("ranks", [(1,), (16,), (3, 8), (5, 17, 64)])
def test_matches_reference(level, dtype, num_inputs, ranks):
    rng = np.random.default_rng(num_inputs)
    sizes = (23, 64, 1)[: len(ranks)]
    firsts = itertools.accumulate((4, *sizes))  # four outputs before, some after the parts
    shapes = [(r, num_inputs, n, first) for r, n, first in zip(ranks, sizes, firsts, strict=False)]
    packed, arrays = make_adapter(rng, shapes, dtype)
    table = _native.LoraTable([(num_inputs, 100)], dtype=dtype)
    table.set(3, [packed])
    for num_rows in (1, 2, 7, 13, 60):
        x = make_matrix(rng, num_rows, num_inputs, dtype)
        y = rng.standard_normal((num_rows, 100), dtype=np.float32)
        got = kernels.lora_add(level, x, y, table, 0, [(0, num_rows, 3)])
        expected = reference(x, y, arrays, dtype)
        scale = np.abs(expected).max()
        # A z in bf16 may be a neighbour of the reference's: the last bit of one of rank summands.
        limit = 1e-5 if dtype == "fp32" else 2**-8
        assert np.abs(got - expected).max() <= limit * scale
        untouched = np.ones(100, bool)
        for _, b, first in arrays:
            untouched[first : first + len(b)] = False
        assert np.array_equal(got[:, untouched], y[:, untouched])


def test_same_bits_whatever_the_batch(level, dtype):
    """Rows of two adapters and of none, in runs of any length, on any number of threads."""
    rng = np.random.default_rng(5)
    num_inputs, num_outputs, num_rows = 203, 150, 160
    table = _native.LoraTable([(7, 7), (num_inputs, num_outputs)], dtype=dtype)
    for slot, ranks in enumerate([(8, 8), (3, 33)]):
        shapes = [(ranks[0], num_inputs, 70, 0), (ranks[1], num_inputs, 80, 70)]
        table.set(slot, [[], make_adapter(rng, shapes, dtype)[0]])
    x = make_matrix(rng, num_rows, num_inputs, dtype)
    y = rng.standard_normal((num_rows, num_outputs), dtype=np.float32)
    alone = [
        np.concatenate(
            [
                kernels.lora_add(level, x[i : i + 1], y[i : i + 1], table, 1, [(0, 1, slot)])
                for i in range(num_rows)
            ]
        )
        for slot in (0, 1)
    ]
    for number in range(12):
        ends = np.unique(rng.integers(1, num_rows + 1, rng.integers(1, 40)))
        expected, runs = y.copy(), []
        for first, end in itertools.pairwise([0, *ends.tolist()]):
            slot = int(rng.integers(-1, 2))
            if slot >= 0:
                runs.append((first, end - first, slot))
                expected[first:end] = alone[slot][first:end]
        num_threads, stride = [(1, 1), (2, 7), (16, 5)][number % 3]
        got = kernels.lora_add(level, x, y, table, 1, runs, num_threads=num_threads, stride=stride)
        assert np.array_equal(got, expected)


def test_linears_that_an_adapter_leaves_alone(level, dtype):
    rng = np.random.default_rng(6)
    table = _native.LoraTable([(16, 32), (16, 32)], dtype=dtype)
    table.set(0, [[], make_adapter(rng, [(4, 16, 32, 0)], dtype)[0]])
    x, y = make_matrix(rng, 5, 16, dtype), rng.standard_normal((5, 32), dtype=np.float32)
    assert np.array_equal(kernels.lora_add(level, x, y, table, 0, [(0, 5, 0)]), y)
    assert not np.array_equal(kernels.lora_add(level, x, y, table, 1, [(0, 5, 0)]), y)
    assert np.array_equal(kernels.lora_add(level, x, y, table, 1, []), y)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu", "relu2"])
@pytest.mark.parametrize("num_columns", [5, 16, 100])
def test_activations_are_those_of_the_fused_linear(level, dtype, activation, num_columns):
    """To the bit: a model with adapters on computes what it does with them off."""
    rng = np.random.default_rng(num_columns)
    parts = [make_matrix(rng, num_columns, 65, dtype) for _ in range(2)]
    x = make_matrix(rng, 19, 65, dtype)
    gated = LinearWeight.pack(parts, format=dtype, gated=True)
    fused = kernels.linear(level, x, gated, activation=activation, out_dtype=dtype)
    single = LinearWeight.pack(parts[:1], format=dtype)
    alone = kernels.linear(level, x, single, activation=activation, out_dtype=dtype)
    y = kernels.linear(level, x, single)
    assert np.array_equal(
        kernels.activation(level, y, activation, gated=False, out_dtype=dtype), alone
    )
    plain = kernels.linear(level, x, LinearWeight.pack(parts, format=dtype))
    for num_threads in (1, 3):
        y = kernels.activation(level, plain, activation, out_dtype=dtype, num_threads=num_threads)
        assert np.array_equal(y, fused)
