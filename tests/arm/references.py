"""Checkpoints and logits for ``emulated.py``, made where torch is.

``python -m tests.arm.references DIRECTORY``; what is there already is kept.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

PARITY = ("llama3", "mistral", "qwen3")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
NUM_SEQUENCES = 4


def main(directory: Path) -> None:
    os.environ["LMI_TEST_CHECKPOINTS"] = str(directory)
    from tests.checkpoints import cached_checkpoint
    from tests.models.test_parity import greedy_sequences, oracle_logits, oracle_model

    directory.mkdir(parents=True, exist_ok=True)
    for variant in PARITY:
        for dtype in DTYPES.values():
            cached_checkpoint(variant, dtype=dtype)
        target = directory / f"{variant}.npz"
        if target.exists():
            continue
        sequences = [list(ids) for ids in greedy_sequences(variant)[:NUM_SEQUENCES]]
        arrays = {f"ids{i}": np.array(ids, np.int32) for i, ids in enumerate(sequences)}
        for name, dtype in DTYPES.items():
            for kind in {"float64", dtype}:
                logits = oracle_logits(oracle_model(variant, dtype, kind), sequences)
                which = "exact" if kind == "float64" else "theirs"
                arrays[f"{which}_{name}"] = np.concatenate(logits)
        np.savez(target, **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
