"""What ``lmi explain`` says is kept of every stored format, beside what the loader keeps of it."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)
from safetensors.torch import load_file, save_file  # noqa: E402

from lmi_core.config.explain import main  # noqa: E402
from lmi_core.config.targets.host import Host  # noqa: E402
from lmi_core.models.found_model import FoundModel, find_model  # noqa: E402
from lmi_core.models.loader import load_weights  # noqa: E402
from lmi_core.ops.cpu import NativeWeights  # noqa: E402
from lmi_core.settings.engine_config import EngineConfig  # noqa: E402
from lmi_core.weights.formats import PackFormat  # noqa: E402
from lmi_core.weights.quantized.layout import FLOAT_DTYPES  # noqa: E402
from tests.fp8_checkpoints import make_fp8_checkpoint  # noqa: E402
from tests.integer_checkpoints import FORMS, OTHER_FORMS, make_integer_checkpoint, set_config  # noqa: E402
from tests.weights.checkpoint_fuzz import SOUND  # noqa: E402

ROWS = {
    "outliers": "rows of 8 bits, a row's largest numbers of 16",
    "int8": "rows of 8 bits",
    "none": "rows as they are",
    "llm_int8": "rows of 8 bits, but for inputs from 6 on",
}
UNROUNDED = ("fp32", "bf16", "fp16", "e4m3", "e5m2")
FP8_SCALES = "; scales of activations aren't used"
IN_CODES = [name for name in SOUND if not name.startswith("gguf-")]


class Recorder(NativeWeights):
    """Notes formats and rounding of what is packed of matrices that are stored in codes."""

    def __init__(self, found: FoundModel) -> None:
        super().__init__(activations=found.asked.activations)
        self.found = found
        self.packed_as: set[tuple[str, str]] = set()

    def pack(
        self, parts: Sequence[Any], *, names: Sequence[str] = (), format: PackFormat, **others: Any
    ) -> Any:
        weight = super().pack(parts, names=names, format=format, **others)
        if any(map(self._is_coded, names)):
            rounding = "none" if weight.format in UNROUNDED else weight.rounding
            self.packed_as.add((weight.format, rounding))
        return weight

    def _is_coded(self, name: str) -> bool:
        tensor = self.found.tensors.get(name)
        in_codes = tensor is not None and tensor.dtype not in FLOAT_DTYPES
        return in_codes or name in self.found.quantized


def explained(path: Path, *flags: str) -> str:
    """The line on weights."""
    out = io.StringIO()
    assert main([str(path), *flags], environ={}, host=Host(), out=out) == 0
    found = re.search(r"^  weights  (.*)$", out.getvalue(), re.MULTILINE)
    assert found is not None, out.getvalue()
    return found[1]


def loaded(path: Path, **settings: Any) -> set[tuple[str, str]]:
    found = find_model(EngineConfig(model=path, **settings))
    recorder = Recorder(found)
    load_weights(found, recorder)
    return recorder.packed_as


def named(format: str) -> str:
    """In explain's words."""
    if format in UNROUNDED[:3]:
        return f"widened to {format}"
    format = "fp8" if format in UNROUNDED else format
    return f"kept as {format if re.match('int|nf|fp', format) else format.upper()}"


def check(line: str, packed_as: set[tuple[str, str]]) -> None:
    words = {f"{named(format)}, multiplied with {ROWS[rows]}" for format, rows in packed_as}
    told = line.split(": ", 1)[1].removesuffix(FP8_SCALES)
    parts = re.sub(r"\d+ matrices ", "", told).split("; ")
    assert set(parts) == words, (line, packed_as)


@pytest.mark.parametrize("activations", ["auto", "bf16"])
@pytest.mark.parametrize("name", IN_CODES)
def test_explain_names_what_the_loader_keeps(name: str, activations: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    SOUND[name](path)
    line = explained(path, "-o", f"activations={activations}")
    packed_as = loaded(path, activations=activations)
    check(line, packed_as)


AS_THEY_ARE = f"multiplied with {ROWS['none']}"
OUTLIERS = f"multiplied with {ROWS['outliers']}"
LINES = {
    ("gptq-reordered", "cpu"): (
        f"GPTQ, 4 bits in groups of 32 with act-order: kept as int4, {OUTLIERS}"
    ),
    ("gptq-3", "cpu"): f"GPTQ, 3 bits in groups of 32: kept as Q4_0, {OUTLIERS}",
    ("awq", "torch-cpu"): f"AWQ, 4 bits in groups of 32: kept as int4, {AS_THEY_ARE}",
    ("kernels-marlin", "cpu"): f"Marlin, 4 bits in groups of 128: kept as int4, {OUTLIERS}",
    ("int8", "torch-cpu"): f"compressed-tensors, 8 bits: kept as int8, {OUTLIERS}",
    ("bitsandbytes-int8", "torch-cpu"): f"bitsandbytes int8: kept as int8, {OUTLIERS}",
    ("gpt-oss", "torch-cpu"): f"MXFP4: widened to fp32, {AS_THEY_ARE}",
    ("fp8-row", "torch-cpu"): "fp8: kept as fp8, multiplied with rows rounded to fp8",
    ("fp8-tensor", "torch-cpu"): (
        "fp8: kept as fp8, multiplied with rows rounded to fp8 by the checkpoint's scales"
    ),
    ("fp8-tensor", "cpu"): f"fp8: widened to bf16, {AS_THEY_ARE}{FP8_SCALES}",
    ("fp8-128", "cpu"): f"fp8: kept as fp8, {AS_THEY_ARE}",
}


@pytest.mark.parametrize(("name", "device"), LINES)
def test_the_line_names_format_groups_and_rows(name: str, device: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    if name == "fp8-128":
        make_fp8_checkpoint(path, "row", hidden_size=256, intermediate_size=384)
        check(LINES[name, device], loaded(path))
    else:
        SOUND[name](path)
    assert explained(path, "-o", f"device={device}") == LINES[name, device]


def test_layers_in_schemes_of_their_own_are_told_apart(tmp_path: Path) -> None:
    """In int8 with rows as their scheme has them, in Q8_0, and in fp8."""
    path, _ = make_integer_checkpoint(tmp_path / "model", FORMS["int8"])
    other, _ = make_integer_checkpoint(tmp_path / "other", OTHER_FORMS["packed-8-groups"][0])
    tensors = load_file(path / "model.safetensors")
    theirs = load_file(other / "model.safetensors")
    for name in [name for name in tensors if "down_proj" in name]:
        del tensors[name]
    tensors |= {name: each for name, each in theirs.items() if "down_proj" in name}
    layer = "model.layers.0.self_attn.o_proj.weight"
    tensors[layer] = tensors[layer].float().clamp(-16, 16).to(torch.float8_e4m3fn)
    save_file(tensors, path / "model.safetensors")
    rows = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    own, every = (
        each.config["config_groups"]["group_0"]
        for each in (OTHER_FORMS["packed-8-groups"][0], FORMS["int8"])
    )
    groups = {
        "group_0": {**every, "input_activations": rows, "format": "int-quantized"},
        "group_1": {**own, "targets": ["re:.*down_proj"], "format": "pack-quantized"},
        "group_2": {"targets": ["re:.*o_proj"], "weights": {"type": "float", "num_bits": 8}},
    }
    settings = {**FORMS["int8"].config, "format": "mixed-precision", "config_groups": groups}
    set_config(path, quantization_config=settings)
    line = explained(path)
    assert line.startswith("compressed-tensors, 8 bits and 8 bits in groups of 32: ")
    assert len(re.findall(r"\d+ matrices", line)) == 3
    check(line, loaded(path))


def test_a_checkpoint_that_is_quantised_anew_is_said_to_be(tmp_path: Path) -> None:
    SOUND["nvfp4"](tmp_path / "model")
    line = explained(tmp_path / "model", "--quantize", "int8")
    assert line == "NVFP4: quantised anew to int8 while it is loaded"
