"""The engine's promises on an emulated processor: logits near those of Transformers on every level,
and bits that don't depend on company on the best one. ``references.py`` made what it reads.

Not collected with the other tests, which ask the same of the machine they run on and more.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmi_core import _native
from tests.arm.references import DTYPES, NUM_SEQUENCES, PARITY
from tests.checkpoints import cached_checkpoint
from tests.engine import test_invariance
from tests.loading import load_model
from tests.models.forward import NativeForward, all_logits

MAX_MODEL_LEN = 512


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


@pytest.mark.parametrize("level", _native.instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", PARITY)
def test_logits(variant: str, dtype: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMI_INSTRUCTION_SET", level)
    references = np.load(Path(os.environ["LMI_TEST_CHECKPOINTS"]) / f"{variant}.npz")
    sequences = [references[f"ids{i}"].tolist() for i in range(NUM_SEQUENCES)]
    model = load_model(cached_checkpoint(variant, dtype=DTYPES[dtype]), dtype)  # type: ignore[arg-type]
    forward = NativeForward(model, MAX_MODEL_LEN, dtype)
    logits = np.concatenate(all_logits(forward, sequences, max_chunk=48))
    exact, theirs = references[f"exact_{dtype}"], references[f"theirs_{dtype}"]
    if dtype == "fp32":
        assert np.abs(logits - exact).max() <= 1e-4 * exact.std()
    else:
        assert rms(logits - exact) <= 1.5 * rms(theirs - exact)


@pytest.mark.parametrize(
    "case",
    [
        ("llama3", "bf16", None, "auto"),
        ("llama3", "bf16", "int8", "auto"),
        ("qwen3", "bf16", "int4", "int8"),
        ("mistral", "fp32", None, "auto"),
    ],
)
def test_bits_do_not_depend_on_company(
    case: tuple[str, str, str | None, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_invariance, "NUM_REQUESTS", 8)
    for seed, name in enumerate(("two threads", "chunks of 7")):
        changes = test_invariance.CONDITIONS[name]
        test_invariance.assert_same(case, name, seed, **changes)
