"""Mutated checkpoints of quantised formats: read, or refused by one error that names the place.

``python -m tests.weights.checkpoint_fuzz --files 10000`` for ``make fuzz``: so many of each format,
of which what isn't refused by headers and settings is loaded.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lmi_core.errors import ModelError
from lmi_core.models.loader import find_model, load_weights
from lmi_core.ops.cpu import NativeWeights
from lmi_core.settings.engine_config import EngineConfig
from tests.bitsandbytes_checkpoints import make_bitsandbytes_checkpoint
from tests.exl2_checkpoints import make_exl2_checkpoint
from tests.fp8_checkpoints import make_fp8_checkpoint
from tests.integer_checkpoints import FORMS, OTHER_FORMS, make_integer_checkpoint
from tests.weights.test_fp4_checkpoints import make as make_fp4_checkpoint

Make = Callable[[Path], object]
_INTEGERS = {
    name: FORMS[name] if name in FORMS else OTHER_FORMS[name][0]
    for name in ("awq", "int8", "packed-reordered", "gptq-reordered", "gptq-3", "gptq-8-groups")
}
SOUND: dict[str, Make] = {
    **{
        name: lambda path, form=form: make_integer_checkpoint(path, form)  # type: ignore[misc]
        for name, form in _INTEGERS.items()
    },
    **{
        name: lambda path, form=name: make_fp4_checkpoint(path.parent / "made", form).rename(path)  # type: ignore[misc]
        for name in ("nvfp4", "mxfp4", "modelopt")
    },
    "nf4": lambda path: make_bitsandbytes_checkpoint(path, "nf4 twice"),
    "fp8": lambda path: make_fp8_checkpoint(path, "block"),
    "exl2": lambda path: make_exl2_checkpoint(path.parent / "made").rename(path),
}


def mutate_and_read(path: Path, count: int, seed: int, *, loads: bool) -> int:
    """Change ``count`` copies of a checkpoint and read them; how many were refused. ``loads``: also
    their weights."""
    rng = np.random.default_rng(seed)
    files = {file: file.read_bytes() for file in (path / "model.safetensors", path / "config.json")}
    weights, settings = files
    num_refused = 0
    for trial in range(count):
        if trial % 5 == 0:
            settings.write_bytes(_other_settings(files[settings], rng))
        else:
            weights.write_bytes(_mutated(files[weights], rng))
        message = ""
        try:
            _read(path, loads=loads)
        except ModelError as error:
            message = str(error)
        assert not message or str(path) in message or "model.layers" in message, message
        num_refused += bool(message)
        settings.write_bytes(files[settings])
        weights.write_bytes(files[weights])
    return num_refused


def _mutated(original: bytes, rng: np.random.Generator) -> bytes:
    """Its header, or anything; or cut off."""
    raw = bytearray(original)
    if rng.integers(0, 8) == 0:
        return bytes(raw[: int(rng.integers(0, len(raw)))])
    num_header_bytes = 8 + int.from_bytes(original[:8], "little")
    most = num_header_bytes if rng.integers(0, 4) else len(raw)
    for _ in range(rng.integers(1, 4)):
        raw[int(rng.integers(0, most))] = rng.integers(256)
    return bytes(raw)


def _other_settings(original: bytes, rng: np.random.Generator) -> bytes:
    """One of the quantisation's settings is another."""
    config = json.loads(original)
    values = config["quantization_config"]
    if isinstance(groups := values.get("config_groups"), dict) and rng.integers(0, 2):
        values = groups["group_0"].get("weights", values)
    others = (None, -1, 0, 1, 3, 64, 10**12, 0.5, "", "group", "4", [], {}, True, False)
    values[str(rng.choice([*values]))] = others[rng.integers(0, len(others))]
    return json.dumps(config).encode()


def _read(path: Path, *, loads: bool) -> None:
    config = EngineConfig(model=path)
    found = find_model(config)
    found.quantized.check()
    if loads:
        load_weights(found, NativeWeights())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    for name, make in SOUND.items():
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model"
            make(path)
            refused = mutate_and_read(path, arguments.files, arguments.seed, loads=True)
        print(f"{arguments.files} mutated checkpoints in {name}: {refused} refused, others read")


if __name__ == "__main__":
    main()
