"""Options of the server, as its clients see them: several to each server, which takes a second."""

from __future__ import annotations

import json
import os
import ssl
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.checkpoints import cached_checkpoint
from tests.cli.test_native import lmi, post, serving
from tests.server.certificate import make_certificate

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def model() -> str:
    return str(cached_checkpoint("llama2"))


def test_limits_of_a_launcher(model: str) -> None:
    """Each flag's limit is kept, and named by the answer that refuses a request."""
    flags = (
        "--max-best-of 3 --max-stop-sequences 1 --max-top-n-tokens 2 --max-input-tokens 9 "
        "--max-client-batch-size 2 --max-total-tokens 24 --payload-limit 5000"
    )
    refused = {
        "best_of": {"best_of": 4, "do_sample": True},
        "stop": {"stop": ["a", "b"]},
        "top_n_tokens": {"top_n_tokens": 3},
        "max_new_tokens": {"max_new_tokens": 23},
    }
    served = {"best_of": 3, "do_sample": True, "stop": ["a"], "top_n_tokens": 2}
    arguments = ("--model-id", model, *flags.split(), "--hostname", "127.0.0.1")
    with serving(*arguments) as url:
        body = {"inputs": "hello", "parameters": {**served, "max_new_tokens": 3, "details": True}}
        status, answer = post(f"{url}/generate", body)
        assert status == 200, answer
        for name, parameters in refused.items():
            status, answer = post(f"{url}/generate", {"inputs": "hi", "parameters": parameters})
            assert (status, name in answer) == (422, True), answer
        long = {"inputs": "hello hello hello", "parameters": {"max_new_tokens": 1}}
        status, answer = post(f"{url}/generate", long)
        assert (status, "`inputs` must have less than 9 tokens" in answer) == (422, True), answer
        status, answer = post(f"{url}/v1/completions", {"model": "m", "prompt": ["a", "b", "c"]})
        assert (status, "batch" in answer) == (422, True), answer
        assert post(f"{url}/generate", {"inputs": "x" * 6000})[0] == 413


def test_name_log_and_size(model: str, tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text(
        f"option.model_id={model}\noption.modelName=chosen\noption.output_formatter=jsonlines\n"
    )
    environ = {"SERVING_LOG_FORMAT": "json", "SERVING_LOG_LEVEL": "warning"}
    with tempfile.TemporaryFile("w+") as log:
        arguments = (str(tmp_path), "--option", "max_request_size=4096")
        with serving(*arguments, environ=environ, log=log) as url:
            body = {"inputs": "hello", "parameters": {"max_new_tokens": 2}}
            status, lines = post(f"{url}/predictions/chosen", body)
            assert (status, len(lines.splitlines())) == (200, 2)
            assert post(f"{url}/predictions/model", body)[0] == 404
            assert post(f"{url}/invocations", {"inputs": "x" * 5000})[0] == 413
            with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
                assert json.load(response)["data"][0]["id"] == "chosen"
        log.seek(0)
        # warning leaves the access log out, and every line that is left is JSON
        assert all("level" in json.loads(line) for line in log.read().splitlines())


def test_port_and_log_of_a_launcher(model: str) -> None:
    arguments = ("--model-id", model, "--hostname", "127.0.0.1", "--json-output")
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 1, "decoder_input_details": True}}
    body["parameters"]["details"] = True
    with tempfile.TemporaryFile("w+") as log:
        for more, num_prefill in ((), 0), (("--enable-prefill-logprobs",), 4):
            environ = {"SERVING_TGI_VERSION": "3"}
            with serving(*arguments, *more, environ=environ, log=log) as url:
                # The port is the one given (0: any), not a launcher's 3000.
                assert not url.endswith(":3000")
                status, answer = post(f"{url}/generate", body)
                assert status == 200, answer
                prefill = json.loads(answer)["details"]["prefill"]
                assert bool(prefill) == bool(num_prefill)
        log.seek(0)
        lines = [json.loads(line) for line in log.read().splitlines()]
        assert "/generate" in {line.get("path") for line in lines}


def test_defaults_of_requests_and_the_chat_template(model: str, tmp_path: Path) -> None:
    """What requests leave open, the configuration decides; the plain server is the other side."""
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}!")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    prompt = {"inputs": "hello!", "parameters": {"max_new_tokens": 12, "details": True, "seed": 3}}
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}

    def answers(*arguments: str) -> tuple[str, str]:
        with serving(model, *arguments) as url:
            status, text = post(f"{url}/invocations", prompt)
            assert status == 200, text
            status, answer = post(f"{url}/v1/chat/completions", {"model": "m", **chat})
            assert status == 200, answer
            return json.loads(text)["generated_text"], answer

    plain, plain_chat = answers("--served-model-name", "m")
    common = ("--served-model-name", "m", "--option")
    sampled, by_template = answers(
        *common, "decoding_strategy=sample", "--option", f"chat_template={tmp_path}/chat.jinja"
    )
    stop = plain[3:5]
    stopped, by_config = answers(
        *common, f'stop_sequence=["{stop}"]', "--tokenizer-config-path", str(config)
    )
    assert sampled != plain
    assert stopped in (plain[: plain.index(stop)], plain[: plain.index(stop) + len(stop)])
    counts = [
        json.loads(answer)["usage"]["prompt_tokens"]
        for answer in (plain_chat, by_template, by_config)
    ]
    assert counts[0] > counts[1] == counts[2]


def test_headers_and_statuses(model: str) -> None:
    environ = {
        "SERVING_CORS_ALLOWED_ORIGIN": "https://a.example",
        "SERVING_CORS_ALLOWED_METHODS": "POST",
        "SERVING_CORS_ALLOWED_HEADERS": "X-One, X-Two",
        "SERVING_REQUEST_ID_HEADER_KEY": "X-Amzn-SageMaker-Inference-Id",
        "SERVING_BAD_REQUEST_HTTP_CODE": "422",
        "SERVING_THROTTLE_ERROR_HTTP_CODE": "429",
        "SERVING_WLM_ERROR_HTTP_CODE": "504",
        "SERVING_SERVER_ERROR_HTTP_CODE": "599",
    }
    limits = ("--option", "job_queue_size=1", "--option", "max_rolling_batch_size=1")
    many = {"inputs": ["a"] * 4, "parameters": {"max_new_tokens": 200}}
    with serving(model, *limits, environ=environ) as url:
        asked = urllib.request.Request(f"{url}/invocations", method="OPTIONS")
        asked.add_header("Origin", "https://a.example")
        asked.add_header("Access-Control-Request-Method", "POST")
        with urllib.request.urlopen(asked, timeout=60) as response:
            assert response.headers["Access-Control-Allow-Methods"] == "POST"
            assert response.headers["Access-Control-Allow-Headers"] == "X-One, X-Two"
        named = urllib.request.Request(f"{url}/ping")
        named.add_header("X-Amzn-SageMaker-Inference-Id", "mine")
        with urllib.request.urlopen(named, timeout=60) as response:
            assert response.headers["X-Amzn-SageMaker-Inference-Id"] == "mine"
            assert "x-request-id" not in response.headers
        overridden = urllib.request.Request(f"{url}/invocations", b"{}", {"handler": "x"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(overridden, timeout=60)
        with refused.value as response:
            status, answer = response.status, response.read()
        assert (status, json.loads(answer)["code"]) == (422, 422), answer
        status, answer = post(f"{url}/invocations", many)
        assert (status, json.loads(answer)["type"]) == (429, "WlmCapacityException"), answer


def test_https(model: str, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    environ = {
        "SERVING_INFERENCE_ADDRESS": "https://127.0.0.1:0",
        "SERVING_CERTIFICATE_FILE": str(certificate),
        "SERVING_PRIVATE_KEY_FILE": str(key),
    }
    with serving(model, environ=environ) as url:
        assert url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(certificate))
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 3}, "stream": True}
        request = urllib.request.Request(f"{url}/invocations", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60, context=trusted) as response:
            assert len(response.read().splitlines()) == 3
    key.write_text("")
    done = lmi("serve", model, environ={**os.environ, **environ})
    assert (done.returncode, "private_key_file" in done.stderr) == (2, True)
    assert done.stderr.count("\n") == 1
