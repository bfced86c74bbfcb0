"""``lmi quantize``: what it writes is read back, and what it can't write it says before."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmi_core.cli import main
from lmi_core.quantize.formats import FORMATS
from lmi_core.weights.checkpoint import read_checkpoint
from tests.checkpoints import cached_checkpoint, make_checkpoint
from tests.loading import load_model
from tests.models.forward import NativeForward, all_logits
from tests.models.test_expert_layouts import merged_experts


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    random = np.random.default_rng(1)
    path.write_text("".join(chr(code) for code in random.integers(32, 127, 4000)))
    return path


def logits_of(path: Path) -> np.ndarray:
    random = np.random.default_rng(2)
    sequences = [random.integers(4, 380, length).tolist() for length in (40, 17)]
    forward = NativeForward(load_model(path), 64, load_model(path).dtype)
    return np.concatenate(all_logits(forward, sequences, max_chunk=64))


@pytest.mark.parametrize("variant", ["llama3", "qwen2", "mixtral"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_read_back(
    name: str, variant: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = cached_checkpoint(variant, dtype="bfloat16"), tmp_path / "out"
    assert main(["quantize", str(path), str(out), "--format", name, "--text", str(text)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{out}: ")
    assert said.err.count("of what it adds is changed") == 3
    is_4_bits = name in ("gptq", "awq", "compressed-tensors", "compressed-tensors-w4a16")
    model = load_model(out)
    # These layers' inputs aren't multiples of 128, so that fp8 is widened.
    assert model.quantize == ("int4" if is_4_bits else None if "fp8" in name else "int8")
    exact = logits_of(path)
    change = np.sqrt(np.mean((logits_of(out) - exact) ** 2)) / exact.std()
    assert 0 < change < (0.4 if is_4_bits else 0.15 if "fp8" in name else 0.05)
    assert {file.name for file in out.iterdir()} >= {"config.json", "tokenizer.json"}
    assert list(tmp_path.iterdir()) == [out]


def test_what_stands_beside_is_left_alone(tmp_path: Path) -> None:
    """Also where it has the name of something unfinished."""
    other = tmp_path / "out.partial" / "notes.txt"
    other.parent.mkdir()
    other.write_text("mine")
    path, out = cached_checkpoint("llama3"), tmp_path / "out"
    assert main(["quantize", str(path), str(out), "--format", "compressed-tensors-w8a16"]) == 0
    assert other.read_text() == "mine"
    assert out.stat().st_mode & 0o777 == other.parent.stat().st_mode & 0o777


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_is_unfinished_goes_with_a_signal(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kill can't be heard: the next run tells of what it left."""
    path, out, text = cached_checkpoint("llama3"), tmp_path / "out", tmp_path / "text"
    os.mkfifo(text)  # which is waited for
    asked = ["quantize", str(path), str(out), "--format"]
    # A job in the background of a shell, as tests may be, ignores SIGINT, and so do its children.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "lmi_core", *asked]
    command += ["gptq", "--text", str(text)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not list(tmp_path.glob("out.partial-*/out")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    left = [each for each in tmp_path.iterdir() if each != text]
    if number != signal.SIGKILL:
        assert (process.returncode, said, left) == (128 + number, "", [])
        return
    [partial] = left
    assert partial.name.startswith("out.partial-")
    assert main([*asked, "compressed-tensors-w8a16"]) == 0
    assert capsys.readouterr().err.startswith(f"{partial} was left by a run that was killed, or")
    assert partial.is_dir()


def test_reordered_inputs_are_read_back(text: Path, tmp_path: Path) -> None:
    path, out = cached_checkpoint("llama3"), tmp_path / "out"
    asked = ["--format", "gptq", "--act-order", "--text", str(text), "--num-sequences", "2"]
    assert main(["quantize", str(path), str(out), *asked]) == 0
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["desc_act"] is True
    exact, found = logits_of(path), logits_of(out)
    assert 0 < np.sqrt(np.mean((found - exact) ** 2)) / exact.std() < 0.4


def test_a_layer_is_the_codes_of_its_own_weights(tmp_path: Path) -> None:
    """Rounded to the nearest: on average weights move by a quarter of a step."""
    path, out = cached_checkpoint("llama3"), tmp_path / "out"
    main(["quantize", str(path), str(out), "--format", "compressed-tensors", "--group-size", "32"])
    exact, found = (load_model(each).weights.layers[1].down for each in (path, out))
    assert exact is not None
    assert found is not None
    weights, read = exact.weight.unpack(), found.weight.unpack()  # type: ignore[union-attr]
    most = np.abs(weights.reshape(len(weights), -1, 32)).max(axis=2).repeat(32, axis=1)
    assert 0.15 < np.mean(np.abs(read - weights) / (most / 7.5)) < 0.27
    names = {name.rpartition(".")[2] for name in read_checkpoint(out)}
    assert names == {"weight", "weight_packed", "weight_scale", "weight_shape"}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--format", "gptq"], "--format gptq needs --text FILE"),
        (["--format", "awq", "--text", "absent"], "--text absent can't be read"),
        (["--format", "gguf"], "invalid choice: 'gguf'"),
        (["--format", "gptq", "--num-sequences", "0"], "needs --text FILE"),
        (["--format", "gguf-q4_0", "--act-order"], "--act-order has no meaning"),
        (["--format", "compressed-tensors-fp8", "--group-size", "32"], "no meaning"),
    ],
)
def test_arguments_that_do_not_go(
    arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(cached_checkpoint("llama3")), str(out), *arguments]) == 2
    assert problem in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variant", "name", "problem"),
    [
        ("granite_moe", "gptq", "in common tensors, and no linears of each expert are known"),
        ("dbrx", "compressed-tensors", "in common tensors, and no linears of each expert"),
        ("gpt_oss", "awq", "can't be divided by AWQ's factors: write gptq"),
        ("gpt2", "compressed-tensors", "has no linears as these formats know them"),
    ],
)
def test_models_that_are_not_written(
    variant: str,
    name: str,
    problem: str,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [str(cached_checkpoint(variant)), str(tmp_path / "out"), "--text", str(text)]
    assert main(["quantize", *arguments, "--format", name]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed-tensors-w8a8"])
@pytest.mark.parametrize("variant", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_is_written_but_for_its_way_back(
    name: str, variant: str, text: Path, tmp_path: Path
) -> None:
    """Layers' inputs are of groups of 32 here."""
    shape = {"q_lora_rank": 32 if variant == "deepseek_v3" else None, "v_head_dim": 16}
    path, out = tmp_path / "model", tmp_path / "out"
    make_checkpoint(path, variant, dtype="bfloat16", moe_intermediate_size=32, **shape)
    asked = ["--format", name, "--text", str(text), "--num-sequences", "2"]
    assert main(["quantize", str(path), str(out), *asked]) == 0
    names = read_checkpoint(out)
    prefix = "model.layers.1.self_attn."
    assert f"{prefix}kv_b_proj.weight" in names
    assert names.keys() & {
        f"{prefix}kv_a_proj_with_mqa.{end}" for end in ("qweight", "weight_scale")
    }
    exact, found = logits_of(path), logits_of(out)
    assert 0 < np.sqrt(np.mean((found - exact) ** 2)) / exact.std() < (0.1 if "w8" in name else 0.5)


def test_experts_of_common_tensors_get_their_own(text: Path, tmp_path: Path) -> None:
    """With the codes that they would get where they have some."""
    source, merged = cached_checkpoint("qwen3_moe"), tmp_path / "merged"
    shutil.copytree(source, merged)
    save_file(merged_experts(source), merged / "model.safetensors")
    asked = ["--format", "compressed-tensors-w8a16", "--text", str(text), "--num-sequences", "2"]
    outs = [tmp_path / "first", tmp_path / "second"]
    for path, out in zip((source, merged), outs, strict=True):
        assert main(["quantize", str(path), str(out), *asked]) == 0
    wanted, found = (load_file(out / "model.safetensors") for out in outs)
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", ["gptq", "compressed-tensors-w8a16"])
def test_gates_and_ups_in_turns_stay_so(name: str, text: Path, tmp_path: Path) -> None:
    """gpt-oss', where its experts are taken apart."""
    path, out = cached_checkpoint("gpt_oss", dtype="bfloat16"), tmp_path / "out"
    asked = ["--format", name, "--text", str(text), "--num-sequences", "2"]
    assert main(["quantize", str(path), str(out), *asked]) == 0
    names = read_checkpoint(out)
    mlp = "model.layers.1.mlp."
    suffix = "qweight" if name == "gptq" else "weight_packed"
    for module in ("gate_up_projs.3", "down_projs.5"):
        assert {f"{mlp}experts.{module}.{suffix}", f"{mlp}experts.{module}.bias"} <= names.keys()
    assert f"{mlp}router.linear.weight" in names
    exact, found = logits_of(path), logits_of(out)
    # Where rounding makes a row take other experts, it has other logits.
    assert 0 < np.median(np.abs(found - exact)) / exact.std() < (0.3 if name == "gptq" else 0.05)


def test_scored_shared_experts_are_written_and_routers_are_left(text: Path, tmp_path: Path) -> None:
    """Also with a text that most experts get few rows of."""
    path, out = cached_checkpoint("qwen2_moe", dtype="bfloat16"), tmp_path / "out"
    asked = ["--format", "compressed-tensors-w8a16", "--text", str(text), "--num-sequences", "1"]
    assert main(["quantize", str(path), str(out), *asked]) == 0
    names = read_checkpoint(out)
    mlp = "model.layers.1.mlp."
    for module in ("experts.7.down_proj", "shared_expert.up_proj"):
        assert f"{mlp}{module}.weight_packed" in names
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    routers = [f"{mlp}gate", f"{mlp}shared_expert_gate"]
    assert settings["ignore"] == ["lm_head", *routers]
    assert all(f"{name}.weight" in names for name in routers)
    exact, found = logits_of(path), logits_of(out)
    assert 0 < np.sqrt(np.mean((found - exact) ** 2)) / exact.std() < 0.05


def test_what_is_quantised_or_there_already_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    asked = ["--format", "compressed-tensors-w8a16"]
    assert main(["quantize", str(cached_checkpoint("llama3")), first, *asked]) == 0
    config = json.loads(Path(first, "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"
    assert main(["quantize", first, second, *asked]) == 2
    assert "it is quantised already" in capsys.readouterr().err
    assert main(["quantize", str(cached_checkpoint("llama3")), first, *asked]) == 2
    assert "exists already" in capsys.readouterr().err
