"""The commands on the lmi engine, with a tiny random model: what a user runs, as processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

import pytest

from lmi_core.cli import main
from tests.checkpoints import cached_checkpoint

pytestmark = pytest.mark.timeout(180)


def lmi(
    *args: str, text: str = "", environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lmi_core", *args],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        input=text,
    )


@pytest.fixture(scope="module")
def model() -> str:
    return str(cached_checkpoint("llama2"))


@contextmanager
def serving(
    *args: str, environ: dict[str, str] | None = None, log: TextIO | None = None
) -> Iterator[str]:
    """The URL of a server process; it must end cleanly on SIGTERM. Its log goes to ``log``."""
    # A file: a server whose log nobody reads from a pipe stops when the pipe is full.
    with nullcontext(log) if log else tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lmi_core", "serve", *args, "--port", "0"],
            env={**os.environ, **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            match = re.fullmatch(r"Listening on (https?://127\.0\.0\.1:\d+)\n", first)
            assert match, first
            yield match[1]
            process.terminate()
            process.communicate(timeout=30)
            assert process.returncode == 0
            log.seek(0)
            assert "Traceback" not in log.read()
        finally:
            process.kill()
            process.communicate()


def post(url: str, body: object) -> tuple[int, str]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_generate_is_repeatable(model: str) -> None:
    results = [lmi("generate", "hello", "--model", model, "--max-new-tokens", "6") for _ in "ab"]
    assert [result.returncode for result in results] == [0, 0]
    assert results[0].stdout == results[1].stdout != "\n"
    assert results[0].stderr == ""


def test_generate_reads_standard_input_and_samples(model: str) -> None:
    options = ["--model", model, "--raw", "--temperature", "1", "--max-new-tokens", "6", "--stats"]
    texts = {
        seed: lmi("generate", "-", *options, "--seed", seed, text="hello") for seed in ("1", "2")
    }
    assert texts["1"].stdout != texts["2"].stdout
    assert re.search(r"\d+ prompt tokens, first token after .* s; 6 tokens", texts["1"].stderr)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["x", "--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["x", "--top-p", "3"], "top_p must be above 0"),
        (["x" * 5000], "tokens"),
        (["x", "--raw", "--system", "be brief"], "--system needs a chat template"),
        (["x", "--instruction-set", "vax"], "vax"),
    ],
)
def test_generate_errors_are_one_line(
    model: str, args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *args, "--model", model]) == 2
    said = capsys.readouterr().err
    assert said.startswith("lmi: ")
    assert said.count("\n") == 1
    assert words in said


@pytest.mark.parametrize("command", [["serve"], ["generate", "x", "--model"]])
def test_missing_model_is_one_line(command: list[str], tmp_path: Path) -> None:
    for directory in (tmp_path / "none", tmp_path):
        result = lmi(*command, str(directory))
        assert result.returncode == 2
        assert str(directory) in result.stderr
        assert result.stderr.count("\n") == 1


def test_serve(model: str) -> None:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 5, "details": True}}
    name = re.sub(r"\W", "_", Path(model).name)  # as DJL-Serving names a model's directory
    with serving(model, "--threads", "1") as url:
        status, whole = post(f"{url}/invocations", body)
        assert status == 200
        status, lines = post(f"{url}/invocations", {**body, "stream": True})
        last = json.loads(lines.splitlines()[-1])
        assert last["generated_text"] == json.loads(whole)["generated_text"]
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        status, answer = post(f"{url}/predictions/{name}", chat)
        assert status == 200, answer
        assert (status, json.loads(answer)["usage"]["completion_tokens"]) == (200, 3)
        too_long = {"inputs": "x" * 5000}
        status, answer = post(f"{url}/invocations", too_long)
        assert (status, json.loads(answer)["code"]) == (424, 424)
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
            metrics = response.read().decode()
        assert f'lmi_kv_blocks{{model_name="{name}",state="used"}} 0.0' in metrics
        assert f'lmi_generated_tokens_total{{model_name="{name}"}} 13.0' in metrics


@pytest.fixture
def configured(model: str, tmp_path: Path) -> Path:
    """The model beside a serving.properties, in a directory of its own."""
    directory = tmp_path / "configured"
    directory.mkdir()
    for path in Path(model).iterdir():
        (directory / path.name).symlink_to(path)
    (directory / "serving.properties").write_text(
        "engine=MPI\noption.rolling_batch=lmi-dist\noption.dtype=fp32\n"
        "option.output_formatter=jsonlines\noption.max_model_len=24\n"
    )
    return directory


def test_serve_a_configured_directory(configured: Path) -> None:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 2}}
    environ = {"OPTION_OUTPUT_FORMATTER": "json", "SERVING_LOAD_MODELS": f"test::MPI={configured}"}
    with serving(environ=environ) as url:
        status, lines = post(f"{url}/predictions/test", body)
        assert status == 200
        assert sorted(json.loads(lines.splitlines()[0])) == ["token"]
        status, answer = post(f"{url}/invocations", {"inputs": "x" * 200})
        assert (status, "24" in answer) == (424, True)


def test_serve_from_a_launchers_command_line(model: str) -> None:
    arguments = ("--model-id", model, "--num-shard", "1", "--max-total-tokens", "24")
    with serving(*arguments, "--hostname", "127.0.0.1") as url:
        status, answer = post(f"{url}/generate", {"inputs": "x" * 200})
        assert (status, "24" in answer) == (422, True)


@pytest.mark.parametrize(
    ("form", "arguments"),
    [("awq", ()), ("gptq", ("--quantize", "gptq")), ("packed", ("--device", "cpu")), ("int8", ())],
)
def test_serve_a_checkpoint_in_integers(
    tmp_path: Path, form: str, arguments: tuple[str, ...]
) -> None:
    checkpoints = pytest.importorskip("tests.integer_checkpoints")
    path, _ = checkpoints.make_integer_checkpoint(tmp_path / "model", checkpoints.FORMS[form])
    with serving(str(path), *arguments) as url:
        asked = {"inputs": "abc", "parameters": {"max_new_tokens": 4, "details": True}}
        status, answer = post(f"{url}/invocations", asked)
        assert status == 200
        assert json.loads(answer)["details"]["generated_tokens"] <= 4
        assert "generated_text" in json.loads(answer)


def test_serving_what_is_not_available_says_all_of_it(configured: Path) -> None:
    with (configured / "serving.properties").open("a") as properties:
        properties.write("option.quantize=awq\noption.max_sparsity=2\n")
    result = lmi("serve", str(configured))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "serving.properties:6: option.quantize=awq" in result.stderr
    assert "serving.properties:7: option.max_sparsity" in result.stderr


def test_load_with_aborts_leaves_nothing(model: str) -> None:
    with serving(model, "--log-level", "warning") as url:
        options = "--concurrency 60 --seconds 2 --abort 0.4 --max-new-tokens 16 --prompt-words 8"
        result = subprocess.run(
            [sys.executable, "bench/serving.py", "--url", url, "--json", *options.split()],
            capture_output=True,
            text=True,
            timeout=90,
        )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures["completed"] > 0
    assert figures["aborted"] > 0
    assert set(figures["left_over"].values()) == {0.0}
