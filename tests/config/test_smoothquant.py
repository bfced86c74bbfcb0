"""``option.quantize=smoothquant``: from written keys to int8 weights whose inputs are smoothed."""

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmi_core.calibration import peaks
from lmi_core.calibration.peaks import smoothing_for
from lmi_core.config.explain import main as explain
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.models.found_model import find_model
from lmi_core.models.loader import load_weights
from lmi_core.models.spec import LayerLinear
from lmi_core.ops.cpu import NativeWeights
from lmi_core.settings.engine_config import EngineConfig
from tests.checkpoints import cached_checkpoint
from tests.models.forward import NativeForward, all_logits

from .cases import CPU, NO_CACHE

pytestmark = pytest.mark.timeout(120)

PROMPT = tuple(range(10, 50))
TRTLLM = "engine=MPI\noption.rolling_batch=trtllm\noption.quantize=smoothquant\n"
DEEPSPEED = "engine=DeepSpeed\noption.quantize=smoothquant\n"


def scores_of(config):
    """The format of the weights, and log-probabilities of a prompt."""

    async def main():
        params = SamplingParams(max_new_tokens=1, prompt_logprobs=0, ignore_eos=True)
        async with Engine(config, check_integrity=True) as engine:
            events = [event async for event in engine.generate(PROMPT, params)]
            scores = [token.logprob for token in events[0].prompt[1:]]
            return engine.info.runner.quantize, np.array(scores), engine.fingerprint

    return asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    "properties",
    [
        "option.quantize=smoothquant\n",
        DEEPSPEED,
        f"{TRTLLM}option.smoothquant_per_token=true\noption.smoothquant_per_channel=true\n",
    ],
)
def test_every_spelling_smooths(configured, properties):
    config = configured(properties)
    quantize, smoothed, _ = scores_of(config)
    assert quantize == "smoothquant"
    _, exact, _ = scores_of(replace(config, quantize=None))
    assert 0 < np.abs(smoothed - exact).max() < 0.1


def test_alpha_and_text_change_what_is_rounded(configured, tmp_path):
    text = tmp_path / "calibration.txt"
    text.write_text("0123456789" * 20)
    seen = [
        scores_of(configured(DEEPSPEED + more))
        for more in (
            "",
            "option.smoothquant_alpha=0.3\n",
            f"option.calibration_file={text}\n",
        )
    ]
    assert len({tuple(scores) for _, scores, _ in seen}) == 3
    assert len({fingerprint for *_, fingerprint in seen}) == 3


def test_a_text_that_cannot_be_read_is_told_by_explain(tmp_path):
    text = tmp_path / "calibration.txt"
    text.write_bytes(b"\xff\xfe\x00")
    path = str(cached_checkpoint("llama2"))
    asked = ("--quantize", "smoothquant", path)
    for value, problem in ((text, "isn't a text in UTF-8"), (tmp_path / "no", "can't be read")):
        out = io.StringIO()
        environ = {**NO_CACHE, "OPTION_CALIBRATION_FILE": str(value)}
        assert explain(asked, environ=environ, host=CPU, out=out) == 2
        assert problem in " ".join(out.getvalue().split())
    text.write_text("Hello.")
    with pytest.raises(UserError, match="give one of 32 or more"):
        scores_of(EngineConfig(model=Path(path), quantize="smoothquant", calibration_file=text))


def with_outliers(path, directory):
    """The same function with six channels of every norm, value and up a hundred times larger."""
    torch = pytest.importorskip("safetensors.torch")
    tensors = torch.load_file(path / "model.safetensors")
    random = np.random.default_rng(5)
    pairs = [("input_layernorm", f"self_attn.{name}_proj") for name in "qkv"]
    pairs += [("post_attention_layernorm", f"mlp.{name}_proj") for name in ("gate", "up")]
    pairs += [("mlp.up_proj", "mlp.down_proj")]
    for layer in range(3):
        chosen = {}
        for source, reader in pairs:
            scaled = tensors[f"model.layers.{layer}.{source}.weight"]
            if source not in chosen:
                chosen[source] = random.choice(len(scaled), 6, replace=False)
                scaled[chosen[source]] *= 100
            tensors[f"model.layers.{layer}.{reader}.weight"][:, chosen[source]] /= 100
    directory.mkdir()
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).symlink_to(file)
    torch.save_file(tensors, directory / "model.safetensors")
    return directory


def test_outlier_channels_are_smoothed_away(tmp_path):
    """Rows with one scale lose what is beside an outlier; smoothed ones don't have any."""
    path = with_outliers(cached_checkpoint("llama2"), tmp_path / "outliers")
    sequence = np.random.default_rng(2).integers(4, 384, 60).tolist()

    def logits(**settings):
        config = EngineConfig(model=path, dtype="fp32", repack_cache_dir="none", **settings)
        found = find_model(config)
        backend = NativeWeights(activations=config.activations)
        model = load_weights(found, backend, smoothing=smoothing_for(found))
        if config.quantize == "smoothquant":
            weights = [layer.down.weight.rounding for layer in model.weights.layers]
            assert weights == ["int8"] * 3
        (rows,) = all_logits(NativeForward(model, 64, "fp32"), [sequence], max_chunk=64)
        return rows

    exact = logits()
    plain = np.abs(logits(quantize="int8", activations="int8") - exact).mean()
    smooth = np.abs(logits(quantize="smoothquant") - exact).mean()
    assert smooth < 0.2 * plain


def test_a_calibration_is_kept_by_the_content_of_checkpoint_and_text(tmp_path, monkeypatch):
    path = cached_checkpoint("llama2")
    config = EngineConfig(model=path, quantize="smoothquant", repack_cache_dir=str(tmp_path))
    found = find_model(config)
    first = smoothing_for(found)
    (file,) = (tmp_path / "calibrated").iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(peaks, "measured_peaks", None)
        again = smoothing_for(replace(found, asked=replace(config, smoothquant_alpha=0.5)))
        for layer, other in zip(first.layers, again.layers, strict=True):
            assert set(layer) == set(other) == set(LayerLinear)
            for linear in layer:
                assert np.array_equal(layer[linear], other[linear])
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(TypeError):
            smoothing_for(found)
    smoothing_for(found)
    assert [each.name for each in (tmp_path / "calibrated").iterdir()] == [file.name]


def test_adapters_are_refused(configured):
    config = configured("option.quantize=smoothquant\noption.enable_lora=true\n")
    with pytest.raises(UserError, match=r"leave option\.enable_lora out"):
        find_model(config)
