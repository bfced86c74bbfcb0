"""Packing weight matrices into panels and back."""

import numpy as np
import pytest

from lmi_core import _native
from tests.kernels.bf16 import from_bf16, to_bf16

LinearWeight = _native.LinearWeight


def sources(rng, num_outputs, num_inputs):
    x = rng.standard_normal((num_outputs, num_inputs), dtype=np.float32)
    return {"fp32": x, "fp16": x.astype(np.float16), "bf16": to_bf16(x)}


def widen(x):
    return from_bf16(x) if x.dtype == np.uint16 else x.astype(np.float32)


@pytest.mark.parametrize("target", ["fp32", "bf16"])
@pytest.mark.parametrize("source", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", [(1, 1), (16, 2), (5, 513), (33, 1025), (48, 512)])
def test_round_trip(target, source, shape):
    w = sources(np.random.default_rng(0), *shape)[source]
    weight = LinearWeight.pack([w], format=target)
    expected = widen(w) if target == "fp32" else from_bf16(to_bf16(widen(w)))
    assert np.array_equal(weight.unpack(), expected)


@pytest.mark.parametrize("target", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("is_grouped", [False, True])
def test_e4m3_is_decoded_on_the_way(target, is_grouped):
    """Every byte, over strips and blocks that end elsewhere; NaN stays NaN."""
    rng = np.random.default_rng(7)
    codes = np.resize(np.arange(256, dtype=np.uint8), (21, 1100))
    if target == "int8":
        codes[codes & 0x7F == 0x7F] = 0
    scales = rng.random((21, 9 if is_grouped else 1), dtype=np.float32) + 0.5
    value = e4m3_values()[codes]
    exact = value * np.repeat(scales, 128 if is_grouped else 1100, axis=1)[:, :1100]
    plain = rng.standard_normal((3, 1100), dtype=np.float32)
    weight = LinearWeight.pack([(codes, scales), plain], format=target)
    expected = LinearWeight.pack([exact.astype(np.float32), plain], format=target)
    assert np.array_equal(weight.unpack(), expected.unpack(), equal_nan=True)
    assert np.array_equal(np.isnan(weight.unpack()[:21]), codes & 0x7F == 0x7F)


def e4m3_values():
    values = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        size = np.nan if code & 0x7F == 0x7F else size
        values.append(-size if code & 0x80 else size)
    return np.array(values, np.float32)


def test_scales_that_do_not_fit_are_refused():
    codes = np.zeros((4, 200), np.uint8)
    for shape in ((4, 3), (5, 1), (1, 1)):
        with pytest.raises(_native.NativeError, match="scales are fp32"):
            LinearWeight.pack([(codes, np.ones(shape, np.float32))], format="bf16")
    with pytest.raises(_native.NativeError, match="codes are uint8"):
        LinearWeight.pack([(codes.astype(np.float32), np.ones((4, 1), np.float32))], format="bf16")


def test_parts_of_different_dtypes_are_concatenated():
    rng = np.random.default_rng(1)
    parts = [sources(rng, n, 37)[name] for n, name in ((3, "fp32"), (20, "bf16"), (1, "fp16"))]
    weight = LinearWeight.pack(parts, format="fp32")
    assert np.array_equal(weight.unpack(), np.concatenate([widen(part) for part in parts]))


@pytest.mark.parametrize("num_outputs", [1, 16, 24, 50])
def test_gated_pads_gate_and_up_apart(num_outputs):
    rng = np.random.default_rng(2)
    gate, up = (sources(rng, num_outputs, 9)["fp32"] for _ in range(2))
    weight = LinearWeight.pack([gate, up], format="fp32", gated=True)
    assert np.array_equal(weight.unpack(), np.concatenate([gate, up]))
    assert weight.num_bytes == 2 * -(-num_outputs // 16) * 16 * 9 * 4


def test_special_values_survive_the_rounding():
    values = [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40, 3.4e38, 1.00390625, 1.01171875]
    weight = LinearWeight.pack([np.array([values], np.float32)], format="bf16")
    expected = [np.inf, -np.inf, np.nan, 0.0, -0.0, from_bf16(to_bf16(np.float32([1e-40])))[0],
                np.inf, 1.0, 1.015625]  # fmt: skip
    assert np.array_equal(weight.unpack()[0], np.float32(expected), equal_nan=True)


def test_gate_and_up_must_match():
    with pytest.raises(_native.NativeError, match="two parts of one size"):
        LinearWeight.pack([np.zeros((4, 2), np.float32), np.zeros((5, 2), np.float32)],
                     format="fp32", gated=True)  # fmt: skip


def test_int4_codes_are_the_nearest_by_the_scale_that_is_kept() -> None:
    """In fp16, not by what it was rounded from."""
    w = np.random.default_rng(2).standard_normal((64, 4096), np.float32)
    values = LinearWeight.pack([w], format="int4", group_size=128).unpack()
    groups, kept = w.reshape(64, -1, 128), values.reshape(64, -1, 128)
    step = np.where(kept == 0, np.inf, abs(kept)).min(-1, keepdims=True)
    codes = np.rint(kept / step)
    inner = (codes > codes.min(-1, keepdims=True)) & (codes < codes.max(-1, keepdims=True))
    assert (abs(groups - kept) <= 0.5001 * step)[inner].all()
