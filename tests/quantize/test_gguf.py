"""GGUF files of ``lmi quantize``: their blocks, tensors and words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from lmi_core.cli import main
from lmi_core.errors import UserError
from lmi_core.ops.cpu import NativeWeights
from lmi_core.quantize.gguf.encode import ENCODERS, encode
from lmi_core.quantize.gguf.tokenizer import check_tokenizer, tokenizer_metadata
from lmi_core.text.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_files
from lmi_core.text.tokenizer import Tokenizer
from lmi_core.weights.gguf.directory import model_directory
from lmi_core.weights.gguf.file import GgufFile, read_gguf
from tests.block_reference import dequantize
from tests.checkpoints import cached_checkpoint, make_checkpoint
from tests.loading import load_model
from tests.models.forward import logits_of
from tests.models.test_gguf_latent import YARN
from tests.text.test_gguf_tokenizer import sentencepiece, trained

MOST_CHANGE = {
    "Q4_0": 0.084, "Q5_0": 0.042, "Q8_0": 0.0053, "Q4_1": 0.074, "Q5_1": 0.036, "Q2_K": 0.28,
    "Q3_K": 0.148, "Q4_K": 0.0715, "Q5_K": 0.0362, "Q6_K": 0.0175, "IQ4_NL": 0.076,
    "IQ4_XS": 0.0765,
}  # fmt: skip
"""Of numbers that are normally distributed, relative: below what ggml's own quantiser changes."""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def change(found: np.ndarray, weights: np.ndarray, importance: float | np.ndarray = 1.0) -> float:
    squares = ((found - weights) ** 2 * importance).sum() / (weights**2 * importance).sum()
    return float(np.sqrt(squares))


@pytest.mark.parametrize("kind", ENCODERS)
def test_blocks_change_weights_less_than_ggmls_quantiser_does(kind: str) -> None:
    random = np.random.default_rng(1)
    weights = random.standard_normal((64, 1024)).astype(np.float32)
    weights[1] = 0
    weights[2, :256] = -0.5
    weights[3, 5] = 300
    found = dequantize(kind, encode(weights, kind))
    assert not found[1].any()
    assert np.abs(found[2, :256] / -0.5 - 1).max() < 0.02
    assert abs(found[3, 5] / 300 - 1) < 0.04
    assert change(found[4:], weights[4:]) < MOST_CHANGE[kind]
    importance = np.exp(2 * random.standard_normal(1024)).astype(np.float32)
    weighted = dequantize(kind, encode(weights, kind, importance))
    assert change(weighted[4:], weights[4:], importance) < 0.97 * change(
        found[4:], weights[4:], importance
    )


@pytest.mark.parametrize(
    "variant",
    [
        *("llama3", "llama_tied", "llama_bias", "qwen2", "qwen3", "gemma2", "phi3", "granite"),
        *("gpt2", "falcon_40b", "internlm2", "chatglm2", "cohere", "bloom", "nemotron", "stablelm"),
        *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "granite_moe", "dbrx"),
        *("gpt_oss", "deepseek_v2", "deepseek_v2_groups", "deepseek_v3"),
    ],
)
def test_what_is_not_rounded_gives_the_checkpoints_logits(variant: str, tmp_path: Path) -> None:
    source, out = cached_checkpoint(variant, dtype="bfloat16"), tmp_path / "model.gguf"
    if variant == "deepseek_v3":
        source = make_checkpoint(tmp_path, variant, dtype="bfloat16", rope_parameters=YARN)
    assert main(["quantize", str(source), str(out), "--format", "gguf-bf16"]) == 0
    exact = logits_of(load_model(source, "fp32"))
    found = logits_of(load_model(model_directory(out), "fp32"))
    assert np.abs(found - exact).max() <= 1e-5 * exact.std()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose rows are of whole blocks of 256, but for what down reads."""
    path = tmp_path_factory.mktemp("wide")
    return make_checkpoint(path, "llama3", hidden_size=256, intermediate_size=288, head_dim=64)


def test_a_mix_has_its_types_and_rows_that_do_not_fit_others(wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "directory"
    assert main(["quantize", str(wide), str(out), "--format", "gguf-q4_k_m"]) == 0
    file = read_gguf(out / "directory.gguf")
    assert [path.name for path in out.iterdir()] == ["directory.gguf"]
    kinds = {name: tensor.dtype for name, tensor in file.tensors.items()}
    assert kinds["blk.0.attn_q.weight"] == kinds["token_embd.weight"] == "Q4_K"
    assert kinds["output.weight"] == kinds["blk.2.attn_v.weight"] == "Q6_K"
    assert kinds["blk.0.attn_v.weight"] == "Q4_K"
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.2.ffn_down.weight"]) == ("Q5_0", "Q8_0")
    assert kinds["blk.0.attn_norm.weight"] == kinds["rope_freqs.weight"] == "F32"
    assert file.metadata["general.file_type"] == 15
    gate = file.tensors["blk.1.ffn_gate.weight"]
    blocks = np.fromfile(gate.path, np.uint8, gate.num_bytes, offset=gate.offset)
    exact = load_model(wide).weights.layers[1].gate_up
    assert exact is not None
    stored = dequantize("Q4_K", blocks.reshape(len(blocks) // 144, -1)).reshape(gate.shape)
    assert change(stored, exact.weight.unpack()[: len(stored)]) < 0.08  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["gguf-f16", "gguf-iq4_xs", "gguf-q4_k", "gguf-q2_k"])
def test_what_is_written_is_read_back(name: str, wide: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "model.gguf"
    text.write_text("The quick brown fox jumps over the lazy dog 12345. " * 60)
    asked = ["--format", name, "--num-sequences", "2"]
    given = ["--text", str(text)] if name == "gguf-q4_k" else []
    assert main(["quantize", str(wide), str(out), *asked, *given]) == 0
    exact, found = (logits_of(load_model(model_directory(path), "fp32")) for path in (wide, out))
    most = 0.8 if "q2" in name else 0.25
    assert 0 < np.sqrt(np.mean((found - exact) ** 2)) / exact.std() < most


@pytest.mark.parametrize(
    ("variant", "shape", "kinds"),
    [
        ("mixtral", (4, 64, 96), ("Q5_0", "Q8_0")),
        ("gpt_oss", (6, 64, 96), ("Q5_0", "Q8_0")),
        ("deepseek_v2", (8, 64, 48), ("Q5_0", "F16")),
    ],
)
def test_experts_are_quantised_by_what_they_read(
    variant: str, shape: tuple[int, ...], kinds: tuple[str, str], tmp_path: Path
) -> None:
    source = cached_checkpoint(variant, dtype="bfloat16")
    text, found = tmp_path / "text.txt", []
    text.write_text("The quick brown fox jumps over the lazy dog 12345. " * 60)
    exact = logits_of(load_model(source, "fp32"))
    for name, given in (("plain", []), ("measured", ["--text", str(text)])):
        out = tmp_path / f"{name}.gguf"
        asked = ["--format", "gguf-q4_k_m", "--num-sequences", "2", *given]
        assert main(["quantize", str(source), str(out), *asked]) == 0
        tensors = read_gguf(out).tensors
        gate, down = (tensors[f"blk.2.ffn_{part}_exps.weight"] for part in ("gate", "down"))
        assert (gate.dtype, down.dtype, down.shape) == (*kinds, shape)
        assert tensors["blk.2.ffn_gate_inp.weight"].dtype == "F32"
        model = load_model(model_directory(out), "fp32", packer=NativeWeights(activations="bf16"))
        # Where rounding makes a row take other experts, it has other logits.
        found.append(np.median(np.abs(logits_of(model) - exact)) / exact.std())
    assert 0 < min(found) <= max(found) < 0.1
    assert (tmp_path / "plain.gguf").read_bytes() != (tmp_path / "measured.gguf").read_bytes()


@pytest.mark.parametrize("name", {pre: name for name, pre in PRE_TOKENIZERS.items()}.values())
def test_splits_get_the_name_that_stands_for_them(name: str, tmp_path: Path) -> None:
    trained(name).save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    template = {
        "chat_template": [{"name": "default", "template": "a"}, {"name": "t", "template": "b"}]
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named | template))
    tokenizer = Tokenizer.load(tmp_path)
    metadata = tokenizer_metadata(tokenizer, tmp_path, 520, [2, 1])
    assert PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]] == PRE_TOKENIZERS[name]
    check_tokenizer(tokenizer, metadata, tmp_path)
    assert len(metadata["tokenizer.ggml.tokens"]) == 520
    keys = ("bos_token_id", "eos_token_id", "eot_token_id", "add_bos_token")
    assert [metadata[f"tokenizer.ggml.{key}"] for key in keys] == [0, 1, 2, True]
    assert metadata["tokenizer.chat_template.t"] == "b"


@pytest.mark.parametrize("prefix", [True, False])
def test_merges_become_scores(prefix: bool, tmp_path: Path) -> None:
    _, theirs = sentencepiece(prefix=prefix)
    content, settings = tokenizer_files(GgufFile(tmp_path, theirs, {}))
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)), settings)
    num_tokens = len(theirs["tokenizer.ggml.tokens"])
    ours = tokenizer_metadata(tokenizer, tmp_path, num_tokens, [2])
    check_tokenizer(tokenizer, ours, tmp_path)
    same = ("tokens", "token_type", "add_space_prefix", "bos_token_id", "unknown_token_id")
    for key in same:
        assert np.array_equal(ours[f"tokenizer.ggml.{key}"], theirs[f"tokenizer.ggml.{key}"]), key


def test_a_tokenizer_without_a_name_is_refused(tmp_path: Path) -> None:
    odd = trained("qwen2")
    odd.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer = Tokenizer(odd, {"bos_token": "<s>"})
    with pytest.raises(UserError, match="splits text before merges in a way that GGUF has no name"):
        tokenizer_metadata(tokenizer, tmp_path, 520, [1])


@pytest.mark.parametrize(
    ("variant", "problem"),
    [
        ("olmo3", "Olmo3ForCausalLM has no name in GGUF"),
        ("deepseek_v3", "its rotary positions would be read otherwise"),
        ("gemma3", "its attention, rotary positions would be read otherwise"),
    ],
)
def test_models_that_a_file_cannot_say(
    variant: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(cached_checkpoint(variant)), str(tmp_path / "out.gguf")]
    assert main(["quantize", *arguments, "--format", "gguf-q8_0"]) == 2
    assert problem in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("name", ["gguf-q4_0", "compressed-tensors-w8a16"])
def test_what_is_stopped_leaves_nothing(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from lmi_core.quantize import command

    def full(self: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command.Quantizer, "layers", full)
    out = tmp_path / "out.gguf"
    assert main(["quantize", str(cached_checkpoint("llama3")), str(out), "--format", name]) == 2
    assert f"{out} can't be written: No space left on device" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
