"""Settings of families whose repositories have code of their own, which isn't run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmi_core.models.found_model import find_model
from lmi_core.models.registry import unsupported_setting
from lmi_core.quantize.gguf.metadata import architecture_of
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.weights.hf_config import read_hf_config
from tests.checkpoints import cached_checkpoint
from tests.loading import load_model
from tests.models.forward import NativeForward, all_logits
from tests.models.test_parity import oracle_logits
from tests.tiny_tokenizer import write_tokenizer

torch = pytest.importorskip("torch")


def with_settings(directory: Path, variant: str, **settings: Any) -> Path:
    path = shutil.copytree(cached_checkpoint(variant), directory / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | settings))
    return path


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    path = with_settings(tmp_path, "internlm2", auto_map={"AutoModelForCausalLM": "m.InternLM2"})
    (path / "m.py").write_text("raise SystemExit")
    [note] = find_model(EngineConfig(model=path)).notes
    assert note.startswith("the code that comes with the model isn't run")


def test_chatglms_first_name_generates(tmp_path: Path) -> None:
    path = with_settings(tmp_path, "chatglm2", architectures=["ChatGLMModel"])
    assert load_model(path).pooling is None


@pytest.mark.parametrize(
    ("name", "kind", "theta"),
    [("THUDM/chatglm2-6b-32k", "linear", 1e4), ("THUDM/chatglm3-6b-32k", "default", 5e5)],
)
def test_what_rope_ratio_is_of(name: str, kind: str, theta: float, tmp_path: Path) -> None:
    spec = load_model(with_settings(tmp_path, "chatglm3_32k", _name_or_path=name)).spec
    assert (spec.ropes[0].kind, spec.ropes[0].theta, spec.max_positions) == (kind, theta, 512)


@pytest.mark.parametrize(
    ("variant", "theta"),
    [("chatglm3_32k", 5e5), ("internlm", 9e3), ("qwen", 9e3), ("dbrx", 5e5), ("exaone", 5e5)],
)
def test_scaling_that_is_asked_for_keeps_the_models_theta(variant: str, theta: float) -> None:
    asked = EngineConfig(model=cached_checkpoint(variant), rope_scaling="linear", rope_factor=2.0)
    rope = find_model(asked).spec.ropes[0]
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, theta)


def test_qwens_contexts_end_where_its_scores_would_change(tmp_path: Path) -> None:
    found = find_model(EngineConfig(model=cached_checkpoint("qwen")))
    assert found.spec.max_positions == 256
    assert found.notes == (
        "use_dynamic_ntk and use_logn_attn: not supported beyond seq_length, contexts end at 256 "
        "tokens",
    )
    path = with_settings(tmp_path, "qwen", use_dynamic_ntk=False, use_logn_attn=False)
    assert load_model(path).spec.max_positions == 512


@pytest.mark.parametrize(
    ("variant", "setting"),
    [
        ("chatglm2", {"position_encoding_2d": True}),
        ("chatglm2", {"pre_seq_len": 128}),
        ("chatglm2", {"quantization_bit": 4}),
        ("qwen", {"visual": {"layers": 48}}),
        ("minicpm", {"num_experts": 8}),
    ],
)
def test_relatives_that_there_arent_are_told_by_their_setting(
    variant: str, setting: dict[str, Any], tmp_path: Path
) -> None:
    config = read_hf_config(with_settings(tmp_path, variant, **setting))
    [key] = setting
    assert str(unsupported_setting(config)).startswith(f"{key} is ")


def test_exaone_as_transformers_knows_and_saves_it(tmp_path: Path) -> None:
    """As a Llama: our reference's checkpoint, and that name over EXAONE's tensors."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "ExaoneConfig"):
        pytest.skip("this Transformers doesn't have EXAONE 3")
    path = cached_checkpoint("exaone")
    model = transformers.LlamaForCausalLM.from_pretrained(
        path, config=transformers.ExaoneConfig.from_pretrained(path), dtype=torch.float64
    )
    ids = [list(range(4, 100))]
    [exact] = oracle_logits(model, ids)
    saved = tmp_path / "saved"
    model.float().save_pretrained(saved)
    write_tokenizer(saved)
    assert read_hf_config(saved).values["architectures"] == ["LlamaForCausalLM"]
    for directory in (path, saved):
        loaded = load_model(directory)
        assert loaded.spec.architecture == "ExaoneForCausalLM"
        [logits] = all_logits(NativeForward(loaded, 128, "fp32"), ids, max_chunk=48)
        assert np.abs(logits - exact).max() <= 1e-4 * exact.std()


@pytest.mark.parametrize("variant", ["falcon_7b", "falcon_40b", "falcon_rw"])
def test_falcons_first_names_are_those_of_today(variant: str, tmp_path: Path) -> None:
    path = with_settings(tmp_path, variant, architectures=["RWForCausalLM"])
    today = find_model(EngineConfig(model=cached_checkpoint(variant))).spec
    config = json.loads((path / "config.json").read_text())
    for old, key in (("n_head", "num_attention_heads"), ("n_layer", "num_hidden_layers")):
        config[old] = config.pop(key)
    kv_heads = config.pop("num_kv_heads")
    if config.pop("new_decoder_architecture"):
        config["n_head_kv"] = kv_heads
    (path / "config.json").write_text(json.dumps(config))
    old = find_model(EngineConfig(model=path))
    assert replace(old.spec, architecture="FalconForCausalLM") == today
    assert architecture_of(old) == "falcon"


def test_llamas_first_name(tmp_path: Path) -> None:
    path = with_settings(tmp_path, "llama1", architectures=["LLaMAForCausalLM"])
    found = find_model(EngineConfig(model=path))
    assert (found.spec.family, architecture_of(found)) == ("llama", "llama")
