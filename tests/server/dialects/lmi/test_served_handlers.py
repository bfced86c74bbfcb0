"""``lmi serve`` of models with code of their own: handlers and formatters."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import cached_checkpoint
from tests.config.artefacts.test_requirements import write_wheel
from tests.server.harness import (
    eventually,
)
from tests.server.serve_process import ServeProcess, serve


def test_configuration_reaches_the_processes(tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    write_wheel(directory / "requirements")
    (directory / "requirements.txt").write_text("lmi_probe==1.0\n")
    (directory / "serving.properties").write_text(
        "option.handler=serve\noption.my_own=x\noption.env=LMI_PROBE=7\noption.entryPoint=own.py\n"
    )
    (directory / "own.py").write_text(
        "import json, os, lmi_probe\n"
        "from djl_python import Output\n"
        "from lmi_core import Engine\n"
        "OWN = {}\n"
        "def serve(inputs):\n"
        "    if inputs.is_empty():\n"
        "        OWN.update(inputs.get_properties())\n"
        "        return None\n"
        "    print('called')\n"
        "    return Output().add_as_json({'own': OWN['my_own'], 'env': os.environ['LMI_PROBE'],\n"
        "        'probe': lmi_probe.VALUE, 'cwd': os.getcwd(), 'dir': OWN['model_dir'],\n"
        "        'session': os.getsid(0) == os.getpid()})\n"
    )
    arguments = ("--option", "offline=true", "--option", f"download_dir={tmp_path / 'cache'}")
    with serve(directory, *arguments) as process:
        _, body = process.post({})
        process.popen.terminate()
        process.popen.wait(timeout=30)
        assert "did not finish" not in process.read_log()
        assert json.loads(body) == {
            "own": "x",
            "env": "7",
            "probe": 42,
            "cwd": str(directory),
            "dir": str(directory),
            "session": True,
        }
        assert "mine-stdout: called" in process.read_log()


def test_a_handler_may_run_our_engine(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text(f"option.model_id={cached_checkpoint('llama2')}\n")
    (tmp_path / "model.py").write_text(
        "from djl_python import Output\n"
        "from lmi_core import Engine, SamplingParams\n"
        "ENGINE = None\n"
        "def handle(inputs):\n"
        "    global ENGINE\n"
        "    if inputs.is_empty():\n"
        "        ENGINE = Engine(inputs.get_property('model_id'), own_loop=True).__enter__()\n"
        "        return None\n"
        "    params = SamplingParams(max_new_tokens=5, ignore_eos=True)\n"
        "    events = ENGINE.generate_sync(inputs.get_as_json()['text'], params)\n"
        "    return Output().add_stream_content((event.token_id for event in events))\n"
    )
    with serve(tmp_path) as process:
        headers, body = process.post({"text": "hello"})
        assert headers["Content-Type"] == "application/jsonlines"
        assert len([json.loads(line)["outputs"] for line in body.splitlines()]) == 5


FORMATTER = """
import json, os
from djl_python.output_formatter import RequestOutput, output_formatter

@output_formatter
def mine(output: RequestOutput) -> str:
    sequence = output.sequences[output.best_sequence_index]
    token, is_first, is_last = sequence.get_next_token()
    text = output.input.input_text
    if text == "die":
        os._exit(3)
    if text == "raise" and len(sequence.tokens) == 3:
        raise ValueError("at the third")
    line = [token.id, is_first, is_last, sequence.finish_reason, token.log_prob is not None]
    return json.dumps([text, *line]) + ";"
"""


def test_an_output_formatter(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text(f"option.model_id={cached_checkpoint('llama2')}\n")
    (tmp_path / "model.py").write_text(FORMATTER)

    def asked(text: str, **fields: Any) -> dict[str, Any]:
        parameters = {"max_new_tokens": 4, "ignore_eos_token": True}
        return {"inputs": text, "parameters": parameters, **fields}

    with serve(tmp_path) as process:
        headers, body = process.post(asked("hello"))
        tokens = [json.loads(part) for part in body.decode().split(";")[:-1]]
        assert [token[0] for token in tokens] == ["hello"] * 4
        assert [token[2:] for token in tokens] == [
            [True, False, None, True],
            [False, False, None, True],
            [False, False, None, True],
            [False, True, "length", True],
        ]
        assert headers["Content-Type"] == "application/json"
        headers, streamed = process.post(asked("hello", stream=True))
        assert streamed == body
        assert headers["Content-Type"] == "application/jsonlines"
        _, body = process.post(asked("raise"))
        assert body.count(b";") == 2
        assert body.endswith(b'{"code":424,"error":"at the third"}')
        with pytest.raises(urllib.error.HTTPError) as raised:
            process.post(asked("die"))
        assert raised.value.code == 424
        assert b"Python worker disconnected. (exit status 3)" in raised.value.read()

        def works() -> bool:
            try:
                return bool(process.post(asked("again"))[1])
            except urllib.error.HTTPError as error:
                error.close()
                return False

        asyncio.run(eventually(works, 30))


INPUT_FORMATTER = """
from djl_python.encode_decode import decode
from djl_python.input_parser import input_formatter
from djl_python.request_io import TextInput

@input_formatter
def mine(item, **kwargs):
    body = decode(item, item.get_property("Content-Type"))
    request = TextInput()
    request.input_text = body["say"]
    request.parameters = {"max_new_tokens": body["length"], "ignore_eos_token": True}
    request.parameters["details"] = item.get_property("x-details") == "yes"
    return request
"""


def test_an_input_formatter(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text(f"option.model_id={cached_checkpoint('llama2')}\n")
    (tmp_path / "model.py").write_text(INPUT_FORMATTER)

    def failure(body: object) -> tuple[int, bytes]:
        with pytest.raises(urllib.error.HTTPError) as raised:
            process.post(body)
        return raised.value.code, raised.value.read()

    with serve(tmp_path) as process:
        _, body = process.post({"say": "hello", "length": 3}, {"x-details": "yes"})
        assert json.loads(body)["details"]["generated_tokens"] == 3
        # What the function makes is checked as if it had been sent.
        assert failure({"say": "hello", "length": -1})[0] == 424
        assert b"parameters.max_new_tokens" in failure({"say": "hello", "length": "x"})[1]
        code, text = failure({"length": 3})
        assert (code, json.loads(text)["error"]) == (424, "Custom formatter failed: 'say'")
        assert process.post({"say": "again", "length": 1})[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def handle(inputs): raise ValueError('no weights')", "ValueError: no weights"),
        ("import os\ndef handle(inputs): os._exit(9)", "exit status 9"),
    ],
)
def test_a_handler_that_does_not_load_ends_the_start(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "model.py").write_text(text)
    process = ServeProcess(tmp_path)
    process.popen.communicate(timeout=60)
    with process.log:
        log = process.read_log()
    assert process.popen.returncode == 2, log
    assert "Failed to initialize model: " in log
    assert message in log
