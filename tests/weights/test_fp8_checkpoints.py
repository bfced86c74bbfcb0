"""fp8 checkpoints: kept as they are on torch devices, widened or quantised anew elsewhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)
safetensors_torch = pytest.importorskip("safetensors.torch")

from lmi_core import _native  # noqa: E402
from lmi_core.calibration.layer_runs import LayerRuns  # noqa: E402
from lmi_core.config.table.capabilities import BACKENDS  # noqa: E402
from lmi_core.errors import ModelError  # noqa: E402
from lmi_core.models.found_model import find_model  # noqa: E402
from lmi_core.models.loader import LoadedModel  # noqa: E402
from lmi_core.models.weights import Linear  # noqa: E402
from lmi_core.ops.device.packed_weight import PackedWeight  # noqa: E402
from lmi_core.ops.device.torch_weights import DeviceWeights  # noqa: E402
from lmi_core.ops.operands import ExpertMatrices  # noqa: E402
from lmi_core.settings.engine_config import EngineConfig  # noqa: E402
from lmi_core.weights.fp8_matrix import Fp8Matrix, expand_scales  # noqa: E402
from lmi_core.weights.quantized.methods import METHODS  # noqa: E402
from tests.checkpoints import make_checkpoint  # noqa: E402
from tests.fp8_checkpoints import CONFIGS, Exact, make_fp8_checkpoint  # noqa: E402
from tests.loading import load_model  # noqa: E402

Made = tuple[Path, Exact]


@pytest.fixture(scope="module", params=CONFIGS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_fp8_checkpoint(tmp_path_factory.mktemp("fp8") / "model", request.param)


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint with some tensors replaced (None: removed), and other facts of its format."""

    def edit(form: str, quantization: dict[str, Any] | None = None, **changes: Any) -> Path:
        path, _ = make_fp8_checkpoint(tmp_path / "model", form, num_hidden_layers=1)
        file = path / "model.safetensors"
        tensors = {**safetensors_torch.load_file(file)}
        for ending, tensor in changes.items():
            tensors[f"model.layers.0.self_attn.q_proj.{ending}"] = tensor
        safetensors_torch.save_file({n: t for n, t in tensors.items() if t is not None}, file)
        if quantization is not None:
            config = json.loads((path / "config.json").read_text())
            config["quantization_config"] = quantization
            (path / "config.json").write_text(json.dumps(config))
        return path

    return edit


def write_fp8(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A model's tensors, some of which are in fp8 now."""
    safetensors_torch.save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (path / "config.json").write_text(json.dumps(config))
    return path


def linears(model: LoadedModel, exact: Exact) -> list[tuple[Linear, np.ndarray]]:
    """A layer's fused matrices, and what they must hold."""
    layer, prefix = model.weights.layers[1], "model.layers.1."

    def rows(*names: str) -> np.ndarray:
        return np.concatenate([exact[f"{prefix}{name}_proj.weight"] for name in names])

    return [
        (layer.qkv, rows("self_attn.q", "self_attn.k", "self_attn.v")),
        (layer.attention_output, rows("self_attn.o")),
        (layer.gate_up, rows("mlp.gate", "mlp.up")),
        (layer.down, rows("mlp.down")),
    ]


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
def test_the_cpu_engine_widens_them(
    made: Made, caplog: pytest.LogCaptureFixture, dtype: Any
) -> None:
    path, exact = made
    seen: list[tuple[int, int]] = []
    model = load_model(path, dtype, progress=lambda done, total: seen.append((done, total)))
    assert (model.dtype, model.quantize) == ("fp32" if dtype == "fp32" else "bf16", None)
    assert f"fp8 weights are held as {model.dtype} here; quantize=int8" in caplog.text
    assert seen[-1][0] == seen[-1][1]
    for linear, expected in linears(model, exact):
        assert isinstance(linear.weight, _native.LinearWeight)
        values = linear.weight.unpack()
        if dtype == "fp32":
            np.testing.assert_array_equal(values, expected)
        else:
            assert torch.equal(
                torch.from_numpy(values), torch.from_numpy(expected).bfloat16().float()
            )


@pytest.mark.parametrize("form", CONFIGS)
def test_the_cpu_engine_keeps_whole_blocks_of_inputs(form: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 256}
    path, exact = make_fp8_checkpoint(tmp_path / "model", form, **shape)
    for dtype in ("auto", "fp32"):
        model = load_model(path, dtype)  # type: ignore[arg-type]
        assert model.quantize == "fp8"
        for linear, expected in linears(model, exact):
            assert isinstance(linear.weight, _native.LinearWeight)
            assert linear.weight.format == "e4m3"
            assert linear.weight.row_format is None, "rows stay as they are"
            assert linear.weight.num_bytes < 1.35 * expected.size, "outputs are padded to 64"
            np.testing.assert_array_equal(linear.weight.unpack(), expected)


def test_e5m2_is_read(tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    path, exact = make_fp8_checkpoint(tmp_path / "model", "row", **shape)
    file = path / "model.safetensors"
    tensors = safetensors_torch.load_file(file)
    for name in exact:
        codes = (tensors[name].float() / 8).to(torch.float8_e5m2)
        exact[name] = (codes.float() * tensors[f"{name}_scale"].float().reshape(-1, 1)).numpy()
        tensors[name] = codes
    safetensors_torch.save_file(tensors, file)
    model = load_model(path)
    for linear, expected in linears(model, exact):
        assert isinstance(linear.weight, _native.LinearWeight)
        assert linear.weight.format == "e5m2"
        np.testing.assert_array_equal(linear.weight.unpack(), expected)
    widened = load_model(path, "fp32", packer=DeviceWeights(torch.device("cpu")))
    down = widened.weights.layers[1].down.weight
    np.testing.assert_array_equal(down.matrix.numpy(), exact["model.layers.1.mlp.down_proj.weight"])  # type: ignore[union-attr]


def test_the_cpu_engine_makes_fp8(tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 256}
    make_checkpoint(tmp_path / "model", "llama2", dtype="float32", **shape)
    path = tmp_path / "model"
    found = load_model(path, quantize="fp8").weights.layers[1].down.weight
    assert isinstance(found, _native.LinearWeight)
    assert found.format == "e4m3"
    tensors = safetensors_torch.load_file(path / "model.safetensors")
    weights = tensors["model.layers.1.mlp.down_proj.weight"].float()
    scales = weights.abs().amax(dim=1, keepdim=True) / 448
    wanted = (weights / scales).to(torch.float8_e4m3fn).float() * scales
    np.testing.assert_array_equal(found.unpack(), wanted.numpy())


def test_torch_devices_keep_them(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    path, exact = made
    model = load_model(path, packer=DeviceWeights(torch.device("cpu")))
    assert (model.dtype, model.quantize) == ("bf16", "fp8")
    assert not caplog.text
    for linear, expected in linears(model, exact):
        assert isinstance(linear.weight, PackedWeight)
        assert linear.weight.format == "fp8"
        np.testing.assert_allclose(linear.weight.unpack(), expected, rtol=1e-6)
        assert linear.weight.num_bytes < 1.4 * expected.size
    assert not isinstance(model.weights.head.weight, PackedWeight)


def test_torch_devices_keep_the_scales_of_activations(tmp_path: Path) -> None:
    """Of matrices that are multiplied as one the largest, which clips the fewest; experts, which
    read the same rows, have one."""
    device = DeviceWeights(torch.device("cpu"))
    path, _ = make_fp8_checkpoint(tmp_path / "model", "tensor")
    layer = load_model(path, packer=device).weights.layers[1]
    linears = (layer.qkv, layer.attention_output, layer.gate_up, layer.down)
    assert [row_scale(linear) for linear in linears] == [0.05, 0.04, 0.04, 0.04]
    path, _ = make_fp8_checkpoint(tmp_path / "experts", "tensor", "qwen3_moe")
    file = path / "model.safetensors"
    tensors = safetensors_torch.load_file(file)
    tensors["model.layers.0.mlp.experts.3.up_proj.input_scale"] = torch.tensor([0.07]).bfloat16()
    safetensors_torch.save_file(tensors, file)
    experts = load_model(path, packer=device).weights.layers[0].experts
    assert experts is not None
    assert isinstance(experts.gate_up.weight, ExpertMatrices)
    scales = {row_scale(Linear(each)) for each in experts.gate_up.weight.experts}
    assert [*scales] == [pytest.approx(0.07, rel=0.01)]


def row_scale(linear: Linear) -> float:
    assert isinstance(linear.weight, PackedWeight)
    return round(linear.weight.row_scale, 7)


@pytest.mark.parametrize("scale", [None, torch.tensor(0.03)])
def test_rows_have_scales_of_their_own_where_one_part_says_nothing(
    edited: Callable[..., Path], scale: torch.Tensor | None
) -> None:
    """Under Transformers' name, too."""
    path = edited("tensor", input_scale=None, activation_scale=scale)
    layer = load_model(path, packer=DeviceWeights(torch.device("cpu"))).weights.layers[0]
    assert row_scale(layer.qkv) == (0.0 if scale is None else 0.05)
    assert row_scale(layer.down) == 0.04


def test_rows_have_scales_of_their_own_where_the_scheme_says_so(
    edited: Callable[..., Path],
) -> None:
    """Whatever lies beside the matrices, as in Transformers."""
    path = edited("tensor", {"quant_method": "fp8", "activation_scheme": "dynamic"})
    layer = load_model(path, packer=DeviceWeights(torch.device("cpu"))).weights.layers[0]
    assert (row_scale(layer.qkv), row_scale(layer.down)) == (0.0, 0.0)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_they_are_quantised_anew_where_asked(made: Made, quantize: Any) -> None:
    path, exact = made
    native = load_model(path, quantize=quantize)
    device = load_model(path, quantize=quantize, packer=DeviceWeights(torch.device("cpu")))
    assert native.quantize == device.quantize == quantize
    for (linear, expected), (other, _) in zip(
        linears(native, exact), linears(device, exact), strict=True
    ):
        assert isinstance(linear.weight, _native.LinearWeight)
        assert isinstance(other.weight, PackedWeight)
        assert linear.weight.packed().tobytes() == other.weight.panels.numpy().tobytes()
        error = linear.weight.unpack() - expected
        assert np.abs(error).max() < (0.02 if quantize == "int8" else 0.3) * np.abs(expected).max()


def test_quantising_to_fp8_keeps_what_is_fp8(made: Made) -> None:
    path, exact = made
    model = load_model(path, quantize="fp8", packer=DeviceWeights(torch.device("cpu")))
    for linear, expected in linears(model, exact):
        assert isinstance(linear.weight, PackedWeight)
        np.testing.assert_allclose(linear.weight.unpack(), expected, rtol=1e-6)
    head = model.weights.head.weight
    assert isinstance(head, PackedWeight)
    assert head.format == "int8"


def test_a_layer_that_is_not_all_fp8_is_widened(edited: Callable[..., Path]) -> None:
    path = edited("row", weight=torch.ones(192, 192).bfloat16(), weight_scale=None)
    model = load_model(path, packer=DeviceWeights(torch.device("cpu")))
    layer = model.weights.layers[0]
    assert not isinstance(layer.qkv.weight, PackedWeight)
    assert isinstance(layer.down.weight, PackedWeight)


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("row", {"weight_scale": None}, "missing: model.layers.0.self_attn.q_proj.weight_scale"),
        ("row", {"weight_scale": torch.ones(191, 1)}, r"q_proj.weight_scale is \[191, 1\], must"),
        ("block", {"weight_scale_inv": torch.ones(2, 3)}, r"is \[2, 3\], must be one number"),
        ("row", {"weight_scale": torch.ones(192).int()}, "is I32, must be F32, F16 or BF16"),
        (
            "tensor",
            {"weight_scale": torch.tensor(torch.nan)},
            r"q_proj.weight_scale holds nan at \[0\]; it is dam",
        ),
        (
            "row",
            {"weight_scale": torch.full((192, 1), torch.inf)},
            r"weight_scale holds inf at \[0, 0\]",
        ),
        ("tensor", {"input_scale": torch.ones(192)}, r"input_scale is \[192\], must be one number"),
        ("tensor", {"input_scale": torch.ones(1).int()}, "q_proj.input_scale is I32, must be F32"),
        ("tensor", {"input_scale": torch.tensor(-0.1)}, r"q_proj.input_scale is -0.1, but a scale"),
        ("tensor", {"input_scale": torch.tensor(torch.inf)}, r"q_proj.input_scale holds inf at"),
        ("row", {"zero_point": torch.ones(192)}, "unexpected: model.layers.0.self_attn.q_proj.z"),
    ],
)
def test_faults_name_the_tensor(
    edited: Callable[..., Path], form: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(edited(form, **changes))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            {"quant_method": "hqq"},
            "quantization_config.quant_method is 'hqq'; awq, gptq, compressed-tensors, exl2",
        ),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"block_size is \[64, 64\]; bl"),
        ([], "quantization_config is .*, but must be an object"),
        ({}, "quant_method is ''"),
    ],
)
def test_other_quantisations_are_refused(
    edited: Callable[..., Path], quantization: Any, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(edited("row", quantization))


def test_the_configuration_knows_the_same_methods() -> None:
    known = {f"weights.{method}" for method in METHODS}
    assert known <= BACKENDS["lmi"].capabilities


@pytest.mark.parametrize("form", ["whole", "outputs", "row of outputs", "block"])
def test_of_transposed_matrices_outputs_have_scales(form: str, tmp_path: Path) -> None:
    """As many inputs as outputs, so that shapes alone don't tell."""
    path = make_checkpoint(tmp_path / "model", "gpt2")
    tensors = safetensors_torch.load_file(path / "model.safetensors")
    plain = tensors.copy()
    for name in [name for name in tensors if name.endswith("attn.c_proj.weight")]:
        inputs, outputs = tensors[name].shape
        blocks = -(-inputs // 128), -(-outputs // 128)
        shape = {"whole": (), "outputs": (outputs,), "row of outputs": (1, outputs)}
        scales = torch.rand(shape.get(form, blocks)) + 0.5
        spread = scales
        if form == "block":
            spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:inputs, :outputs]
        codes = tensors[name].to(torch.float8_e4m3fn)
        tensors |= {name: codes, f"{name}_scale": scales}
        plain[name] = codes.float() * spread
    exact = shutil.copytree(path, tmp_path / "plain")
    safetensors_torch.save_file(plain, exact / "model.safetensors")
    write_fp8(path, tensors)
    loaded, wanted = (load_model(each, "fp32").weights.layers for each in (path, exact))
    runs = LayerRuns(find_model(EngineConfig(model=path)), num_threads=1)
    try:
        calibrated = [runs.load(layer_id) for layer_id in range(len(wanted))]
    finally:
        runs.close()
    for layers in (loaded, calibrated):
        for ours, theirs in zip(layers, wanted, strict=True):
            found, expected = ours.attention_output.weight, theirs.attention_output.weight
            assert isinstance(found, _native.LinearWeight)
            assert isinstance(expected, _native.LinearWeight)
            np.testing.assert_array_equal(found.unpack(), expected.unpack())


def test_scales_of_the_inputs_of_transposed_matrices_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "gpt2")
    tensors = safetensors_torch.load_file(path / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith("h.0.mlp.c_proj.weight"))
    tensors[f"{name}_scale"] = torch.ones(len(tensors[name]))
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    write_fp8(path, tensors)
    with pytest.raises(ModelError, match=r"c_proj.weight_scale is \[96\], must be one number"):
        load_model(path)


def test_scales_of_blocks_may_be_as_many_as_outputs() -> None:
    """As of DeepSeek-V3's attention output: 7168 outputs of 16384 inputs."""
    scales = np.arange(1, 257, dtype=np.float32).reshape(2, 128)
    matrix = Fp8Matrix(np.full((256, 16384), 0x38, np.uint8), expand_scales(scales, (256, 16384)))
    np.testing.assert_array_equal(
        matrix.to_float32(), scales.repeat(128, axis=0).repeat(128, axis=1)
    )


def test_every_byte_is_decoded() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    expected = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
    for scale in (1.0, 2.0**100, 2.0**-100):
        scales = expand_scales(np.array(scale, np.float32), codes.shape)
        np.testing.assert_array_equal(Fp8Matrix(codes, scales).to_float32(), expected * scale)
