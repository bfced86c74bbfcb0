"""Checkpoints in integers that can't be read, or not as they are: every fault by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)
safetensors_torch = pytest.importorskip("safetensors.torch")

from lmi_core import _native  # noqa: E402
from lmi_core.errors import ModelError  # noqa: E402
from tests.integer_checkpoints import (  # noqa: E402
    AWQ,
    FORMS,
    GPTQ,
    Form,
    compressed,
    make_integer_checkpoint,
    set_config,
    write_awq,
    write_gptq,
    write_int8,
)
from tests.loading import load_model  # noqa: E402

LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint with some tensors of a layer replaced (None: removed), and other settings."""

    def edit(form: str | Form, settings: Any = None, **changes: Any) -> Path:
        form = FORMS[form] if isinstance(form, str) else form
        path, _ = make_integer_checkpoint(tmp_path / "model", form, num_hidden_layers=1)
        file = path / "model.safetensors"
        tensors = {**safetensors_torch.load_file(file)}
        for suffix, tensor in changes.items():
            tensors[f"{LAYER}.{suffix}"] = tensor
        safetensors_torch.save_file({n: t for n, t in tensors.items() if t is not None}, file)
        if settings is not None:
            set_config(path, quantization_config=settings)
        return path

    return edit


def half(*shape: int) -> Any:
    return torch.ones(*shape, dtype=torch.float16)


def ints(*shape: int) -> Any:
    return torch.zeros(*shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("awq", {"qzeros": None}, r"missing: .*q_proj.qzeros \[2, 8\]"),
        ("awq", {"qweight": None}, r"missing: .*q_proj.qweight \[64, 8\]"),
        ("awq", {"scales": None}, r"missing: .*q_proj.scales \[2, 64\]"),
        ("awq", {"qweight": ints(8, 64)}, r"wrong shape: .* is \[8, 64\], expected \[64, 8\]"),
        ("awq", {"scales": half(1, 64)}, r"scales is \[1, 64\], expected \[2, 64\]"),
        ("awq", {"scales": ints(2, 64)}, "scales is I32, must be F16 or BF16 or F32"),
        ("awq", {"qweight": half(64, 8)}, "qweight is F16, must be I32"),
        ("awq", {"g_idx": ints(64)}, "unexpected: .*q_proj.g_idx"),
        ("awq", {"bias": half(64)}, "q_proj.bias isn't zero, but the layers of this model have no"),
        ("gptq", {"qweight": ints(64, 8)}, r"wrong shape: .* is \[64, 8\], expected \[8, 64\]"),
        ("gptq", {"qzeros": ints(2, 7)}, r"qzeros is \[2, 7\], expected \[2, 8\]"),
        ("gptq", {"g_idx": ints(63)}, r"g_idx is \[63\], expected \[64\]"),
        ("gptq", {"g_idx": ints(64) + 2}, "g_idx names group 2; there are 2"),
        ("gptq", {"g_idx": ints(64) - 1}, "g_idx names group -1; there are 2"),
        ("gptq", {"scales": half(2, 64) * float("inf")}, "holds a scale that isn't finite"),
        ("gptq", {"scales": torch.full((2, 64), 1e6)}, "q_proj.scales holds a scale over 65504"),
        ("packed", {"weight_zero_point": None}, r"missing: .*weight_zero_point \[8, 2\]"),
        ("packed", {"weight_shape": torch.tensor([64, 63])}, r"is \[64, 63\], expected \[64, 64\]"),
        ("packed", {"weight_packed": None, "weight_shape": None}, "missing: .*q_proj.weight "),
        ("int8", {"weight_scale": None}, r"missing: .*q_proj.weight_scale \[64, 1\]"),
    ],
)
def test_faults_name_the_tensor(
    edited: Callable[..., Path], form: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(edited(form, **changes))


@pytest.mark.parametrize(
    ("form", "settings", "message"),
    [
        ("awq", {**AWQ, "bits": 8}, "quantization_config.bits is 8; AWQ checkpoints of 4 bits"),
        ("awq", {**AWQ, "group_size": "32"}, "group_size is '32', but must be an integer"),
        ("awq", {**AWQ, "group_size": 0}, "group_size is 0, but must be an integer >= 1"),
        ("gptq", {**GPTQ, "bits": 5}, "bits is 5; 2, 3, 4, 8 can be read"),
        ("gptq", {**GPTQ, "checkpoint_format": "odd"}, "is 'odd'; gptq, gptq_v2, marlin can be"),
        ("gptq", {**GPTQ, "desc_act": 1}, "desc_act is 1, but must be true or false"),
        ("gptq", {**GPTQ, "group_size": 64}, r"scales is \[2, 64\], expected \[1, 64\]"),
        ("packed", compressed("marlin-24", 4), "is 'marlin-24'; in integers"),
        ("packed", {"quant_method": "modelopt", "quant_algo": "W4A8"}, "is 'W4A8'; FP8 and NVFP4"),
        ("packed", compressed("pack-quantized", 3), "weights.num_bits is 3; 4 and 8 can be read"),
        (
            "packed",
            compressed("pack-quantized", 4, type="float"),
            "type is 'float'; beside",
        ),
        ("packed", compressed("pack-quantized", 4, strategy="block"), "strategy is 'block'; group"),
        ("packed", {"quant_method": "compressed-tensors"}, "config_groups is missing"),
        (
            "packed",
            compressed("pack-quantized", 4) | {"transform_config": {"config_groups": {"R1": {}}}},
            "transform_config has transforms of activations",
        ),
        (
            "packed",
            compressed("pack-quantized", 4, group_size=32, symmetric=False, actorder="odd"),
            "weights.actorder is 'odd'; None, False, weight, static, True, group, dynamic can be",
        ),
        (
            "gptq",
            {**GPTQ, "dynamic": {r"-:.*lm_head": {}, "(": {"bits": 8, "sym": True}}},
            r"dynamic\['\('\] isn't a pattern",
        ),
        (
            "gptq",
            {**GPTQ, "dynamic": {".*down.*": {"bits": 7}}},
            r"dynamic\['\.\*down\.\*'\]\.bits is 7; 2, 3, 4, 8 can be read",
        ),
    ],
)
def test_faults_name_the_setting(
    edited: Callable[..., Path], form: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(edited(form, settings))


def test_a_truncated_file_is_damaged(edited: Callable[..., Path]) -> None:
    file = edited("awq") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="the file is damaged"):
        load_model(file.parent)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_zero_biases_of_layers_without_are_left_out(
    edited: Callable[..., Path], dtype: Any
) -> None:
    model = load_model(edited("gptq", bias=torch.zeros(64, dtype=dtype)))
    assert model.weights.layers[0].qkv.bias is None


@pytest.mark.parametrize("form", ["awq", "int8"])
def test_parts_in_several_formats_are_widened(
    edited: Callable[..., Path], form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A layer that is left in 16 bits, beside others that go into the same product."""
    matrix = torch.randn(64, 64).half()
    removed = dict.fromkeys(("qweight", "qzeros", "scales", "weight_scale"))
    path = edited(form, **{**removed, "weight": matrix})
    layer = load_model(path, "fp32").weights.layers[0]
    assert isinstance(layer.qkv.weight, _native.LinearWeight)
    assert isinstance(layer.down.weight, _native.LinearWeight)
    assert layer.qkv.weight.format == "fp32"
    assert layer.down.weight.format == f"int{FORMS[form].num_bits}"
    np.testing.assert_array_equal(layer.qkv.weight.unpack()[:64], matrix.float().numpy())
    assert "quantised in part or in different ways: they are held as fp32" in caplog.text


def test_layers_may_be_left_out(tmp_path: Path) -> None:
    """Named by modules_to_not_convert, and in 16 bits."""
    path, _ = make_integer_checkpoint(tmp_path / "model", FORMS["awq"])
    dense, _ = make_integer_checkpoint(tmp_path / "other", replace(FORMS["awq"], write=_plain))
    tensors = safetensors_torch.load_file(path / "model.safetensors")
    plain = safetensors_torch.load_file(dense / "model.safetensors")
    layer = "model.layers.1.mlp.down_proj"
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(layer)}
    kept[f"{layer}.weight"] = plain[f"{layer}.weight"]
    safetensors_torch.save_file(kept, path / "model.safetensors")
    set_config(path, quantization_config={**AWQ, "modules_to_not_convert": ["1.mlp.down_proj"]})
    layers = load_model(path).weights.layers
    formats = [layer.down.weight.format for layer in layers]  # type: ignore[attr-defined]
    assert formats == ["int4", "bf16", "int4"]


def _plain(coded: Any) -> dict[str, Any]:
    return {"weight": torch.from_numpy(coded.matrix).half()}


def test_a_head_may_be_in_integers(tmp_path: Path) -> None:
    path, coded = make_integer_checkpoint(tmp_path / "model", FORMS["gptq"])
    tensors = {**safetensors_torch.load_file(path / "model.safetensors")}
    tensors.pop("lm_head.weight")
    source = coded["model.layers.0.mlp.gate_proj.weight"]
    head = replace(source, codes=np.tile(source.codes, (4, 1)))
    head = replace(head, scales=np.tile(head.scales, (4, 1)), zeros=np.tile(head.zeros, (4, 1)))
    written = write_gptq(head)
    tensors |= {f"lm_head.{suffix}": part.contiguous() for suffix, part in written.items()}
    safetensors_torch.save_file(tensors, path / "model.safetensors")
    weight = load_model(path).weights.head.weight
    assert isinstance(weight, _native.LinearWeight)
    assert weight.format == "int4"
    np.testing.assert_array_equal(weight.unpack(), head.matrix)


def test_scales_that_fp16_cannot_hold_are_rounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(coded: Any) -> dict[str, Any]:
        return write_gptq(coded, dtype=torch.float32)

    form = replace(FORMS["gptq"], write=write, scale_dtype=torch.float32)
    path, coded = make_integer_checkpoint(tmp_path / "model", form)
    model = load_model(path)
    assert "scales of the checkpoint's int4 weights are rounded to fp16: they change" in caplog.text
    weight = model.weights.layers[0].down.weight
    assert isinstance(weight, _native.LinearWeight)
    exact = coded["model.layers.0.mlp.down_proj.weight"].matrix
    np.testing.assert_allclose(weight.unpack(), exact, rtol=2**-11)


def test_schemes_of_several_layers(tmp_path: Path) -> None:
    """Down projections in int8 by a target of their own, the others in packed int4."""
    eight = compressed("int-quantized", 8, strategy="channel")["config_groups"]["group_0"]
    settings = compressed("mixed-precision", 4)
    four = compressed("pack-quantized", 4, group_size=32)["config_groups"]["group_0"]
    settings["config_groups"] = {
        "group_0": {**four, "format": "pack-quantized"},
        "group_1": {**eight, "format": "int-quantized", "targets": ["re:.*down_proj$"]},
    }
    path, coded = make_integer_checkpoint(tmp_path / "model", FORMS["packed-symmetric"])
    other, more = make_integer_checkpoint(tmp_path / "other", FORMS["int8"])
    tensors = {
        **{n: t for n, t in _load(path).items() if "down_proj" not in n},
        **{n: t for n, t in _load(other).items() if "down_proj" in n},
    }
    safetensors_torch.save_file(tensors, path / "model.safetensors")
    set_config(path, quantization_config=settings)
    layer = load_model(path).weights.layers[0]
    for name, weight, source in (
        ("mlp.down_proj", layer.down.weight, more),
        ("self_attn.o_proj", layer.attention_output.weight, coded),
    ):
        assert isinstance(weight, _native.LinearWeight)
        exact = source[f"model.layers.0.{name}.weight"].matrix
        np.testing.assert_array_equal(weight.unpack(), exact)


def test_a_scheme_may_be_in_fp8_beside_integers(tmp_path: Path) -> None:
    settings = compressed("mixed-precision", 4)
    four = compressed("pack-quantized", 4, group_size=32)["config_groups"]["group_0"]
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    settings["config_groups"] = {
        "group_0": {**four, "format": "pack-quantized"},
        "group_1": {
            "weights": weights, "format": "float-quantized", "targets": ["re:.*down_proj$"]
        },
    }  # fmt: skip
    path, _ = make_integer_checkpoint(tmp_path / "model", FORMS["packed-symmetric"])
    tensors, exact = _load(path), {}
    for layer_id in range(3):
        name = f"model.layers.{layer_id}.mlp.down_proj"
        shape = [*tensors[f"{name}.weight_shape"].tolist()]
        codes = torch.randn(shape).to(torch.float8_e4m3fn)
        scales = torch.rand(shape[0], 1) * 0.1
        tensors = {n: t for n, t in tensors.items() if not n.startswith(f"{name}.")}
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": scales}
        exact[layer_id] = (codes.float() * scales).numpy()
    safetensors_torch.save_file(tensors, path / "model.safetensors")
    set_config(path, quantization_config=settings)
    for layer_id, layer in enumerate(load_model(path, "fp32").weights.layers):
        assert isinstance(layer.down.weight, _native.LinearWeight)
        np.testing.assert_array_equal(layer.down.weight.unpack(), exact[layer_id])
        assert layer.attention_output.weight.format == "int4"


def _load(path: Path) -> dict[str, Any]:
    return dict(safetensors_torch.load_file(path / "model.safetensors"))


@pytest.mark.parametrize(
    ("form", "weights"),
    [
        ("packed-symmetric", {"num_bits": 4, "group_size": 32}),
        ("packed-8", {"num_bits": 8, "group_size": -1, "type": "int", "actorder": "weight"}),
        ("int8", {"num_bits": 8, "group_size": None, "strategy": "channel", "dynamic": False}),
    ],
)
def test_schemes_may_say_less(
    edited: Callable[..., Path], form: str, weights: dict[str, Any]
) -> None:
    settings = FORMS[form].config | {"config_groups": {"group_0": {"weights": weights}}}
    assert load_model(edited(form, settings)).quantize == f"int{FORMS[form].num_bits}"


@pytest.mark.parametrize("form", ["packed-symmetric", "int8"])
def test_static_activations_are_not_read(edited: Callable[..., Path], form: str) -> None:
    path = edited(form, input_scale=torch.tensor(0.1), input_zero_point=torch.tensor(3).char())
    load_model(path)


def test_no_library_writes_awq_without_zero_points(edited: Callable[..., Path]) -> None:
    form = Form(
        {**AWQ, "zero_point": False},
        lambda coded: {n: t for n, t in write_awq(coded).items() if n != "qzeros"},
        is_symmetric=True,
    )
    with pytest.raises(ModelError, match=r"missing: .*q_proj\.qzeros"):
        load_model(edited(form))


def test_layers_that_dynamic_leaves_in_floats_are_read_so(edited: Callable[..., Path]) -> None:
    settings = {**GPTQ, "dynamic": {r"-:.*lm_head": {"bits": 8}, ".*": {"damp_percent": 0.1}}}
    assert load_model(edited("gptq", settings)).quantize == "int4"


@pytest.mark.parametrize(
    ("group_size", "kept"), [(32, 32), (64, 64), (128, 128), (96, 32), (256, 128), (None, 128)]
)
def test_group_sizes(tmp_path: Path, group_size: int | None, kept: int) -> None:
    settings = {**GPTQ, "group_size": group_size or -1}
    form = Form(settings, write_gptq, group_size=group_size)
    path, coded = make_integer_checkpoint(
        tmp_path / "model", form, num_hidden_layers=1, hidden_size=256, intermediate_size=416
    )
    weight = load_model(path).weights.layers[0].down.weight
    assert isinstance(weight, _native.LinearWeight)
    assert weight.group_size == kept
    exact = coded["model.layers.0.mlp.down_proj.weight"].matrix
    np.testing.assert_array_equal(weight.unpack(), exact)


def test_numbers_that_four_bits_cannot_hold_are_damage(edited: Callable[..., Path]) -> None:
    form = Form(
        compressed("int-quantized", 4, strategy="channel"),
        write_int8,
        num_bits=8,
        group_size=None,
        is_symmetric=True,
    )
    with pytest.raises(ModelError, match="weight holds numbers outside -8 to 7"):
        load_model(edited(form))
