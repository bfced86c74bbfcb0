"""What tests hold GGUF's blocks against is what the gguf package reads of them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.block_reference import dequantize
from tests.gguf_files import BLOCKS, TYPE_IDS, random_blocks

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("kind", BLOCKS)
def test_weights_are_the_packages(kind: str) -> None:
    blocks = random_blocks(kind, 7, 1024, np.random.default_rng(3))
    wanted = gguf.dequantize(blocks, gguf.GGMLQuantizationType(TYPE_IDS[kind]))
    np.testing.assert_array_equal(dequantize(kind, blocks), wanted)
