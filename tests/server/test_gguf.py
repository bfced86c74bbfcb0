"""A model in GGUF, served over HTTP by the name of its file."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

import lmi_core
from lmi_core.cli import main
from tests.gguf_files import llama_metadata, llama_tensors, write_gguf
from tests.server.serve_process import serve

DEMO = Path(lmi_core.__file__).parent / "demo" / "model"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    metadata = llama_metadata(DEMO, pre="smollm", **{"tokenizer.ggml.eot_token_id": 1})
    return write_gguf(tmp_path / "demo-q8.gguf", metadata, llama_tensors(DEMO, "Q8_0"))


def test_a_file_is_served_with_its_tokenizer_and_template(path: Path) -> None:
    message = {"role": "user", "content": "What can you do?"}
    body = {"model": "demo_q8", "messages": [message], "max_tokens": 24, "temperature": 0}
    answers = []
    for model in (path, DEMO):
        name = "model" if model == DEMO else "demo_q8"
        with serve(model) as process:
            request = urllib.request.Request(
                f"{process.url}/v1/chat/completions",
                json.dumps(body | {"model": name}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                answers.append(json.load(response))
    ours, theirs = answers
    assert ours["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1], "8 bits change no token of a sure model"


def test_explain_says_what_is_in_it_and_agrees_with_the_loader(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "GGUF, tensors: 29 Q8_0, 9 F32; kept as stored, blocks multiplied with rows of 8" in out
    write_gguf(path, llama_metadata(DEMO, pre="smollm"), llama_tensors(DEMO, "F16"))
    assert main(["explain", str(path)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "weights  GGUF, tensors: 29 F16, 9 F32; kept as stored" in lines
    metadata = llama_metadata(DEMO, pre="smollm")
    del metadata["tokenizer.ggml.pre"]
    write_gguf(path, metadata, llama_tensors(DEMO, "F16"))
    assert main(["explain", str(path)]) == 0
    assert "it has no tokenizer.ggml.pre" in " ".join(capsys.readouterr().out.split())
    path.write_bytes(path.read_bytes()[:5000])
    assert main(["explain", str(path)]) != 0
    assert "the file is damaged or not GGUF" in " ".join(capsys.readouterr().out.split())
