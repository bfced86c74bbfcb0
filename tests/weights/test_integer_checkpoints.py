"""Checkpoints in int4 and int8: their codes and scales are the engine's, to the bit."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

torch = pytest.importorskip("torch", exc_type=ImportError)
transformers = pytest.importorskip("transformers")

from lmi_core import _native  # noqa: E402
from lmi_core.engine.engine import Engine  # noqa: E402
from lmi_core.engine.sampling_params import SamplingParams  # noqa: E402
from lmi_core.models.found_model import find_model  # noqa: E402
from lmi_core.models.loader import LoadedModel, load_weights  # noqa: E402
from lmi_core.models.weights import Linear  # noqa: E402
from lmi_core.ops.cpu import NativeWeights  # noqa: E402
from lmi_core.ops.device.packed_weight import PackedWeight  # noqa: E402
from lmi_core.ops.device.torch_weights import DeviceWeights  # noqa: E402
from lmi_core.ops.operands import JoinedWeight  # noqa: E402
from lmi_core.runners.cpu.memory_needs import estimate  # noqa: E402
from lmi_core.settings.engine_config import EngineConfig  # noqa: E402
from lmi_core.weights.hf_config import QuantizationSettings  # noqa: E402
from lmi_core.weights.quantized.methods import widened_format  # noqa: E402
from tests.integer_checkpoints import (  # noqa: E402
    FORMS,
    GPTQ,
    OTHER_FORMS,
    Coded,
    dense_checkpoint,
    make_integer_checkpoint,
    set_config,
)
from tests.loading import load_model  # noqa: E402
from tests.models.forward import NativeForward, all_logits  # noqa: E402
from tests.models.test_quantised import MOST_ERROR  # noqa: E402

Made = tuple[Path, dict[str, Coded]]


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def made(form: str, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_integer_checkpoint(tmp_path_factory.mktemp("integer") / "model", FORMS[form])


def linears(model: LoadedModel, coded: dict[str, Coded]) -> list[tuple[Linear, list[Coded]]]:
    """A layer's fused matrices, and the parts that they are made of."""
    layer, prefix = model.weights.layers[1], "model.layers.1."

    def of(*names: str) -> list[Coded]:
        return [coded[f"{prefix}{name}_proj.weight"] for name in names]

    return [
        (layer.qkv, of("self_attn.q", "self_attn.k", "self_attn.v")),
        (layer.attention_output, of("self_attn.o")),
        (layer.gate_up, of("mlp.gate", "mlp.up")),
        (layer.down, of("mlp.down")),
    ]


def packed_directly(parts: list[Coded], gated: bool, like: _native.LinearWeight) -> bytes:
    """The bytes of the codes themselves in the engine's format."""
    step = like.group_size or like.num_inputs
    sources = []
    for part in parts:
        groups = part.groups[::step]
        scales, zeros = (
            np.ascontiguousarray(values[:, groups], np.float32)
            for values in (part.scales, part.zeros)
        )
        sources.append((part.codes.astype(np.uint8), scales, zeros))
    weight = _native.LinearWeight.pack(
        sources, format=like.format, gated=gated, group_size=like.group_size
    )
    return weight.packed().tobytes()


def test_matrices_of_gpt2_are_stored_as_those_of_others(tmp_path: Path) -> None:
    path, coded = make_integer_checkpoint(tmp_path / "model", FORMS["gptq"], "gpt2", n_inner=96)
    layer = load_model(path).weights.layers[1]
    for linear, name in ((layer.qkv, "attn.c_attn"), (layer.down, "mlp.c_proj")):
        assert isinstance(linear.weight, _native.LinearWeight)
        wanted = coded[f"transformer.h.1.{name}.weight"]
        np.testing.assert_array_equal(linear.weight.unpack(), wanted.matrix)


def test_codes_and_scales_are_the_checkpoints(
    form: str, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    path, coded = made
    seen: list[tuple[int, int]] = []
    model = load_model(path, progress=lambda done, total: seen.append((done, total)))
    assert (model.dtype, model.quantize) == ("bf16", f"int{FORMS[form].num_bits}")
    assert seen[-1][0] == seen[-1][1]
    assert not caplog.records
    for linear, parts in linears(model, coded):
        weight = linear.weight
        assert isinstance(weight, _native.LinearWeight)
        assert weight.format == model.quantize
        exact = np.concatenate([part.matrix for part in parts])
        np.testing.assert_array_equal(weight.unpack(), exact)
        gated = linear is model.weights.layers[1].gate_up
        assert weight.packed().tobytes() == packed_directly(parts, gated, weight)
    head = model.weights.head.weight
    assert isinstance(head, _native.LinearWeight)
    assert head.format == "bf16"


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_what_products_lack_is_read_to_the_bit(form: str, tmp_path: Path) -> None:
    """In blocks that stand for the same numbers, with inputs in another order, or in floats; as
    explain's judge says."""
    made, blocks = OTHER_FORMS[form]
    path, coded = make_integer_checkpoint(tmp_path / "model", made)
    model = load_model(path, "fp32")
    assert model.quantize == blocks
    for linear, parts in linears(model, coded):
        exact = np.concatenate([part.matrix for part in parts])
        np.testing.assert_array_equal(linear.weight.unpack(), exact)  # type: ignore[union-attr]
    num_bytes = load_model(path).weights.num_bytes
    for method in (None, made.config["quant_method"]):
        config = EngineConfig(model=path, quantize=method)
        found = find_model(config)
        is_told = any("weights are widened" in note for note in found.notes)
        assert is_told == ("3-reordered" in form or "16" in form)
        if is_told or made.num_bits < 4:
            assert estimate(found).weights == num_bytes


@pytest.mark.parametrize("form", ["gptq-reordered", "packed-reordered"])
def test_rows_are_put_into_the_order_of_the_inputs(form: str, tmp_path: Path) -> None:
    """Those of norms and others; where rows aren't rounded and on torch devices the weights are
    floats."""
    path, coded = make_integer_checkpoint(tmp_path / "model", OTHER_FORMS[form][0])
    exact = oracle_logits(dense_checkpoint(tmp_path / "dense", path, coded))
    error = logits_of(load_model(path, "fp32")) - exact
    assert 0 < np.sqrt(np.mean(error**2)) <= MOST_ERROR * exact.std()
    unrounded = find_model(EngineConfig(model=path, activations="bf16"))
    assert any("weights are widened" in note for note in unrounded.notes)
    assert load_weights(unrounded, NativeWeights(activations="bf16")).quantize is None
    device = load_model(path, packer=DeviceWeights(torch.device("cpu")))
    assert device.quantize is None


def test_matrices_of_one_product_may_have_orders_of_their_own(tmp_path: Path) -> None:
    made = replace(OTHER_FORMS["gptq-reordered"][0], order=np.random.default_rng(1).permutation)
    path, coded = make_integer_checkpoint(tmp_path / "model", made)
    exact = oracle_logits(dense_checkpoint(tmp_path / "dense", path, coded))
    model = load_model(path, "fp32")
    layer = model.weights.layers[0]
    for linear in (layer.qkv, layer.gate_up):
        assert isinstance(linear.weight, JoinedWeight)
        formats = {part.format for part in linear.weight.parts}
        assert formats == {"int4"}
    error = logits_of(model) - exact
    assert 0 < np.sqrt(np.mean(error**2)) <= MOST_ERROR * exact.std()


def test_reordered_layers_of_8_bits_are_widened_wherever_that_is_said() -> None:
    four = {**GPTQ, "desc_act": True}
    dynamic = {r"-:.*head": {"bits": 8}, r".*down_proj": {"bits": 4}}
    kept = QuantizationSettings("gptq", {**four, "dynamic": dynamic})
    assert widened_format(kept, keeps_orders=True) is None
    dynamic[r"+:.*up_proj"] = {"bits": 8}
    widened = QuantizationSettings("gptq", {**four, "dynamic": dynamic})
    assert widened_format(widened, keeps_orders=True) == "reordered GPTQ"


def test_layers_may_have_settings_of_their_own(tmp_path: Path) -> None:
    four, eight = FORMS["gptq"], OTHER_FORMS["gptq-8-groups"][0]
    path, coded = make_integer_checkpoint(tmp_path / "four", four)
    other, of_other = make_integer_checkpoint(tmp_path / "eight", eight)
    tensors = load_file(path / "model.safetensors")
    theirs = load_file(other / "model.safetensors")
    tensors |= {name: each for name, each in theirs.items() if "down_proj" in name}
    save_file(tensors, path / "model.safetensors")
    dynamic = {r"-:.*lm_head": {}, r"+:.*\.down_proj": {"bits": 8, "sym": True}}
    set_config(path, quantization_config={**four.config, "dynamic": dynamic})
    model = load_model(path, "fp32")
    for (linear, parts), own in zip(linears(model, coded), (coded,) * 3 + (of_other,), strict=True):
        name = next(name for name, each in coded.items() if each is parts[0])
        exact = np.concatenate([part.matrix for part in parts])
        exact = own[name].matrix if own is of_other else exact
        np.testing.assert_array_equal(linear.weight.unpack(), exact)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("inputs", "rounding"),
    [
        (None, "outliers"),
        ({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}, "int8"),
        ({"num_bits": 8, "type": "int", "strategy": "tensor"}, "int8"),
        ({"num_bits": 8, "type": "int", "strategy": "group", "group_size": 64}, "outliers"),
        ({"num_bits": 16, "type": "int", "strategy": "token"}, "outliers"),
        ({"num_bits": 8, "type": "float", "strategy": "token"}, "outliers"),
    ],
)
def test_schemes_that_round_inputs_to_int8_are_taken_at_their_word(
    inputs: dict[str, Any] | None, rounding: str, tmp_path: Path
) -> None:
    path, _ = make_integer_checkpoint(tmp_path / "model", FORMS["int8"])
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs
    (path / "config.json").write_text(json.dumps(config))
    for packer in (None, DeviceWeights(torch.device("cpu"))):
        model = load_model(path, packer=packer)
        weights = [layer.down.weight for layer in model.weights.layers]
        assert {weight.rounding for weight in weights} == {rounding}
    for activations, asked in (("int8", "int8"), ("bf16", "none")):
        model = load_model(path, packer=NativeWeights(activations=activations))
        assert model.weights.layers[0].down.weight.rounding == asked


def test_torch_devices_have_the_same_bytes(made: Made) -> None:
    path, _ = made
    native = load_model(path)
    device = load_model(path, packer=DeviceWeights(torch.device("cpu")))
    for ours, theirs in zip(native.weights.layers, device.weights.layers, strict=True):
        for name in ("qkv", "attention_output", "gate_up", "down"):
            weight, other = getattr(ours, name).weight, getattr(theirs, name).weight
            assert isinstance(other, PackedWeight)
            assert other.group_size == weight.group_size
            assert other.panels.numpy().tobytes() == weight.packed().tobytes()
            np.testing.assert_array_equal(other.unpack(), weight.unpack())


def test_logits_are_those_of_the_weights(made: Made, tmp_path: Path) -> None:
    """Up to what int8 activations cost."""
    path, coded = made
    dense = dense_checkpoint(tmp_path / "dense", path, coded)
    exact = oracle_logits(dense)
    model = load_model(path, "fp32")
    error = logits_of(model) - exact
    assert 0 < np.sqrt(np.mean(error**2)) <= MOST_ERROR * exact.std()


@pytest.mark.parametrize("variant", ["qwen2", "llama_tied", "qwen3"])
@pytest.mark.parametrize("form", ["awq", "gptq", "packed", "int8"], indirect=True)
def test_families(form: str, variant: str, tmp_path: Path) -> None:
    """With biases, a tied head and norms, which stay as they are."""
    path, coded = make_integer_checkpoint(tmp_path / "model", FORMS[form], variant)
    exact = oracle_logits(dense_checkpoint(tmp_path / "dense", path, coded))
    error = logits_of(load_model(path, "fp32")) - exact
    assert np.sqrt(np.mean(error**2)) <= MOST_ERROR * exact.std()


@pytest.mark.parametrize("form", ["awq", "gptq-symmetric", "packed"], indirect=True)
def test_torch_devices_multiply_them_exactly(made: Made, tmp_path: Path) -> None:
    """int4 weights with activations as they are: what the unquantised model says."""
    path, coded = made
    dense = dense_checkpoint(tmp_path / "dense", path, coded)
    exact, got = greedy_on_torch(dense), greedy_on_torch(path)
    assert [token_id for token_id, _ in got] == [token_id for token_id, _ in exact]
    np.testing.assert_allclose([p for _, p in got], [p for _, p in exact], atol=1e-3)


def greedy_on_torch(path: Path) -> list[tuple[int, float]]:
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=0)
    config = EngineConfig(model=path, device="torch-cpu", dtype="fp32", kv_cache_bytes=1 << 20)

    async def main() -> list[tuple[int, float]]:
        async with Engine(config) as engine:
            events = [event async for event in engine.generate(tuple(range(10, 50)), params)]
            return [(event.token_id, event.logprob) for event in events]  # type: ignore[misc]

    return asyncio.run(asyncio.wait_for(main(), 60))


def sequences() -> list[list[int]]:
    random = np.random.default_rng(2)
    return [random.integers(4, 384, length).tolist() for length in (90, 33, 7)]


def logits_of(model: LoadedModel) -> Any:
    return np.concatenate(all_logits(NativeForward(model, 128, "fp32"), sequences(), max_chunk=48))


def oracle_logits(path: Path) -> Any:
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return np.concatenate(
            [model(torch.tensor([ids]), use_cache=False).logits[0].numpy() for ids in sequences()]
        )
