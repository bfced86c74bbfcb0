"""Checkpoints in EXL2: 2 to 8 bits within a layer, read as the layout says, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("safetensors.torch")

from lmi_core.errors import ModelError  # noqa: E402
from lmi_core.models.found_model import find_model  # noqa: E402
from lmi_core.runners.cpu.memory_needs import estimate  # noqa: E402
from lmi_core.settings.engine_config import EngineConfig  # noqa: E402
from tests.exl2_checkpoints import coded, make_exl2_checkpoint  # noqa: E402
from tests.loading import load_model  # noqa: E402
from tests.models.forward import NativeForward, all_logits  # noqa: E402


def logits(path: Path) -> np.ndarray:
    forward = NativeForward(load_model(path, "fp32"), 64, "fp32")
    return all_logits(forward, [list(range(20, 60))], max_chunk=64)[0]


def test_weights_are_what_the_layout_says(tmp_path: Path) -> None:
    path = make_exl2_checkpoint(tmp_path)
    np.testing.assert_array_equal(logits(path), logits(tmp_path / "plain"))
    found, plain = (find_model(EngineConfig(model=each)) for each in (path, tmp_path / "plain"))
    assert "exl2 weights are widened" in " ".join(found.notes)
    needs = [estimate(f).weights for f in (found, plain)]
    assert needs[0] == needs[1]


GOOD, _ = coded((64, 96), 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_scale": None}, "missing: .*down_proj.q_scale"),
        ({"q_weight": GOOD["q_weight"].short()}, "q_weight is I16, must be I32"),
        ({"q_weight": GOOD["q_weight"][:, :32]}, r"q_weight is \[\d+, 32\], expected \[any, 64\]"),
        ({"q_invperm": GOOD["q_invperm"][:95]}, r"q_invperm is \[95\], expected \[96\]"),
        ({"q_invperm": GOOD["q_invperm"] * 0}, "q_invperm isn't an order of 96 inputs"),
        ({"q_groups": GOOD["q_groups"][:3]}, "q_groups has 3 numbers, which aren't pairs"),
        ({"q_groups": GOOD["q_groups"][:4]}, r"q_scale is \[3, 8\], expected \[2, 8\]"),
        ({"q_groups": GOOD["q_groups"] * 0 + 7}, "q_groups has a group of 7 bits"),
        ({"q_weight": GOOD["q_weight"][:-2]}, "q_groups"),
        ({"q_scale_max": GOOD["q_scale_max"] * float("inf")}, "q_scale_max holds a scale that isn"),
    ],
)
def test_faults_name_the_tensor(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(make_exl2_checkpoint(tmp_path, **changes))


def test_damaged_files_are_refused_or_read(tmp_path: Path) -> None:
    """Bytes changed anywhere and files cut off: one error that names the file, or a model."""
    path = make_exl2_checkpoint(tmp_path)
    file = path / "model.safetensors"
    original = file.read_bytes()
    random = np.random.default_rng(7)
    num_header_bytes = 8 + int.from_bytes(original[:8], "little")
    messages = []
    for trial in range(70):
        raw = bytearray(original)
        if trial % 7 == 0:
            raw = raw[: random.integers(0, len(raw))]
        elif trial % 2:
            at = random.integers(num_header_bytes, len(raw) - 4096)
            raw[at : at + 4096] = random.bytes(4096)
        else:
            for _ in range(random.integers(1, 4)):
                raw[random.integers(0, num_header_bytes)] = random.integers(256)
        file.write_bytes(raw)
        try:
            find_model(EngineConfig(model=path)).quantized.check()
        except ModelError as error:
            messages.append(str(error))
    assert len(messages) > 30
    assert all(str(path) in message for message in messages)
