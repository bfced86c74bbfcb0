"""Options that name how a checkpoint is quantised, and checkpoints that are or aren't so."""

import asyncio
import json

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import ConfigError, ModelError
from lmi_core.settings.engine_config import EngineConfig

from .cases import LLAMA

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
MARLIN = {"quant_method": "marlin", "group_size": 128}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}},
}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
FP8 = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def row_of(report):
    return next(row for row in report.rows[0] if row.key == "option.quantize")


@pytest.mark.parametrize(
    ("form", "properties", "argv"),
    [
        ("awq", "", ()),
        ("awq", "option.quantize=awq", ()),
        ("awq", "option.rolling_batch=vllm\noption.quantize=awq_marlin", ()),
        ("awq", "", ("--quantize", "gptq")),
        ("gptq", "option.rolling_batch=lmi-dist\noption.quantize=gptq", ()),
        ("gptq", "", ("--quantize", "gptq")),
        ("packed", "option.quantize=compressed-tensors\noption.device=torch-cpu", ()),
        ("int8", "", ("--quantize", "compressed-tensors")),
    ],
)
def test_they_are_served(tmp_path, resolved, form, properties, argv):
    checkpoints = pytest.importorskip("tests.integer_checkpoints")
    form = checkpoints.FORMS[form]
    path, _ = checkpoints.make_integer_checkpoint(tmp_path / "model", form)
    (path / "serving.properties").write_text(properties)
    model = resolved(str(path), "--prefer-native", *argv).models[0]

    async def main():
        params = SamplingParams(max_new_tokens=4, ignore_eos=True)
        async with Engine(model.engine_config(path)) as engine:
            assert engine.info.runner.quantize == f"int{form.num_bits}"
            assert len([event async for event in engine.generate((10, 11, 12), params)]) == 4

    asyncio.run(asyncio.wait_for(main(), 60))


def test_exl2_is_served(tmp_path, resolved):
    checkpoints = pytest.importorskip("tests.exl2_checkpoints")
    path = checkpoints.make_exl2_checkpoint(tmp_path)
    model = resolved(str(path), "--quantize", "exl2").models[0]

    async def main():
        params = SamplingParams(max_new_tokens=4, ignore_eos=True)
        async with Engine(model.engine_config(path)) as engine:
            assert len([event async for event in engine.generate((10, 11, 12), params)]) == 4

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("written", "quantization", "outcome", "text"),
    [
        ("awq", AWQ, "honoured", "quantize=awq; the checkpoint is read as it is quantised"),
        ("gptq", GPTQ, "honoured", "quantize=gptq; the checkpoint is read as it is quantised"),
        ("gptq_marlin", GPTQ, "mapped", "quantize=gptq; with kernels of our own"),
        ("gptq", AWQ, "honoured", "quantize=gptq; the checkpoint is read as it is quantised"),
        ("compressed-tensors", PACKED, "honoured", "quantize=compressed-tensors; the checkpoint"),
        ("compressed-tensors", FP8, "honoured", "quantize=compressed-tensors; the checkpoint"),
        ("awq", GPTQ, "refused", "the checkpoint is quantised by gptq: write that, or leave it"),
        ("awq", MODELOPT, "refused", "the checkpoint is quantised by modelopt: leave it out"),
        ("awq_marlin", GPTQ, "refused", "the checkpoint is quantised by gptq: write that, or"),
        ("awq", None, "refused", "the checkpoint isn't quantised: leave it out, or write int8 or"),
        ("int8", AWQ, "refused", "the checkpoint is quantised by awq already: leave it out"),
        ("fp8", PACKED, "refused", "the checkpoint is quantised by compressed-tensors already"),
        ("fp8", FP8, "honoured", "quantize=fp8; on the CPU, which rounds no activations"),
        ("bitsandbytes-nf4", BNB, "no effect", "the checkpoint is read as it is: bitsandbytes nf4"),
        ("bitsandbytes8", BNB, "no effect", "the checkpoint is read as it is: bitsandbytes nf4"),
        ("bitsandbytes", AWQ, "refused", "the checkpoint is quantised by awq already: leave it"),
        ("int8", BNB, "refused", "the checkpoint is quantised by bitsandbytes already: leave it"),
        ("marlin", GPTQ, "mapped", "quantize=gptq; with kernels of our own"),
        ("marlin", MARLIN, "mapped", "quantize=gptq; with kernels of our own"),
        ("gptq", MARLIN, "honoured", "quantize=gptq; the checkpoint is read as it is quantised"),
    ],
)
def test_options_and_checkpoints(model_dir, explained, written, quantization, outcome, text):
    config = LLAMA if quantization is None else {**LLAMA, "quantization_config": quantization}
    report = explained(model_dir(f"option.quantize={written}", config=config))
    row = row_of(report)
    assert (row.outcome, row.text[: len(text)]) == (outcome, text)
    assert bool(report.errors) == (outcome == "refused")


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({**AWQ, "version": "llm"}, "quantization_config.version is 'llm'; gemm, gemv, gemv_fast"),
        ({**GPTQ, "bits": 5}, "quantization_config.bits is 5; "),
        ({**PACKED, "format": "marlin-24"}, "format is 'marlin-24'; in integers"),
    ],
)
def test_what_cannot_be_loaded_is_refused_before(model_dir, explained, quantization, message):
    model = model_dir("", config={**LLAMA, "quantization_config": quantization})
    assert message in str(explained(model).errors[0])


@pytest.mark.parametrize("quantize", ["eetq", "int4", "awq"])
def test_advice_is_not_what_is_refused_next(model_dir, explained, quantize):
    quantization = {"quant_method": "hqq"}
    config = {**LLAMA, "quantization_config": quantization}
    (error,) = explained(model_dir(f"option.quantize={quantize}", config=config)).errors
    assert str(error).endswith("doesn't read in this version; give the unquantised model")


def test_what_is_not_here_yet_is_checked_when_it_is_loaded(explained):
    row = row_of(explained("--model-id", "org/some-AWQ", "--quantize", "awq"))
    assert row.outcome == "honoured"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "version": "GEMM"}),
    ],
)
def test_older_tools_files_count(model_dir, explained, name, settings):
    files = {name.replace(".", "__"): json.dumps(settings)}
    method = "gptq" if name.startswith("quantize") else "awq"
    model = model_dir(f"option.quantize={method}", config=LLAMA, **files)
    assert not explained(model).errors


def test_a_broken_file_is_an_error(model_dir, resolved):
    model = model_dir("", config=LLAMA, quantize_config__json="{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        resolved(model)


def test_the_engine_refuses_another_method(tmp_path):
    checkpoints = pytest.importorskip("tests.integer_checkpoints")
    form = checkpoints.FORMS["gptq"]
    path, _ = checkpoints.make_integer_checkpoint(tmp_path / "model", form)

    async def main(quantize):
        async with Engine(EngineConfig(model=path, quantize=quantize)):
            pass

    with pytest.raises(ModelError, match="quantize=awq: the checkpoint is quantised by gptq"):
        asyncio.run(main("awq"))
    with pytest.raises(ModelError, match="quantize=int4: the checkpoint is quantised by gptq alr"):
        asyncio.run(main("int4"))


@pytest.mark.parametrize(
    ("written", "quantization", "outcome", "text"),
    [
        ("awq", None, "mapped", "quantize=int4; TensorRT-LLM would quantise at load, too"),
        ("awq", AWQ, "honoured", "quantize=awq; the checkpoint is read as it is quantised"),
        ("smoothquant", None, "honoured", "quantize=smoothquant; W8A8: a scale per token and one"),
        ("fp8", None, "mapped", "quantize=int8; TensorRT-LLM would quantise at load, too"),
    ],
)
def test_what_tensorrt_llm_quantises_at_load(
    model_dir, explained, written, quantization, outcome, text
):
    config = LLAMA if quantization is None else {**LLAMA, "quantization_config": quantization}
    properties = f"option.rolling_batch=trtllm\noption.quantize={written}\noption.awq_block_size=64"
    report = explained(model_dir(properties, config=config), "--prefer-native")
    assert not report.errors
    row = row_of(report)
    assert (row.outcome, row.text[: len(text)]) == (outcome, text)
    assert row.value == written
    assert report.models[0].engine.config.quantize == text.split(";")[0].removeprefix("quantize=")
