"""Models in GGUF: the same model as the checkpoint that they were made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmi_core.errors import ModelError
from lmi_core.models.found_model import find_model
from lmi_core.models.loader import LoadedModel
from lmi_core.models.rope import rope_tables
from lmi_core.ops.operands import JoinedWeight
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.lora_config import LoraConfig
from lmi_core.weights.block_matrix import BlockMatrix
from lmi_core.weights.gguf.directory import model_directory
from tests.block_reference import dequantize
from tests.checkpoints import cached_checkpoint
from tests.gguf_files import (
    Stored,
    llama_metadata,
    llama_tensors,
    random_blocks,
    write_gguf,
)
from tests.loading import load_model
from tests.models.forward import SEQUENCES, NativeForward, Rows, TorchForward, all_logits

pytest.importorskip("torch")
MIXED = {
    "token_embd": "Q8_0",
    "output": "Q5_1",
    "attn_q": "Q4_0",
    "attn_k": "Q4_1",
    "attn_v": "Q5_0",
    "attn_output": "F16",
    "ffn_gate": "IQ4_NL",
    "ffn_up": "Q8_0",
    "ffn_down": "MXFP4",
}
"""Of every matrix: two products are of parts that differ."""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def native(model: LoadedModel, *, kv: str | None = None) -> list[npt.NDArray[Any]]:
    return all_logits(NativeForward(model, 128, model.dtype, kv_dtype=kv), SEQUENCES, 16)


def written(directory: Path, variant: str, tensors: dict[str, Stored], **more: Any) -> Path:
    metadata = llama_metadata(cached_checkpoint(variant), **more)
    return write_gguf(directory / "model.gguf", metadata, tensors)


@pytest.mark.parametrize("variant", ["llama1", "llama2", "llama_tied", "llama_bias"])
def test_fp32_gives_the_checkpoints_logits_to_the_bit(variant: str, tmp_path: Path) -> None:
    source = cached_checkpoint(variant)
    path = written(tmp_path, variant, llama_tensors(source, "F32"))
    found = native(load_model(model_directory(path)))
    for ours, theirs in zip(found, native(load_model(source)), strict=True):
        assert np.array_equal(ours, theirs)


def test_llama_3s_frequencies_are_read_from_their_tensor(tmp_path: Path) -> None:
    source = cached_checkpoint("llama3")
    wanted = load_model(source).spec
    factors = _llama3_factors(source)
    tensors = llama_tensors(source, "F32") | {"rope_freqs.weight": ("F32", factors.shape, factors)}
    path = written(tmp_path, "llama3", tensors, **{"llama.rope.freq_base": 500000.0})
    spec = load_model(model_directory(path)).spec
    for ours, theirs in zip(
        rope_tables(spec.ropes[0], 256), rope_tables(wanted.ropes[0], 256), strict=True
    ):
        assert np.allclose(ours, theirs, atol=2e-5)


def _llama3_factors(source: Path) -> npt.NDArray[np.float32]:
    """What converters write: the frequencies' own ones over the scaled ones."""
    rope = json.loads((source / "config.json").read_text())["rope_parameters"]
    inverse = rope["rope_theta"] ** -(np.arange(0, 16, 2) / 16)
    wavelength = 2 * np.pi / inverse
    low, high, old = (
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )
    smooth = np.clip((old / wavelength - low) / (high - low), 0, 1)
    scaled = (1 - smooth) / rope["factor"] + smooth
    return (1 / scaled).astype(np.float32)


@pytest.mark.parametrize("variant", ["llama2", "llama_tied"])
def test_fp16_is_kept(variant: str, tmp_path: Path) -> None:
    source = cached_checkpoint(variant)
    path = written(tmp_path, variant, llama_tensors(source, "F16"))
    model = load_model(model_directory(path))
    assert model.dtype == "bf16", "activations"
    assert model.quantize == "fp16"
    tensors = llama_tensors(source, "F16")
    down = model.weights.layers[1].down.weight.unpack()  # type: ignore[union-attr]
    assert np.array_equal(down, tensors["blk.1.ffn_down.weight"][2].astype(np.float32))
    exact = native(load_model(source, "fp32"))
    found = native(load_model(model_directory(path), "fp32"))
    for ours, theirs in zip(found, exact, strict=True):
        assert np.abs(ours - theirs).max() < 0.01, "bf16's would be over 0.03"


def mixed(source: Path) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """Tensors of every type side by side, and what they stand for in fp32."""
    rng = np.random.default_rng(0)
    stored, exact = {}, {}
    for name, (_, shape, values) in llama_tensors(source, "F32").items():
        stored[name] = exact[name] = ("F32", shape, values)
        kind = next((MIXED[part] for part in name.split(".") if part in MIXED), "F32")
        if len(shape) < 2 or kind == "F32":
            continue
        if kind == "F16":
            halves = values.astype(np.float16)
            stored[name] = kind, shape, halves
            exact[name] = "F32", shape, halves.astype(np.float32)
            continue
        raw = random_blocks(kind, *shape, rng)
        weights = dequantize(kind, raw)
        if kind != "MXFP4":
            factor = np.float16(0.12 / weights.std())
            for at in (0, 2) if kind in ("Q4_1", "Q5_1") else (0,):
                blocks = raw.reshape(shape[0], shape[1] // 32, -1)
                halves = np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)
                if at == 2:
                    halves = -8 * np.ascontiguousarray(blocks[:, :, :2]).view(np.float16) / factor
                blocks[:, :, at : at + 2] = (halves * factor).view(np.uint8)
            weights = dequantize(kind, raw)
        stored[name] = kind, shape, raw
        exact[name] = "F32", shape, weights
    return stored, exact


def test_blocks_of_every_type_are_multiplied_as_they_are_stored(tmp_path: Path) -> None:
    stored, exact = mixed(cached_checkpoint("llama2"))
    path = written(tmp_path, "llama2", stored)
    (tmp_path / "exact").mkdir()
    reference = written(tmp_path / "exact", "llama2", exact)
    config = EngineConfig(model=model_directory(path), activations="bf16")
    from lmi_core.models.loader import load_weights
    from lmi_core.ops.cpu import NativeWeights

    packer = NativeWeights(activations="bf16")
    model = load_weights(find_model(config), packer)
    layer = model.weights.layers[0]
    assert isinstance(layer.qkv.weight, JoinedWeight)
    assert isinstance(layer.gate_up.weight, JoinedWeight)
    assert isinstance(model.weights.embedding, BlockMatrix)
    assert model.quantize is not None
    assert {*model.quantize.split(", ")} == {
        kind.lower().replace("f16", "fp16") for kind in MIXED.values()
    }
    wanted = native(load_model(model_directory(reference)), kv="fp32")
    found = native(model, kv="fp32")
    spread = max(np.abs(logits).max() for logits in wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert np.abs(ours - theirs).max() < 0.05 * spread, "activations are bf16, weights exact"
    rounded = native(load_model(model_directory(path)), kv="fp32")
    for ours, theirs in zip(rounded, wanted, strict=True):
        assert np.abs(ours - theirs).max() < 0.1 * spread, "rows are rounded to 8 bits"


def test_a_sequences_bits_dont_depend_on_its_neighbours(tmp_path: Path) -> None:
    stored, _ = mixed(cached_checkpoint("llama2"))
    model = load_model(model_directory(written(tmp_path, "llama2", stored)))
    together = native(model)
    forward = NativeForward(model, 128, model.dtype)
    for sequence, wanted in zip(SEQUENCES, together, strict=True):
        one_by_one = [forward.step([Rows(0, [token], at)]) for at, token in enumerate(sequence)]
        assert np.array_equal(np.concatenate(one_by_one), wanted)


def test_devices_without_such_products_widen_them(tmp_path: Path) -> None:
    from tests.ops.torch_store import TorchWeights

    stored, exact = mixed(cached_checkpoint("llama2"))
    model = load_model(
        model_directory(written(tmp_path, "llama2", stored)), "fp32", packer=TorchWeights()
    )
    (tmp_path / "exact").mkdir()
    reference = model_directory(written(tmp_path / "exact", "llama2", exact))
    wanted = load_model(reference, "fp32", packer=TorchWeights())
    pairs = zip(
        all_logits(TorchForward(model, 128, "fp32"), SEQUENCES, 16),
        all_logits(TorchForward(wanted, 128, "fp32"), SEQUENCES, 16),
        strict=True,
    )
    for ours, theirs in pairs:
        assert np.array_equal(ours, theirs)


def test_the_packed_copy_is_the_files_size(tmp_path: Path) -> None:
    stored, _ = mixed(cached_checkpoint("llama2"))
    path = written(tmp_path, "llama2", stored)
    model = load_model(model_directory(path))
    assert model.weights.num_bytes < 1.03 * path.stat().st_size


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "mamba"}, "of architecture 'mamba'; of GGUF files llama, qwen2"),
        (
            {"general.architecture": "arctic", "arctic.expert_count": 8},
            r"is a mixture of experts \(arctic\); of mixtures in GGUF llama, qwen2moe",
        ),
        ({"llama.rope.scaling.type": "odd"}, "rope.scaling.type 'odd'; none, linear, yarn"),
        (
            {"llama.attention.head_count_kv": np.array([1, 2, 1], np.int32)},
            "attention.head_count_kv differs by layer",
        ),
        ({"llama.expert_weights_scale": 2.5}, "has llama.expert_weights_scale 2.5, which changes"),
        ({"llama.final_logit_softcapping": 30.0}, "has llama.final_logit_softcapping 30.0, which"),
        ({"llama.logit_scale": 0.25}, "has llama.logit_scale 0.25, which changes the model's"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "has llama.rope.scaling.attn_factor 1.5"),
    ],
)
def test_models_that_there_arent_are_named(
    metadata: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = written(
        tmp_path, "llama2", llama_tensors(cached_checkpoint("llama2"), "F32"), **metadata
    )
    with pytest.raises(ModelError, match=words) as caught:
        model_directory(path)
    assert "model.gguf" in str(caught.value)


def test_settings_that_change_nothing_are_taken_and_unknown_ones_told(tmp_path: Path) -> None:
    source = cached_checkpoint("llama2")
    more = {"llama.expert_weights_scale": 1.0, "llama.attention.causal": True, "llama.odd": 3}
    path = written(tmp_path, "llama2", llama_tensors(source, "F32"), **more)
    found = find_model(EngineConfig(model=model_directory(path)))
    assert found.notes == ("metadata that isn't known here is left out: llama.odd",)


@pytest.mark.parametrize(
    ("more", "scaling"),
    [
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 8.0,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
                "llama.rope.scaling.yarn_beta_slow": 2.0,
            },
            {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
    ],
)
def test_scalings_of_positions_are_the_files(
    more: dict[str, Any], scaling: dict[str, Any], tmp_path: Path
) -> None:
    path = written(tmp_path, "llama2", llama_tensors(cached_checkpoint("llama2"), "F32"), **more)
    config = json.loads((model_directory(path) / "config.json").read_text())
    assert config["rope_scaling"] == scaling
    rope = load_model(model_directory(path)).spec.ropes[0]
    assert rope.kind == scaling["rope_type"]


@pytest.mark.parametrize("name", ["model.gguf", "MODEL-Q8.GGUF"])
def test_the_engine_takes_a_file(name: str, tmp_path: Path) -> None:
    import asyncio

    from lmi_core.engine.engine import Engine
    from lmi_core.engine.sampling_params import SamplingParams

    source = cached_checkpoint("llama2")
    path = write_gguf(tmp_path / name, llama_metadata(source), llama_tensors(source, "F32"))
    assert model_directory(tmp_path) == model_directory(path) != path

    async def main() -> int:
        params = SamplingParams(max_new_tokens=3, ignore_eos=True)
        async with Engine(str(path)) as engine:
            return len([event async for event in engine.generate((5, 6, 7), params)])

    assert asyncio.run(asyncio.wait_for(main(), 60)) == 3


def test_parts_may_be_named_in_capitals(tmp_path: Path) -> None:
    source = cached_checkpoint("llama2")
    tensors = llama_tensors(source, "F32")
    names, parts = [*tensors], []
    for number, half in enumerate((names[:10], names[10:])):
        split = {"split.count": 2, "split.no": number, "split.tensors.count": len(names)}
        metadata = (llama_metadata(source) if number == 0 else {}) | split
        part = {name: tensors[name] for name in half}
        parts.append(write_gguf(tmp_path / f"M-{number + 1:05}-OF-00002.GGUF", metadata, part))
    assert load_model(model_directory(parts[0])).spec.num_layers
    assert model_directory(tmp_path) == model_directory(parts[0])


@pytest.mark.parametrize("key", ["block_count", "attention.layer_norm_rms_epsilon"])
def test_settings_without_a_default_are_asked_for(key: str, tmp_path: Path) -> None:
    source = cached_checkpoint("llama2")
    metadata = llama_metadata(source)
    del metadata[f"llama.{key}"]
    path = write_gguf(tmp_path / "model.gguf", metadata, llama_tensors(source, "F32"))
    with pytest.raises(ModelError, match=f"has no metadata llama.{key}"):
        model_directory(path)


def test_settings_that_cant_be_are_said_with_the_files_name(tmp_path: Path) -> None:
    source = cached_checkpoint("llama2")
    metadata = llama_metadata(source, **{"llama.rope.freq_base": -1.0})
    path = write_gguf(tmp_path / f"odd-{'é' * 100}.gguf", metadata, llama_tensors(source, "F32"))
    with pytest.raises(ModelError, match=r"gguf/odd-é+-.*llama.rope.freq_base is -1.0"):
        load_model(model_directory(path))


def test_heads_beyond_all_measure_are_refused_before_memory_is_spent(tmp_path: Path) -> None:
    source = cached_checkpoint("llama2")
    many = {"llama.attention.key_length": 2**30, "llama.attention.value_length": 2**30}
    metadata = llama_metadata(source, **many)
    path = write_gguf(tmp_path / "model.gguf", metadata, llama_tensors(source, "F32"))
    with pytest.raises(ModelError, match=r"head_count is 4, of 1073741824 numbers each"):
        load_model(model_directory(path))


def test_a_config_beside_the_file_is_not_its_own(tmp_path: Path) -> None:
    """As in repositories that keep the original model's."""
    source = cached_checkpoint("llama2")
    path = written(tmp_path, "llama2", llama_tensors(source, "F32"))
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    directory = model_directory(tmp_path)
    assert directory == model_directory(path) == model_directory(directory)
    assert load_model(directory).spec.num_layers
    (tmp_path / "pytorch_model.bin").touch()
    assert model_directory(tmp_path) == tmp_path, "weights that config.json is of"


def test_the_files_texts_are_written_whatever_the_locale(tmp_path: Path) -> None:
    source = cached_checkpoint("llama2")
    path = written(tmp_path, "llama2", llama_tensors(source, "F32"))
    program = (
        "import pathlib, sys; from lmi_core.weights.gguf.directory import model_directory; "
        "print(model_directory(pathlib.Path(sys.argv[1])))"
    )
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = os.environ | locale
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "tokenizer.json").is_file()


def test_tensors_that_dont_fit_are_named(tmp_path: Path) -> None:
    tensors = llama_tensors(cached_checkpoint("llama2"), "F32")
    del tensors["blk.1.attn_v.weight"]
    tensors["blk.0.extra.weight"] = ("F32", (3,), np.zeros(3, np.float32))
    with pytest.raises(ModelError, match=r"missing: blk.1.attn_v.weight \[32, 64\]") as caught:
        load_model(model_directory(written(tmp_path, "llama2", tensors)))
    assert "unexpected: blk.0.extra.weight [3]" in str(caught.value)


def test_adapters_and_quantising_anew_are_refused(tmp_path: Path) -> None:
    stored, _ = mixed(cached_checkpoint("llama2"))
    directory = model_directory(written(tmp_path, "llama2", stored))
    with pytest.raises(ModelError, match="GGUF, whose layers LoRA adapters don't name"):
        find_model(EngineConfig(model=directory, lora=LoraConfig()))
    with pytest.raises(ModelError, match="quantised by gguf already: leave it out"):
        find_model(EngineConfig(model=directory, quantize="int8"))


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    tensors = llama_tensors(cached_checkpoint("llama2"), "F32")
    first = model_directory(written(tmp_path, "llama2", tensors))
    assert model_directory(tmp_path / "model.gguf") == first
    assert model_directory(tmp_path) == first, "a directory with nothing else"
    again = model_directory(written(tmp_path, "llama2", tensors, **{"general.name": "other"}))
    assert again != first
