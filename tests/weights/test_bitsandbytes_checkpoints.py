"""bitsandbytes' checkpoints: their codes and scales are kept, and explain and the loader agree."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors.torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from lmi_core import _native  # noqa: E402
from lmi_core.errors import ModelError  # noqa: E402
from lmi_core.models.found_model import find_model  # noqa: E402
from lmi_core.ops.cpu import NativeWeights  # noqa: E402
from lmi_core.ops.device.packed_weight import PackedWeight  # noqa: E402
from lmi_core.ops.device.torch_weights import DeviceWeights  # noqa: E402
from lmi_core.settings.engine_config import EngineConfig  # noqa: E402
from lmi_core.weights.float_code_matrix import to_float_codes  # noqa: E402
from lmi_core.weights.made_codes import to_eetq, to_int8  # noqa: E402
from tests.bitsandbytes_checkpoints import FORMS, Floats, make_bitsandbytes_checkpoint  # noqa: E402
from tests.checkpoints import cached_checkpoint  # noqa: E402
from tests.loading import load_model  # noqa: E402
from tests.models.forward import NativeForward, all_logits  # noqa: E402

QUERY = "model.layers.0.self_attn.q_proj."
STATE = QUERY + "weight.quant_state.bitsandbytes__nf4"


def down(path: Path, **settings: Any) -> Any:
    return load_model(path, **settings).weights.layers[1].down.weight


@pytest.mark.parametrize("form", FORMS)
def test_codes_and_scales_are_the_checkpoints(form: str, tmp_path: Path, caplog: Any) -> None:
    path, exact = make_bitsandbytes_checkpoint(tmp_path / "model", form)
    model = load_model(path)
    assert (model.dtype, model.quantize) == ("bf16", form.split()[0])
    assert not caplog.records
    layer, prefix = model.weights.layers[1], "model.layers.1."
    names = [f"{prefix}self_attn.{name}_proj.weight" for name in "qkv"]
    for linear, parts in ((layer.qkv, names), (layer.down, [f"{prefix}mlp.down_proj.weight"])):
        assert isinstance(linear.weight, _native.LinearWeight)
        assert linear.weight.format == form.split()[0]
        wanted = np.concatenate([exact[name] for name in parts])
        np.testing.assert_array_equal(linear.weight.unpack(), wanted)
    assert layer.down.weight.rounding == ("llm_int8" if form == "int8" else "outliers")
    rows = "llm_int8, summed over 0" if form == "int8" else "outliers, summed over 16"
    assert layer.down.weight.row_format == rows


@pytest.mark.parametrize("form", FORMS)
def test_matrices_of_gpt2_are_stored_as_those_of_others(form: str, tmp_path: Path) -> None:
    path, exact = make_bitsandbytes_checkpoint(tmp_path / "model", form, "gpt2", n_inner=128)
    layer = load_model(path).weights.layers[1]
    for linear, name in ((layer.qkv, "attn.c_attn"), (layer.down, "mlp.c_proj")):
        assert isinstance(linear.weight, _native.LinearWeight)
        assert linear.weight.format == form.split()[0]
        wanted = exact[f"transformer.h.1.{name}.weight"]
        np.testing.assert_array_equal(linear.weight.unpack(), wanted)


def test_scales_across_rows_are_read(tmp_path: Path) -> None:
    path, exact = make_bitsandbytes_checkpoint(tmp_path / "model", "nf4", intermediate_size=96)
    model = load_model(path, "fp32")
    weight = model.weights.layers[1].down.weight
    assert weight.format == "fp32", "rows of 96 aren't of whole blocks"
    np.testing.assert_array_equal(weight.unpack(), exact["model.layers.1.mlp.down_proj.weight"])
    assert model.weights.layers[1].qkv.weight.format == "nf4"


@pytest.mark.parametrize(
    ("form", "activations", "most"),
    [("nf4", "bf16", 1e-5), ("nf4", "auto", 0.05), ("int8", "auto", 0.05)],
)
def test_logits_are_those_of_the_weights(
    form: str, activations: Any, most: float, tmp_path: Path
) -> None:
    path, exact = make_bitsandbytes_checkpoint(tmp_path / "model", form)
    dense, _ = make_bitsandbytes_checkpoint(tmp_path / "dense", form)
    tensors = {n: t for n, t in load_file(dense / "model.safetensors").items() if "proj" not in n}
    tensors |= {name: torch.from_numpy(matrix) for name, matrix in exact.items()}
    save_file(tensors, dense / "model.safetensors")
    config = json.loads((dense / "config.json").read_text())
    del config["quantization_config"]
    (dense / "config.json").write_text(json.dumps(config))
    sequences = [list(range(5, 60)), [7, 300, 12]]
    found, wanted = (
        np.concatenate(all_logits(NativeForward(model, 128, "fp32"), sequences, 48))
        for model in (
            load_model(path, "fp32", packer=NativeWeights(activations=activations)),
            load_model(dense, "fp32"),
        )
    )
    assert np.abs(found - wanted).max() < most * np.abs(wanted).max()


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_torch_devices_read_the_same_weights(form: str, tmp_path: Path) -> None:
    path, exact = make_bitsandbytes_checkpoint(tmp_path / "model", form)
    weight = down(path, dtype="fp32", packer=DeviceWeights(torch.device("cpu")))
    matrix = weight.unpack() if isinstance(weight, PackedWeight) else weight.matrix
    np.testing.assert_array_equal(matrix.numpy(), exact["model.layers.1.mlp.down_proj.weight"])


def edited(path: Path, name: str, change: Callable[[Any], Any]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = change(tensors[name])
    save_file({n: t for n, t in tensors.items() if t is not None}, file)


@pytest.mark.parametrize(
    ("form", "name", "change", "words"),
    [
        ("nf4", STATE, lambda t: t[:-1], "bitsandbytes__nf4 holds no JSON object; it is damaged"),
        ("nf4", STATE, lambda t: None, "missing: .*bitsandbytes__nf4"),
        (
            "nf4",
            STATE,
            lambda t: torch.tensor([*bytes(t.tolist()).replace(b": 64", b": 32")]).byte(),
            "says blocksize 32; 64 can be read",
        ),
        ("nf4", QUERY + "weight.absmax", lambda t: t * torch.inf, "a scale that isn't finite"),
        ("nf4", QUERY + "weight.absmax", lambda t: t[1:], r"absmax is \[63\], expected \[64\]"),
        ("nf4", QUERY + "weight.quant_map", lambda t: t * 2, "quant_map isn't that of nf4"),
        (
            "nf4 twice",
            QUERY + "weight.nested_absmax",
            lambda t: None,
            "there is no .*nested_absmax",
        ),
        (
            "int8",
            QUERY + "SCB",
            lambda t: t * torch.nan,
            "SCB holds a scale that isn't finite",
        ),
    ],
)
def test_damage_is_named(
    form: str, name: str, change: Callable[[Any], Any], words: str, tmp_path: Path
) -> None:
    path, _ = make_bitsandbytes_checkpoint(tmp_path / "model", form)
    edited(path, name, change)
    with pytest.raises(ModelError, match=words):
        find_model(EngineConfig(model=path)).quantized.check()
    with pytest.raises(ModelError, match=words):
        load_model(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type is 'int4'; nf4, fp4 can be read"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "quant_storage is 'bfloat16'; uint8 can be read"),
        ({"load_in_4bit": False}, "load_in_4bit is false, and so is load_in_8bit"),
        (
            {"load_in_4bit": False, "load_in_8bit": True, "llm_int8_threshold": 3.0},
            "llm_int8_threshold is 3.0; 6.0, and 0 can be computed",
        ),
    ],
)
def test_settings_that_cant_be_read_are_named(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path, _ = make_bitsandbytes_checkpoint(tmp_path / "model", "nf4")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= change
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=words):
        find_model(EngineConfig(model=path))


@pytest.mark.parametrize("form", ["nf4 twice", "int8"])
def test_corrupted_files_are_read_or_refused(form: str, tmp_path: Path) -> None:
    """A hundred files with bytes of the header or of tensors changed."""
    path, _ = make_bitsandbytes_checkpoint(tmp_path / "model", form, num_hidden_layers=1)
    file, rng = path / "model.safetensors", np.random.default_rng(0)
    original = file.read_bytes()
    num_header_bytes = 8 + int.from_bytes(original[:8], "little")
    refusals = []
    for _ in range(100):
        raw = bytearray(original)
        end = num_header_bytes if rng.integers(0, 2) else len(raw)
        raw[int(rng.integers(0, end))] = rng.integers(0, 256)
        if rng.integers(0, 10) == 0:
            del raw[int(rng.integers(0, len(raw))) :]
        file.write_bytes(raw)
        try:
            find_model(EngineConfig(model=path)).quantized.check()
            load_model(path)
        except ModelError as error:
            refusals.append(str(error))
    assert 30 < len(refusals) < 100
    assert all(str(path) in text for text in refusals)


@pytest.mark.parametrize(
    ("settings", "is_told"),
    [
        ({"quantize": "fp8", "activations": "int8"}, True),
        ({"quantize": "fp8"}, False),
        ({"quantize": "bitsandbytes-nf4", "activations": "int8"}, False),
        ({"quantize": "eetq", "activations": "int8"}, False),
    ],
)
def test_activations_that_change_nothing_are_told(settings: Any, is_told: bool) -> None:
    notes = find_model(EngineConfig(model=cached_checkpoint("llama2"), **settings)).notes
    assert any("activations=int8 changes nothing" in note for note in notes) == is_told


def plain_down() -> Floats:
    tensors = load_file(cached_checkpoint("llama2") / "model.safetensors")
    return tensors["model.layers.1.mlp.down_proj.weight"].float().numpy()


@pytest.mark.parametrize(
    ("asked", "make"),
    [
        ("bitsandbytes", partial(to_int8, rounding="llm_int8")),
        ("eetq", to_eetq),
        ("bitsandbytes-nf4", lambda floats: to_float_codes(floats, "nf4")),
        ("bitsandbytes-fp4", lambda floats: to_float_codes(floats, "fp4")),
    ],
)
def test_weights_are_quantised_at_load(asked: Any, make: Callable[[Floats], Any]) -> None:
    path = cached_checkpoint("llama2")
    weight = down(path, dtype="fp32", quantize=asked)
    wanted = make(plain_down()).to_float32()
    np.testing.assert_array_equal(weight.unpack(), wanted)
    if asked in ("bitsandbytes", "eetq"):
        assert weight.rounding == ("none" if asked == "eetq" else "llm_int8")
        device = DeviceWeights(torch.device("cpu"))
        other = down(path, dtype="fp32", quantize=asked, packer=device)
        np.testing.assert_array_equal(other.unpack(), wanted)


def test_codes_of_eight_bits_are_the_libraries() -> None:
    weights = np.array([[0.5, -1.0, 0.996, 0.25], [0, 0, 0, 0]], np.float32)
    bnb, eetq = to_int8(weights, "llm_int8").unpack(), to_eetq(weights).unpack()
    assert (bnb.codes.astype(int) - 128)[0].tolist() == [64, -127, 126, 32]
    assert (eetq.codes.astype(int) - 128)[0].tolist() == [64, -128, 127, 32]
    assert bnb.scales[:, 0].tolist() == [np.float32(1 / 127), 0]
    assert eetq.scales[:, 0].tolist() == [2**-7, 0]


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes")
@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_bitsandbytes_itself_gives_these_codes(format: Any) -> None:
    from bitsandbytes import functional

    weights = np.random.default_rng(0).standard_normal((48, 192)).astype(np.float32)
    packed, state = functional.quantize_4bit(torch.from_numpy(weights), quant_type=format)
    codes, scales = to_float_codes(weights, format).unpack()
    assert np.array_equal(packed.numpy().ravel(), codes)
    assert np.array_equal(state.absmax.numpy(), scales)
    found = functional.dequantize_4bit(packed, state).numpy()
    assert np.array_equal(found, to_float_codes(weights, format).to_float32())


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes")
def test_a_row_of_llm_int8_is_bitsandbytes_own() -> None:
    from bitsandbytes import functional

    random = np.random.default_rng(1)
    weights, x = (
        random.standard_normal(shape).astype(np.float16).astype(np.float32)
        for shape in ((48, 128), (3, 128))
    )
    x[1, 5], x[2, 7:20] = 40, -9
    codes, scales, _ = functional.int8_vectorwise_quant(torch.from_numpy(weights).half())
    made = to_int8(weights, "llm_int8")
    assert np.array_equal(codes.numpy(), made.unpack().codes.astype(np.int16) - 128)
    ours = _native.LinearWeight.pack([made.packable(0)], format="int8", rounding="llm_int8")
    level = _native.instruction_sets()[-1]
    for row in x:
        half = torch.from_numpy(row[None]).half()
        rounded, row_scales, columns = functional.int8_vectorwise_quant(half, threshold=6.0)
        stored = _native.kernels.quantize_rows(level, row[None], group_size=0, rounding="llm_int8")
        assert np.array_equal(stored[0, :128].view(np.int8), rounded.numpy()[0])
        theirs = torch.ops.bitsandbytes.int8_mixed_scaled_mm(
            half, rounded, codes, row_scales, scales, columns, None
        )
        theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).float().numpy()
        found = _native.kernels.linear(level, row[None], ours)
        assert np.abs(found - theirs).max() < 6e-4 * np.abs(theirs).max(), "theirs is fp16"


def test_explain_says_what_is_multiplied_how(tmp_path: Path, capsys: Any) -> None:
    from lmi_core.cli import main

    for form, words in (
        ("nf4", "bitsandbytes nf4: kept as nf4, multiplied with rows of 8 bits"),
        ("int8", "multiplied with rows of 8 bits, but for inputs from 6 on"),
    ):
        path, _ = make_bitsandbytes_checkpoint(tmp_path / form, form)
        assert main(["explain", str(path)]) == 0
        assert words in " ".join(capsys.readouterr().out.split())
