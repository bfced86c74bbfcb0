"""GGUF's types of blocks: what is packed is the file's own numbers, and products are with those."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from lmi_core import _native
from lmi_core.weights.block_matrix import SUM_INPUTS, BlockMatrix
from lmi_core.weights.formats import BlockFormat
from tests.block_reference import dequantize
from tests.gguf_files import BLOCKS, SCALE_HALVES, random_blocks

LEVELS = _native.instruction_sets()
TYPES = sorted(BLOCKS)


def pack(kind: str, *parts: npt.NDArray[np.uint8], **settings: object) -> _native.LinearWeight:
    name: BlockFormat = kind.lower()  # type: ignore[assignment]
    return _native.LinearWeight.pack(
        [*parts],
        format=name,
        group_size=SUM_INPUTS,
        **settings,  # type: ignore[arg-type]
    )


def inputs(num_rows: int, num_inputs: int) -> npt.NDArray[np.float32]:
    """With a channel that is forty times the others."""
    x = np.random.default_rng(2).standard_normal((num_rows, num_inputs)).astype(np.float32)
    x[:, 7] *= 40
    return x


@pytest.mark.parametrize("kind", TYPES)
def test_packed_weights_are_the_formats_own_to_the_bit(kind: str) -> None:
    raw = random_blocks(kind, 49, 512, np.random.default_rng(0))
    packed = pack(kind, raw)
    wanted = dequantize(kind, raw)
    assert np.array_equal(packed.unpack().view(np.uint32), wanted.view(np.uint32))
    assert packed.num_bytes == raw.nbytes * 64 // 49, "outputs are padded to 64, nothing else"
    matrix = BlockMatrix(kind.lower(), (49, 512), raw)  # type: ignore[arg-type]
    assert np.array_equal(matrix.rows(slice(3, 30)).to_float32(), wanted[3:30])


@pytest.mark.parametrize("level", LEVELS)
def test_scales_of_mxfp4_reach_the_least_numbers(level: str) -> None:
    raw = random_blocks("MXFP4", 16, 512, np.random.default_rng(1))
    raw.reshape(16, 16, 17)[:, :, 0] = np.arange(256).reshape(16, 16) % 252
    found = _native.kernels.embed(level, np.arange(16, dtype=np.int32), raw, format="mxfp4")
    assert np.array_equal(found, dequantize("MXFP4", raw))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", TYPES)
def test_products_are_with_these_weights(kind: str, level: str) -> None:
    raw = random_blocks(kind, 80, 768, np.random.default_rng(3))
    weights, x = dequantize(kind, raw).astype(np.float64), inputs(7, 768)
    exact = x.astype(np.float64) @ weights.T
    most = np.abs(exact).max()
    rounded = _native.kernels.linear(level, x, pack(kind, raw))
    assert np.abs(rounded - exact).max() < 0.02 * most, "rows are rounded to 8 bits"
    unrounded = _native.kernels.linear(level, x, pack(kind, raw, rounding="none"))
    assert np.abs(unrounded - exact).max() < 4e-6 * most


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", TYPES)
def test_sums_of_the_largest_codes_are_whole(kind: str, level: str) -> None:
    """Rows of one number each, which rounding doesn't change, so that all products add up."""
    x = np.repeat([[1], [-1]] * 10, 512, axis=1).astype(np.float32)
    for byte in (0x00, 0x77, 0xFF):
        raw = random_blocks(kind, 16, 512, np.random.default_rng(3))
        blocks = raw.reshape(-1, BLOCKS[kind][1])
        kept = [at + i for at in SCALE_HALVES[kind] for i in (0, 1)] or [0]
        blocks[:, np.setdiff1d(np.arange(blocks.shape[1]), kept)] = byte
        exact = x.astype(np.float64) @ dequantize(kind, raw).astype(np.float64).T
        for num_rows in (2, 20):
            found = _native.kernels.linear(level, x[:num_rows], pack(kind, raw))
            np.testing.assert_allclose(found, exact[:num_rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", TYPES)
def test_a_rows_bits_dont_depend_on_the_batch(kind: str, level: str) -> None:
    # More than a block of 3072 inputs along K, and outputs that fill no group of panels.
    raw = random_blocks(kind, 83, 3328, np.random.default_rng(4))
    weight, x = pack(kind, raw), inputs(9, 3328)
    together = _native.kernels.linear(level, x, weight)
    for first, end in ((0, 1), (1, 3), (3, 9), (8, 9)):
        alone = _native.kernels.linear(level, x[first:end], weight)
        assert np.array_equal(alone, together[first:end])


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_gate_and_up_go_side_by_side(kind: str) -> None:
    rng = np.random.default_rng(5)
    gate, up = (random_blocks(kind, 40, 512, rng, 1e-4) for _ in range(2))
    x = inputs(3, 512)
    one = pack(kind, gate, up, gated=True, rounding="none")
    found = _native.kernels.linear(LEVELS[-1], x, one, activation="silu", out_dtype="fp32")
    g, u = (x.astype(np.float64) @ dequantize(kind, part).T for part in (gate, up))
    assert np.allclose(found, g / (1 + np.exp(-g)) * u, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_fp16_is_multiplied_as_it_is(level: str) -> None:
    rng = np.random.default_rng(6)
    weights = (1 + rng.uniform(0, 2**-9, (33, 96))).astype(np.float16)
    weight = _native.LinearWeight.pack([weights], format="fp16")
    assert np.array_equal(weight.unpack(), weights.astype(np.float32)), "bf16 would round it"
    x = rng.standard_normal((5, 96)).astype(np.float32)
    found = _native.kernels.linear(level, x, weight)
    assert np.allclose(found, x @ weights.astype(np.float32).T, rtol=1e-5, atol=1e-5)
    assert np.array_equal(_native.kernels.linear(level, x[2:3], weight), found[2:3])


@pytest.mark.parametrize(
    ("matrix", "settings", "words"),
    [
        (np.zeros((4, 145), np.uint8), {"format": "q4_k", "group_size": 16}, "blocks of 144"),
        (np.zeros((4, 144), np.uint8), {"format": "q4_k"}, "group size of blocks is 16"),
        (np.zeros((4, 64), np.float32), {"format": "fp16"}, "fp32 can't become fp16"),
    ],
)
def test_what_isnt_of_the_type_is_refused(
    matrix: npt.NDArray[np.generic], settings: dict[str, object], words: str
) -> None:
    with pytest.raises(_native.NativeError, match=words):
        _native.LinearWeight.pack([matrix], **settings)  # type: ignore[arg-type]
