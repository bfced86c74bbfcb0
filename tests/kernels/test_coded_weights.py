"""Weights that come as codes, scales and zero points: kept to the bit, and multiplied right."""

import numpy as np
import pytest

from lmi_core import _native

kernels = _native.kernels
LinearWeight = _native.LinearWeight
every_level = pytest.mark.parametrize("level", _native.instruction_sets())


def coded(num_outputs, num_inputs, group_size, seed=0):
    """A part in int4 (int8: group_size 0), and the matrix that it stands for."""
    rng = np.random.default_rng(seed)
    bits = 4 if group_size else 8
    group = group_size or num_inputs
    shape = num_outputs, -(-num_inputs // group)
    codes = rng.integers(0, 2**bits, (num_outputs, num_inputs), dtype=np.uint8)
    codes[0] = 0
    scales = (rng.random(shape, np.float32) + 0.5).astype(np.float16).astype(np.float32)
    zeros = rng.integers(0, 16, shape).astype(np.float32)
    if group_size:
        zeros[:2] = [[0], [15]]
    else:
        zeros[:] = 128
    spread_scales, spread_zeros = (
        np.repeat(values, group, axis=1)[:, :num_inputs] for values in (scales, zeros)
    )
    return (codes, scales, zeros), spread_scales * (codes - spread_zeros)


def pack(parts, group_size, **more):
    return LinearWeight.pack(
        parts, format="int4" if group_size else "int8", group_size=group_size, **more
    )


@pytest.mark.parametrize("group_size", [0, 32, 64, 128])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(16, 128), (23, 300), (5, 33), (70, 130)])
def test_codes_are_kept(num_outputs, num_inputs, group_size):
    part, exact = coded(num_outputs, num_inputs, group_size)
    weight = pack([part], group_size)
    np.testing.assert_array_equal(weight.unpack(), exact)


@pytest.mark.parametrize("group_size", [0, 32, 128])
def test_parts_are_fused(group_size):
    parts = [coded(n, 130, group_size, seed=n) for n in (24, 8, 9)]
    exact = np.concatenate([matrix for _, matrix in parts])
    for num_threads in (1, 2):
        weight = pack([part for part, _ in parts], group_size, num_threads=num_threads)
        np.testing.assert_array_equal(weight.unpack(), exact)
    gate, up = coded(40, 130, group_size, seed=1), coded(40, 130, group_size, seed=2)
    weight = pack([gate[0], up[0]], group_size, gated=True)
    np.testing.assert_array_equal(weight.unpack(), np.concatenate([gate[1], up[1]]))


@pytest.mark.parametrize("group_size", [0, 64])
def test_what_was_quantised_here_can_be_packed_again(group_size):
    """Codes and scales taken out of the panels, by the layout of csrc/cpu/packed_linear.h."""
    rng = np.random.default_rng(0)
    weight = pack([rng.standard_normal((48, 192), dtype=np.float32)], group_size)
    panels = weight.packed().reshape(3, 192 // (group_size or 192), -1)
    header, steps = panels[..., :64].copy(), panels[..., 64:]
    if group_size:
        halves = header.view(np.float16).astype(np.float32).reshape(3, -1, 2, 16)
        scales, zeros = halves[:, :, 0], halves[:, :, 1]
        words = steps.reshape(3, -1, 16, 4)
        steps = np.concatenate((words & 15, words >> 4), axis=-1)
    else:
        scales = header.view(np.float32)
        zeros = np.full_like(scales, 128)
    codes = steps.reshape(3, -1, 16, 8 if group_size else 4).transpose(0, 2, 1, 3).reshape(48, 192)
    part = tuple(
        np.ascontiguousarray(values)
        for values in (
            codes,
            scales.transpose(0, 2, 1).reshape(48, -1),
            zeros.transpose(0, 2, 1).reshape(48, -1),
        )
    )
    assert pack([part], group_size).packed().tobytes() == weight.packed().tobytes()


@every_level
@pytest.mark.parametrize("group_size", [0, 32, 128])
def test_products_are_exact(level, group_size):
    """Whole numbers: also of the codes 0 and 255, and of any zero point."""
    rng = np.random.default_rng(3)
    (codes, scales, zeros), _ = coded(50, 300, group_size)
    scales[:] = 1
    weight = pack([(codes, scales, zeros)], group_size)
    x = rng.integers(-127, 128, (13, 300)).astype(np.float32)
    x[:, 0] = 127
    if not group_size:
        codes[1], x[1] = 255, -127
        weight = pack([(codes, scales, zeros)], group_size)
    exact = x.astype(np.float64) @ weight.unpack().astype(np.float64).T
    for num_rows in (1, 6, 13):
        y = kernels.linear(level, x[:num_rows], weight)
        assert np.all(np.abs(y - exact[:num_rows]) <= 1e-6 * np.abs(exact[:num_rows]) + 1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, s, z: (c, s[:, :1], z[:, :1]), "3 scales an output, not 1"),
        (lambda c, s, z: (c, s, z[:, :1]), "3 scales and 1 zero points"),
        (lambda c, s, z: (c, s.astype(np.float16), z), "are fp32"),
        (lambda c, s, z: (c, s[:4], z), "a row for each of 20 outputs"),
        (lambda c, s, z: (c.astype(np.int32), s, z), "are uint8"),
    ],
)
def test_parts_that_do_not_fit(change, message):
    part, _ = coded(20, 130, 64)
    with pytest.raises(_native.NativeError, match=message):
        pack([tuple(map(np.ascontiguousarray, change(*part)))], 64)


def test_codes_have_one_format():
    part, _ = coded(20, 130, 64)
    with pytest.raises(_native.NativeError, match="can't become bf16"):
        LinearWeight.pack([part], format="bf16")
    codes, scales, zeros = coded(20, 130, 0)[0]
    with pytest.raises(_native.NativeError, match="zero point of int8 codes is 128"):
        LinearWeight.pack([(codes, scales, zeros - 1)], format="int8")
