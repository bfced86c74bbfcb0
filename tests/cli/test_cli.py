"""The command line: parsing, one-line errors, exit codes, cheap starts."""

from __future__ import annotations

import argparse
import io
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lmi_core import __version__
from lmi_core.cli import DEMO_MODEL, main
from lmi_core.errors import ConfigError, UserError
from lmi_core.local_model import open_local_model, parse_arguments
from lmi_core.progress import TerminalProgress


def lmi(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lmi_core", *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", **environ} if environ else None,
    )


def test_version() -> None:
    result = lmi("--version")
    assert (result.returncode, result.stdout) == (0, f"lmi {__version__}\n")


def test_version_is_cheap() -> None:
    """Neither numerics nor HTTP may be imported before a command needs them."""
    code = (
        "import sys\n"
        "from lmi_core.cli import build_parser\n"
        "build_parser()\n"
        "heavy = {'numpy', 'asyncio', 'aiohttp', 'jinja2', 'tokenizers', 'torch', 'msgspec'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n"


def test_server_needs_no_torch() -> None:
    code = "import sys, lmi_server.command; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "False\n"


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["bench"], ["top"], ["doctor"]])
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    assert "usage: lmi" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "required: COMMAND; see lmi --help"),
        (["bake"], "invalid choice: 'bake'"),
        (["serve", "--port", "70000"], "is out of range, allowed is integer 0 to 65535"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--threads", "0"], "allowed is integer 1 to 4096"),
        (["serve", "--dtype", "fp8"], "'fp8' is not one of auto"),
        (["serve", "--kv-cache-bytes", "lots"], "is not number of bytes such as"),
        (["serve", "--drain-timeout", "-1"], "allowed is integer >= 0"),
        (["serve", "--no-such"], "--no-such: unknown flag"),
        (["serve", "/no/such/model"], "/no/such/model: is neither a path that exists"),
        (["chta"], "did you mean chat?"),
        (["generate", "x", "--threads", "0"], "allowed is integer 1 to 4096"),
        (["generate", "x", "--dtype", "fp8"], "'fp8' is not one of auto"),
        (["generate", "x", "--kv-cache-bytes", "lots"], "is not number of bytes such as"),
        (["generate", "x", "--max-modell-len", "9"], "did you mean --max-model-len?"),
        (["generate", "x", "--chat", "--raw"], "not allowed with argument"),
    ],
)
def test_bad_arguments_are_one_line(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("lmi: ")
    assert stderr.count("\n") == 1
    assert words in stderr


def test_a_model_takes_the_flags_of_serving() -> None:
    options = (
        "--threads 3 --dtype half --max-model-len 512 -np 4 --kv-cache-bytes 64M "
        "--no-prefix-caching --no-overlap"
    )
    config = open_local_model([str(DEMO_MODEL), *options.split()], DEMO_MODEL).config
    assert config.model == DEMO_MODEL
    assert (config.num_threads, config.dtype, config.max_model_len) == (3, "bf16", 512)
    assert (config.max_num_seqs, config.kv_cache_bytes) == (4, 64 << 20)
    assert (config.enable_prefix_caching, config.overlap) == (False, False)


def test_arguments_are_parted_into_the_commands_own_and_the_models() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompt")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--chat", action="store_true")
    argv = "--dtype half --seed 3 -c 64 text --chat --no-overlap --lora-modules a=/x b=/y -- m"
    args, model = parse_arguments(parser, argv.split(), num_words=1)
    assert (args.prompt, args.seed, args.chat) == ("text", 3, True)
    assert model == [
        "--dtype",
        "half",
        "-c",
        "64",
        "--no-overlap",
        "--lora-modules",
        "a=/x",
        "b=/y",
        "m",
    ]


def test_several_models_are_refused_where_one_is_loaded() -> None:
    with pytest.raises(UserError, match="give one model; the configuration names a, b"):
        open_local_model(["-m", f"a={DEMO_MODEL}", f"b={DEMO_MODEL}"], DEMO_MODEL)


def test_help_of_serving_comes_from_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: lmi serve")
    assert "--max-batch-prefill-tokens" in text
    assert "--threads" in text


def test_port_in_use_is_reported_before_anything_loads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = lmi("serve", str(tmp_path), "--port", str(port))
    assert result.returncode == 2
    assert re.fullmatch(rf"lmi: Port {port} on 127\.0\.0\.1 is in use; .*\n", result.stderr)


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (UserError("x is\n wrong"), 2, "lmi: x is wrong\n"),
        (ConfigError("bad", problems=("a: 1", "b: 2")), 2, "lmi: a: 1; b: 2\n"),
        (
            RuntimeError("boom"),
            70,
            "lmi: internal error: RuntimeError: boom (LMI_DEBUG=1 shows where)\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(
    error: BaseException,
    exit_code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.delenv("LMI_DEBUG", raising=False)
    monkeypatch.setattr("lmi_core.cli._run", fail)
    assert main([]) == exit_code
    assert capsys.readouterr().err == line


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMI_DEBUG", "1")
    with pytest.raises(UserError):
        main(["bake"])


def test_output_to_a_closed_pipe_is_no_error() -> None:
    script = f"{sys.executable} -m lmi_core doctor | head -c 1 >/dev/null"
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60)
    assert result.stderr == ""


@pytest.mark.parametrize("is_buffered", [True, False])
def test_a_full_disk_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, *, is_buffered: bool
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "" if is_buffered else "1")
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "lmi_core", "doctor"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert result.returncode == 74
    assert result.stderr == "lmi: the output can't be written: No space left on device\n"


def test_what_the_outputs_encoding_lacks_is_escaped() -> None:
    named = ("-o", "option.modelName=caf\u00e9 \u4e2d")
    result = lmi("explain", *named, PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("model caf\\xe9 \\u4e2d\n")


def test_closed_output_is_no_error() -> None:
    script = f"{sys.executable} -m lmi_core doctor >&-"
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60)
    assert result.stderr == ""


def test_an_unknown_level_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LMI_INSTRUCTION_SET", "sse9")
    assert main(["generate", "x"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("lmi: LMI_INSTRUCTION_SET=sse9 is not available here; this machine")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/model", "/no/such/model: is neither a path that exists"),
        (__file__, f"{__file__}: isn't a directory; give one"),
    ],
)
def test_a_model_that_is_not_there(
    path: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x", "--model", path]) == 2
    assert capsys.readouterr().err.startswith(f"lmi: {message}")


def test_a_configuration_names_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "serving.properties").write_text(f"option.model_id={DEMO_MODEL}")
    assert main(["generate", "What is 7 + 5?", "--model", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "7 + 5 = 12\n"


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"\xff\xfe", "byte 0 is 0xff"), (b"ab \xc3(", "byte 3 is 0xc3")],
)
def test_a_prompt_from_standard_input_is_utf8(
    data: bytes, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert main(["generate", "-", "--raw"]) == 2
    assert said in capsys.readouterr().err


def test_a_prompt_of_other_bytes_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", os.fsdecode(b"ab \xff")]) == 2
    assert "the prompt isn't valid Unicode at character 3" in capsys.readouterr().err


def test_a_torch_device_without_torch_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "lmi_core.runners.device.device_runner", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["generate", "x", "--device", "torch-cpu"]) == 2
    assert "device=torch-cpu needs the 'cuda' extra" in capsys.readouterr().err


class Terminal:
    def __init__(self, *, is_terminal: bool) -> None:
        self.text = ""
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def progress_at(terminal: Terminal, seconds: list[float]) -> TerminalProgress:
    return TerminalProgress(terminal, now=iter(seconds).__next__)  # type: ignore[arg-type]


def test_progress_on_a_terminal_is_one_line_that_goes_away() -> None:
    terminal = Terminal(is_terminal=True)
    progress = progress_at(terminal, [0.0, 0.05, 2.0])
    for done in (0, 1 << 20, 10 << 20):
        progress("weights", done, 40 << 20)
    progress.finish()
    first, last = "Loading weights   0 % of 40 MiB", "25 % of 40 MiB, 5.0 MiB/s, 0:06 left"
    shown = terminal.text.split("\r")
    assert shown[:2] == ["", first]
    assert shown[2].strip() == f"Loading weights  {last}"
    assert shown[3].strip() == shown[4] == ""


def test_progress_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal(is_terminal=True)
    progress_at(terminal, [0.0])("a very long file's name.safetensors", 0, 40 << 20)
    assert terminal.text == "\rLoading a very long"


def test_progress_elsewhere_is_a_line_every_few_seconds() -> None:
    pipe = Terminal(is_terminal=False)
    progress = progress_at(pipe, [0.0, 1.0, 4.0, 5.0, 8.0])
    for done in (0, 10, 40, 50, 80):
        progress("weights", done << 20, 100 << 20)
    progress.finish()
    assert pipe.text == (
        "Loading weights  40 % of 100 MiB, 10 MiB/s, 0:06 left\n"
        "Loading weights  80 % of 100 MiB, 10 MiB/s, 0:02 left\n"
    )


def test_what_is_quick_is_silent_elsewhere() -> None:
    pipe = Terminal(is_terminal=False)
    progress = progress_at(pipe, [0.0, 1.0])
    progress("weights", 0, 10)
    progress("weights", 10, 10)
    progress.finish()
    assert pipe.text == ""
