"""Weights in codes of floats: packed as they are, or made as bitsandbytes makes them; and rows of
LLM.int8."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmi_core import _native
from lmi_core.weights.block_matrix import SUM_INPUTS
from lmi_core.weights.float_code_matrix import CODE_BLOCK, CODE_VALUES, to_float_codes

LEVELS = _native.instruction_sets()
FORMATS = ["nf4", "fp4", "e4m3", "e5m2"]
Floats = npt.NDArray[np.float32]


def values_of(format: str) -> Floats:
    """By code, from the definitions."""
    if format in CODE_VALUES:
        return CODE_VALUES[format]  # type: ignore[index]
    codes = np.arange(256)
    exponent_bits, mantissa_bits = (4, 3) if format == "e4m3" else (5, 2)
    bias = 2 ** (exponent_bits - 1) - 1
    exponent = codes >> mantissa_bits & (2**exponent_bits - 1)
    mantissa = (codes & (2**mantissa_bits - 1)) / 2**mantissa_bits
    values = np.where(
        exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias)
    )
    return (np.where(codes & 128, -1, 1) * values).astype(np.float32)


def random_codes(format: str, num_outputs: int, num_inputs: int, seed: int = 0) -> Any:
    """Codes and scales as packing takes them, and what they stand for."""
    rng = np.random.default_rng(seed)
    is_small = format in CODE_VALUES
    block, most = (CODE_BLOCK, 16) if is_small else (128, 120)
    codes = rng.integers(0, most, (num_outputs, num_inputs)).astype(np.uint8)
    if not is_small:
        codes |= rng.integers(0, 2, codes.shape).astype(np.uint8) << 7
    scales = rng.uniform(0.5, 2, (num_outputs, num_inputs // block)).astype(np.float32)
    exact = values_of(format)[codes] * np.repeat(scales, block, axis=1)
    stored = codes[:, 0::2] << 4 | codes[:, 1::2] if is_small else codes
    return (np.ascontiguousarray(stored), scales), exact.astype(np.float32)


def pack(format: Any, *parts: Any, rounding: Any = "none", **settings: Any) -> Any:
    group_size = SUM_INPUTS if format in CODE_VALUES else 0
    return _native.LinearWeight.pack(
        [*parts], format=format, group_size=group_size, rounding=rounding, **settings
    )


def inputs(num_rows: int, num_inputs: int) -> Floats:
    """With a channel that is forty times the others."""
    x = np.random.default_rng(2).standard_normal((num_rows, num_inputs)).astype(np.float32)
    x[:, 7] *= 40
    return x


@pytest.mark.parametrize("format", FORMATS)
def test_packed_weights_are_the_formats_own_to_the_bit(format: str) -> None:
    part, exact = random_codes(format, 49, 256)
    packed = pack(format, part)
    assert np.array_equal(packed.unpack().view(np.uint32), exact.view(np.uint32))
    num_bytes = part[0].nbytes + part[1].nbytes
    assert packed.num_bytes == num_bytes * 64 // 49, "outputs are padded to 64, nothing else"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", FORMATS)
def test_products_are_with_these_weights(format: str, level: str) -> None:
    part, exact = random_codes(format, 80, 768, 3)
    x = inputs(7, 768)
    wanted = x.astype(np.float64) @ exact.T.astype(np.float64)
    found = _native.kernels.linear(level, x, pack(format, part))
    assert np.abs(found - wanted).max() < 4e-6 * np.abs(wanted).max(), "no row is rounded"


def rounded(x: Floats, level: str, rounding: Any) -> npt.NDArray[np.float64]:
    """What quantised rows stand for."""
    stored = _native.kernels.quantize_rows(level, x, group_size=SUM_INPUTS, rounding=rounding)
    num_inputs = x.shape[1]
    codes = stored[:, :num_inputs].view(np.int8).astype(np.float64)
    scales = stored[:, num_inputs : num_inputs + 4].copy().view(np.float32)
    counts = stored[:, num_inputs + 4 : num_inputs + 8].copy().view(np.int32)
    first = num_inputs + 8 + num_inputs // SUM_INPUTS * 4
    for row, count in enumerate(counts[:, 0]):
        entries = stored[row, first : first + 4 * count].copy().view(np.int32)
        codes[row, entries >> 8] += 256.0 * (entries & 0xFF).astype(np.int8)
    return codes * scales


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rounding", ["int8", "outliers"])
@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_products_with_rounded_rows(format: str, rounding: Any, level: str) -> None:
    part, exact = random_codes(format, 80, 768, 3)
    x = inputs(15, 768)
    rows = rounded(x, level, rounding)
    found = _native.kernels.linear(level, x, pack(format, part, rounding=rounding))
    # A scale is 2 at most, a weight within 2^-17 of its scale.
    most = 2**-16 * np.abs(rows).sum(axis=1).max() if format == "nf4" else 0
    wanted = rows @ exact.T.astype(np.float64)
    assert np.abs(found - wanted).max() < most + 4e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_the_largest_sums_of_planes_fit(format: str, level: str) -> None:
    for code in (0, 3, 11, 15):
        stored = np.full((16, 96), code << 4 | code, np.uint8)
        weight = pack(format, (stored, np.ones((16, 3), np.float32)), rounding="int8")
        x = np.full((13, 192), -5.0, np.float32)
        found = _native.kernels.linear(level, x, weight)
        assert np.allclose(found, -960 * values_of(format)[code], rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("format", "rounding"),
    [*((each, "none") for each in FORMATS), ("nf4", "outliers"), ("fp4", "int8")],
)
def test_a_rows_bits_dont_depend_on_the_batch(
    format: str, rounding: Any, dtype: str, level: str
) -> None:
    # Several K blocks, one of which isn't whole, and outputs that fill no group of panels.
    part, _ = random_codes(format, 83, 3264 if rounding != "none" else 1024, 4)
    weight = pack(format, part, rounding=rounding)
    x = inputs(15, weight.num_inputs)
    rows = x if dtype == "fp32" else (x.view(np.uint32) >> 16).astype(np.uint16)
    together = _native.kernels.linear(level, rows, weight)
    for first, end in ((0, 1), (1, 3), (3, 9), (8, 9)):
        alone = _native.kernels.linear(level, rows[first:end], weight)
        assert np.array_equal(alone, together[first:end])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_every_code_of_eight_bits_is_its_number(format: str, level: str) -> None:
    num_codes = 0x7F if format == "e4m3" else 0x7C  # the others aren't finite
    codes = np.zeros((16, 256), np.uint8)
    codes[0, :num_codes] = np.arange(num_codes)
    codes[1, :num_codes] = 128 | np.arange(num_codes)
    weight = pack(format, (codes, np.ones((16, 1), np.float32)))
    found = _native.kernels.linear(level, np.eye(256, dtype=np.float32), weight)
    assert np.array_equal(found.T, values_of(format)[codes])
    codes[2, 200] = 0x7F
    found = _native.kernels.linear(level, np.eye(256, dtype=np.float32), pack(
        format, (codes, np.ones((16, 1), np.float32))
    ))  # fmt: skip
    assert np.isnan(found[200, 2])
    assert np.isfinite(found[:, 3]).all()


@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_weights_are_made_as_bitsandbytes_makes_them(format: Any) -> None:
    weights = np.random.default_rng(5).standard_normal((33, 192)).astype(np.float32)
    made = pack(format, weights)
    scales = np.abs(weights.reshape(33, 3, 64)).max(axis=2)
    blocks = weights.reshape(33, 3, 64) / scales[:, :, None]
    nearest = np.abs(blocks[..., None] - values_of(format)).argmin(axis=-1)
    wanted = values_of(format)[nearest] * scales[:, :, None]
    assert np.array_equal(made.unpack(), wanted.reshape(33, 192))
    coded = to_float_codes(weights, format)
    assert np.array_equal(coded.to_float32(), made.unpack())
    assert pack(format, coded.packable()).packed().tobytes() == made.packed().tobytes()
    bits = (weights.view(np.uint32) >> 16).astype(np.uint16)
    assert np.abs(pack(format, bits).unpack() - weights).max() < 0.2 * np.abs(weights).max()


def test_scales_may_go_from_one_row_to_the_next() -> None:
    weights = np.random.default_rng(6).standard_normal((6, 96)).astype(np.float32)
    coded = to_float_codes(weights, "nf4")
    assert not coded.has_whole_blocks
    flat = to_float_codes(weights.reshape(9, 64), "nf4").to_float32().reshape(6, 96)
    assert np.array_equal(coded.to_float32(), flat)
    chosen = np.array([4, 0, 5])
    assert np.array_equal(coded.rows(chosen).rows(slice(1, 3)).to_float32(), flat[[0, 5]])


@pytest.mark.parametrize("format", ["nf4", "e4m3"])
def test_gate_and_up_go_side_by_side(format: str) -> None:
    (gate, g), (up, u) = (random_codes(format, 40, 256, seed) for seed in (7, 8))
    x = inputs(3, 256) * np.float32(0.01)
    found = _native.kernels.linear(
        LEVELS[-1], x, pack(format, gate, up, gated=True), activation="silu", out_dtype="fp32"
    )
    first, second = (x.astype(np.float64) @ part.T for part in (g, u))
    assert np.allclose(found, first / (1 + np.exp(-first)) * second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("part", "settings", "words"),
    [
        (
            np.zeros((4, 96), np.float32),
            {"format": "nf4"},
            "nf4 has scales for 64 inputs, which 96",
        ),
        (np.zeros((4, 128), np.float32), {"format": "e4m3"}, "fp32 can't become e4m3"),
        (
            (np.zeros((4, 64), np.uint8), np.zeros((4, 3), np.float32)),
            {"format": "nf4"},
            r"scales are fp32 \[4, 1 or 2\]",
        ),
        (
            np.zeros((4, 128), np.float32),
            {"format": "nf4", "rounding": "llm_int8"},
            "rows of LLM.int8 are for int8 weights, not nf4",
        ),
    ],
)
def test_what_cant_be_packed_is_refused(part: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(_native.NativeError, match=words):
        pack(settings["format"], part, **{k: v for k, v in settings.items() if k != "format"})


def llm_int8(x: Floats, codes: npt.NDArray[np.int8], scales: Floats) -> npt.NDArray[np.float64]:
    """One row, as bitsandbytes multiplies it: inputs from 6 on aren't rounded, nor count for the
    scale."""
    is_large = np.abs(x) >= 6
    small = np.where(is_large, 0, x)
    most = np.abs(small).max()
    rounded = np.rint(small * (np.float32(127) / most))
    sums = codes.astype(np.float64) @ rounded
    weights = codes.astype(np.float64) * scales[:, None]
    return sums * scales * most / 127 + weights @ np.where(is_large, x, 0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rows_of_llm_int8(dtype: str, level: str) -> None:
    rng = np.random.default_rng(9)
    codes = rng.integers(-127, 128, (70, 200)).astype(np.int8)
    scales = rng.uniform(0.5, 2, 70).astype(np.float32)
    part = ((codes.view(np.uint8) + np.uint8(128)), scales[:, None], np.full((70, 1), 128, "f4"))
    weight = pack("int8", part, rounding="llm_int8")
    assert weight.row_format == "llm_int8, summed over 0"
    x = rng.standard_normal((6, 200)).astype(np.float32)
    x[1:, ::9] *= 20
    x[4] *= 100
    x[5, 0] = 6.0
    if dtype == "bf16":
        x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    rows = x if dtype == "fp32" else (x.view(np.uint32) >> 16).astype(np.uint16)
    found = _native.kernels.linear(level, rows, weight)
    for row, given in enumerate(x):
        wanted = llm_int8(given, codes, scales)
        assert np.abs(found[row] - wanted).max() < 2e-6 * np.abs(wanted).max()
        assert np.array_equal(
            _native.kernels.linear(level, rows[row : row + 1], weight)[0], found[row]
        )
    x[2, 3] = np.nan
    assert np.isnan(_native.kernels.linear(level, x, weight)[2]).all()
    assert not _native.kernels.linear(level, np.zeros((1, 200), np.float32), weight).any()


def test_rows_shorter_than_a_block_end_with_the_matrix() -> None:
    """17 rows of 16 are 4 blocks and a quarter, whose rest isn't rows."""
    weights = np.random.default_rng(5).standard_normal((17, 16)).astype(np.float32)
    found = to_float_codes(weights, "nf4").to_float32()
    assert found.shape == weights.shape
    assert np.abs(found - weights).max() < 0.4
