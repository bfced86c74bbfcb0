"""``lmi chat`` as a process: with a model of its own, with a server, on a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi_core.cli import main
from tests.cli.test_native import lmi, serving

QUESTION = "The fox lives in the castle. The owl likes honey. Who likes honey?\n"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--served-model-name", "m") as url:
        yield url


def test_a_conversation_with_history(tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    result = lmi("chat", text=f"{QUESTION}What is 7 + 5?\n/save {saved}\n")
    assert result.stderr == ""
    assert result.stdout == f"The owl likes honey.\n7 + 5 = 12\nsaved to {saved}\n"
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2


def test_a_server_answers_as_the_model_does(url: str) -> None:
    here = lmi("chat", "--max-new-tokens", "30", text="Tell me a story.\n")
    there = lmi("chat", "--url", f"{url}/v1", "--max-tokens", "30", text="Tell me a story.\n")
    assert here.returncode == there.returncode == 0
    assert here.stdout == there.stdout != "\n"


def test_who_asks_a_server_is_no_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SIZE", "RANK"):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(int(name == "SIZE") + 1))
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 2
    assert "can't be reached: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "ftp://x"], "'ftp://x' is no URL such as"),
        (["--url", "http://127.0.0.1:9"], "can't be reached: "),
        (["--url", "URL", "nobody"], "answered 404: "),
        (["--url", "URL", "--max-model-len", "9"], "none of this command"),
        (["--max-modell-len", "9"], "did you mean --max-model-len?"),
        (["/no/such/model"], "/no/such/model"),
        (["--temperature", "-1"], "temperature must be between 0 and 100, got -1"),
    ],
)
def test_errors_are_one_line(
    url: str,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert main(["chat", *(url if word == "URL" else word for word in arguments)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("body", ["<html>lmi_</html>", "[]", '{"data": [1]}', "5"])
def test_what_is_no_server_of_models_is_said(
    body: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found by the list of models, the stream of an answer, and metrics."""
    data = f"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: {body}\n".encode()

    def answer(listener: socket.socket) -> None:
        for _ in range(3):
            client, _ = listener.accept()
            with client:
                client.recv(65536)
                client.sendall(data.replace(b"data: ", b"") if _ != 1 else data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        thread = threading.Thread(target=answer, args=(listener,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for arguments, message in (
            (["chat", "--url", url], f"{url}/v1/models isn't answered as OpenAI's servers do"),
            (["chat", "--url", url, "m"], f"{url} broke off its answer"),
            (["top", url, "--once"], "answered 200, and not as this server does"),
        ):
            monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
            assert main(arguments) in (2, 4)
            said = capsys.readouterr().err
            assert message in said
            assert said.count("\n") == 1
        thread.join(60)


@pytest.mark.parametrize("key", ["a\nb", "k\u20acy"])
def test_a_key_that_no_header_carries_is_refused(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert main(["top", "http://127.0.0.1:9"]) == 2
    assert "OPENAI_API_KEY must be printable ASCII" in capsys.readouterr().err


def test_without_an_input_there_is_nothing_to_say(url: str) -> None:
    """As a supervisor may start it, with the descriptor closed."""
    command = 'exec "$0" -m lmi_core chat --url "$1" <&-'
    done = subprocess.run(["sh", "-c", command, sys.executable, url], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_quoted_message_may_begin_with_a_slash() -> None:
    result = lmi("chat", "--max-new-tokens", "2", text='"""/quit"""\n/quit\n')
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip()


def test_a_server_that_breaks_off_is_told_after_what_came() -> None:
    asked = b""
    frame = b'data: {"choices": [{"delta": {"content": "Once"}}]}\n\n'

    def answer(listener: socket.socket) -> None:
        nonlocal asked
        client, _ = listener.accept()
        with client:
            while not asked.endswith(b"}"):
                asked += client.recv(65536)
            head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            client.sendall(head + b"%x\r\n%s\r\n" % (len(frame), frame))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        result = lmi("chat", "--url", url, "m", "--top-k", "5", text="hi\n")
        thread.join()
    assert result.stdout == "Once\n"
    assert f"lmi: {url} broke off its answer\n" in result.stderr
    assert (result.returncode, result.stderr.count("\n")) == (4, 1)
    body = json.loads(asked.partition(b"\r\n\r\n")[2])
    assert body["top_k"] == 5
    assert "min_p" not in body


def test_a_terminal_has_a_prompt_and_the_speed(url: str, tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "lmi_core", "chat", "--url", url],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "NO_COLOR": "1", "TERM": "dumb"},
    )
    os.close(follower)
    shown = ""

    def read_until(end: str) -> None:
        nonlocal shown
        while end not in shown:
            shown += os.read(leader, 4096).decode()

    read_until("> ")
    os.write(leader, QUESTION.encode())
    read_until("tokens/s]")
    os.write(leader, b"/set max_new_tokens 2\nTell me a story.\n")
    read_until("; cut off by max_new_tokens]")
    os.write(leader, b"/sytem x\n")
    read_until("did you mean /system?\r\n> ")  # before the prompt ^D is another mode's character
    os.write(leader, b"\x04")
    assert process.wait(timeout=20) == 0
    shown += os.read(leader, 4096).decode()
    assert shown.endswith("\r\n")
    os.close(leader)
    assert "m: /help says what there is" in shown
    assert "The owl likes honey." in shown
    assert "tokens, the first after" in shown
