"""A server process whose model runs on another library (a scripted one), by every protocol."""

import json
from pathlib import Path

import pytest

from tests.backends.library import model_with
from tests.cli.test_native import post, serving

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("backend", ["vllm", "trtllm"])
def test_every_protocol(tmp_path, backend):
    model = model_with(tmp_path, f"option.rolling_batch={backend}\n")
    library = {"PYTHONPATH": str(Path(__file__).parent / f"fake_{backend}")}
    with serving(str(model), environ=library) as url:
        parameters = {"max_new_tokens": 6, "details": True}
        body = {"inputs": "The fox", "parameters": parameters}
        status, answer = post(f"{url}/invocations", {**body, "stream": True})
        assert status == 200, answer
        lines = [json.loads(line) for line in answer.splitlines()]
        text = lines[-1]["generated_text"]
        assert len(lines) == 6
        assert text

        status, answer = post(f"{url}/generate", body)
        assert status == 200, answer
        assert json.loads(answer)["generated_text"] == text

        asked = {"prompt": "The fox", "max_tokens": 6, "model": "model", "temperature": 0}
        status, answer = post(f"{url}/v1/completions", asked)
        assert status == 200, answer
        assert json.loads(answer)["choices"][0]["text"] == text
        status, answer = post(f"{url}/v1/completions", {**asked, "prompt": "fox " * 600})
        assert status == 400, answer
