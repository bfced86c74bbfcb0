"""Layers as AutoAWQ, AutoGPTQ, GPTQModel and compressed-tensors themselves write them.

``data/written_by_libraries.safetensors`` was made by autoawq 0.2.9, auto-gptq 0.7.1 (``gptq_v2``:
then converted by gptqmodel 7.7.0) and compressed-tensors 0.20.0 from random matrices: each layer's
tensors under its name, its quantization_config in the metadata, and under ``expected`` every
seventh input column of what the library itself reads from them. ``modelopt`` is ``nvfp4`` in the
Model Optimizer's names, with the inverse of its scale for the whole matrix. Of AWQ's gemv,
gemv_fast and marlin, which the library reads on GPUs alone, ``expected`` is what it was given.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lmi_core.errors import ModelError
from lmi_core.weights.float_tensors import to_float32
from lmi_core.weights.fp8_checkpoint import scale_problem
from lmi_core.weights.fp8_matrix import Fp8Matrix, expand_scales
from lmi_core.weights.hf_config import QuantizationSettings
from lmi_core.weights.quantized.checkpoint import layout_of
from lmi_core.weights.quantized.layout import LayerTensors
from lmi_core.weights.safetensors_file import TensorInfo, read_header

FILE = Path(__file__).parent / "data" / "written_by_libraries.safetensors"
TENSORS = read_header(FILE)
DTYPES = {
    "F32": "<f4",
    "F16": "<f2",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "I8": "i1",
    "F8_E4M3": "u1",
}
DTYPES["U8"] = "u1"
MOST_ROUNDING = 2**-11
"""Of an fp32 scale that is kept in fp16."""


def configurations():
    raw = FILE.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return json.loads(header["__metadata__"]["configs"])


CONFIGS = configurations()


def array(tensor):
    raw = np.fromfile(FILE, np.uint8, tensor.num_bytes, offset=tensor.offset)
    return raw.view(DTYPES[tensor.dtype]).reshape(tensor.shape)


def floats(tensor):
    return to_float32(array(tensor), tensor.dtype)


def read(name):
    """The layer's weights [outputs, inputs], by what its configuration says."""
    layout = layout_of(QuantizationSettings(Path("config.json"), CONFIGS[name]))
    if layout is None:
        codes, scale = TENSORS[f"{name}.weight"], floats(TENSORS[f"{name}.weight_scale"])
        return Fp8Matrix(array(codes), expand_scales(scale, codes.shape)).to_float32()
    shape = (32, 64) if name.startswith(("awq", "gptq")) else (16, 64)
    shape = (64, 256) if "marlin" in name else shape
    problems = [
        problem
        for part in layout.parts(name, shape)
        if (problem := part.problem(name, TENSORS.get(f"{name}.{part.suffix}")))
    ]
    if problems:
        raise ModelError("; ".join(problems))
    layer = LayerTensors(name, shape, TENSORS, array, floats, lambda change: None)
    return layout.matrix(layer).to_float32()


REFUSED = {"packed4-tensor-asym", "packed8-tensor-asym"}


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - REFUSED))
def test_weights_are_what_the_library_reads(name):
    expected = floats(TENSORS[f"expected.{name}"])
    np.testing.assert_allclose(read(name)[:, ::7], expected, rtol=MOST_ROUNDING, atol=1e-12)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_kept_is_refused(name):
    with pytest.raises(ModelError, match="weight_zero_point is I8, must be I32"):
        read(name)


@pytest.mark.parametrize("block", [None, (128, 128)])
def test_fp8_matrices_are_what_transformers_reads(block):
    torch = pytest.importorskip("torch", exc_type=ImportError)
    pytest.importorskip("transformers")
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = FineGrainedFP8Config(weight_block_size=block)
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=config))
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    written = quantize.convert({"layer.weight": weight})
    codes, scale = written["layer.weight"], written["layer.weight_scale_inv"]
    expected = quantize.reverse_op._dequantize_one(codes, scale, torch.float32).numpy()
    tensor = TensorInfo("layer.weight", "F8_E4M3", tuple(codes.shape), FILE, 0, codes.nbytes)
    beside = TensorInfo("layer.weight_scale_inv", "F32", tuple(scale.shape), FILE, 0, scale.nbytes)
    assert scale_problem(tensor, {beside.name: beside}) is None
    scales = expand_scales(scale.numpy(), tuple(codes.shape))
    ours = Fp8Matrix(codes.view(torch.uint8).numpy(), scales).to_float32()
    np.testing.assert_array_equal(ours, expected)
    assert np.abs(ours - weight.numpy()).max() < 0.3
