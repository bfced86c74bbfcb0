"""TGI's routes over the real engine, with the tests' runner."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lmi_server.dialects.tgi.options import TgiOptions
from lmi_server.dialects.unknown_fields import IGNORED_HEADER
from lmi_server.http.frame_writer import FrameWriter
from lmi_server.http.metrics import Metrics
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import make_engine
from tests.server.configured import configured
from tests.server.harness import Answer, Served, eventually, serving_backend

GREEDY = {"max_new_tokens": 4}


@asynccontextmanager
async def serving(
    runner: FakeRunner | None = None, tgi: TgiOptions | None = None, **options: Any
) -> AsyncIterator[Served]:
    metrics = Metrics()
    options = {"api": "tgi", "tgi": tgi or TgiOptions(), **options}
    async with (
        make_engine(runner, observer=metrics.observer("model"), eos_ids=()) as engine,
        serving_backend(engine, metrics, **options) as served,
    ):
        yield served
        await eventually(lambda: engine.stats().num_running == 0)
        assert engine.stats().num_used_blocks == 0


def ask(
    path: str = "/generate",
    *,
    stream: bool | None = None,
    inputs: str = "Hello",
    tgi: TgiOptions | None = None,
    runner: FakeRunner | None = None,
    **parameters: Any,
) -> Answer:
    body: dict[str, Any] = {"inputs": inputs, "parameters": {**GREEDY, **parameters}}
    if stream is not None:
        body["stream"] = stream
    return post(body, path, tgi=tgi, runner=runner)


def post(body: Any, path: str, **options: Any) -> Answer:
    headers = options.pop("headers", {"Content-Type": "application/json"})

    async def run() -> Answer:
        async with serving(**options) as served:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await served.post(data, path, headers=headers)

    return asyncio.run(run())


def frames(answer: Answer) -> list[dict[str, Any]]:
    events = answer.body.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_generate() -> None:
    answer = ask(details=True, decoder_input_details=True)
    assert answer.status == 200
    result = json.loads(answer.body)
    details = result["details"]
    assert result["generated_text"] == "".join(token["text"] for token in details["tokens"])
    assert details["finish_reason"] == "length"
    assert details["generated_tokens"] == len(details["tokens"]) == 4
    assert details["seed"] is None
    assert [token["text"] for token in details["prefill"]] == list("Hello")
    assert details["prefill"][0]["logprob"] is None
    assert all(token["logprob"] < 0 for token in details["prefill"][1:])


def test_headers() -> None:
    answer = ask(inputs="Héllo")
    headers = answer.headers
    assert headers["content-type"] == "application/json"
    assert headers["x-compute-type"] == "cpu"
    assert headers["x-compute-characters"] == "5"
    assert headers["x-prompt-tokens"] == "6"
    assert headers["x-generated-tokens"] == "4"
    assert float(headers["x-compute-time"]) > 0
    total = int(headers["x-total-time"])
    for name in ("validation", "queue", "inference"):
        assert 0 <= int(headers[f"x-{name}-time"]) <= total
    assert int(headers["x-time-per-token"]) <= total


def test_compat_route_wraps_a_list_and_repeats_the_prompt() -> None:
    plain = json.loads(ask().body)["generated_text"]
    assert json.loads(ask("/").body) == [{"generated_text": "Hello" + plain}]
    answer = ask("/", return_full_text=False)
    assert json.loads(answer.body) == [{"generated_text": plain}]


@pytest.mark.parametrize(("path", "stream"), [("/generate_stream", None), ("/", True)])
def test_stream(path: str, stream: bool | None) -> None:
    answer = ask(path, stream=stream, details=True, return_full_text=False)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-compute-characters"] == "5"
    events = frames(answer)
    assert [event["index"] for event in events] == [1, 2, 3, 4]
    assert [event["generated_text"] for event in events[:-1]] == [None] * 3
    assert events[-1]["generated_text"] == json.loads(ask().body)["generated_text"]
    assert events[-1]["details"] == {
        "finish_reason": "length",
        "generated_tokens": 4,
        "seed": None,
        "input_length": 5,
    }


def test_generate_ignores_the_field_stream() -> None:
    assert ask(stream=True).headers["content-type"] == "application/json"
    assert ask("/generate_stream", stream=False).headers["content-type"] == "text/event-stream"


def test_seed_is_reported_when_sampled() -> None:
    details = json.loads(ask(details=True, do_sample=True, seed=7).body)["details"]
    assert details["seed"] == 7
    drawn = json.loads(ask(details=True, temperature=0.5).body)["details"]["seed"]
    assert isinstance(drawn, int)
    again = json.loads(ask(details=True, temperature=0.5, seed=drawn).body)["details"]
    assert again["seed"] == drawn
    assert json.loads(ask(details=True, temperature=1.0).body)["details"]["seed"] is None
    assert json.loads(ask(details=True, typical_p=0.9).body)["details"]["seed"] is not None


def test_stop_strings_stay_in_the_text() -> None:
    text = json.loads(ask(max_new_tokens=12).body)["generated_text"]
    stop = text[4:6]
    answer = json.loads(ask(max_new_tokens=12, stop=[stop], details=True).body)
    assert answer["generated_text"] == text[: text.index(stop) + len(stop)]
    assert answer["details"]["finish_reason"] == "stop_sequence"


def test_bans_that_tgi_has_not() -> None:
    def tokens(**parameters: Any) -> list[tuple[int, str]]:
        answer = json.loads(ask(max_new_tokens=100, details=True, **parameters).body)
        return [(token["id"], token["text"]) for token in answer["details"]["tokens"]]

    usual = tokens()
    assert len(set(usual)) < len(usual)
    once = tokens(no_repeat_ngram_size=1)
    assert len(set(once)) == len(once) == len(usual)
    word = next(text for _, text in usual if text.isascii() and text.isalpha())
    assert word not in dict(tokens(bad_words=[word])).values()


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"min_new_tokens": 5}, "min_new_tokens must be between 0 and 4, got 5"),
        ({"logit_bias": {"a": 1}}, "logit_bias has the keys 'a'; keys are token ids"),
        ({"logit_bias": {"999999": 1}}, "999999"),
        ({"bad_words": [""]}, "bad_words must not contain an empty text"),
    ],
)
def test_bans_and_biases_are_checked(parameters: dict[str, Any], words: str) -> None:
    answer = ask(**parameters)
    assert answer.status == 422
    error = json.loads(answer.body)
    assert words in error["error"]
    assert error["error_type"] == "validation"


def test_best_of() -> None:
    answer = ask(best_of=2, do_sample=True, details=True)
    details = json.loads(answer.body)["details"]
    [other] = details["best_of_sequences"]
    assert details["seed"] != other["seed"]

    def mean(sequence: dict[str, Any]) -> float:
        return sum(token["logprob"] for token in sequence["tokens"]) / 4

    assert mean(details) >= mean(other)
    again = ask(do_sample=True, seed=other["seed"])
    assert json.loads(again.body)["generated_text"] == other["generated_text"]


def test_truncate_keeps_the_end_and_repeats_all_of_the_prompt() -> None:
    answer = ask("/", truncate=3, decoder_input_details=True)
    [result] = json.loads(answer.body)
    assert [token["text"] for token in result["details"]["prefill"]] == list("llo")
    assert result["generated_text"].startswith("Hello")


def test_release_3_reports_no_prompt_unless_configured() -> None:
    plain = ask(decoder_input_details=True, tgi=TgiOptions(version=3))
    assert json.loads(plain.body)["details"]["prefill"] == []
    options = TgiOptions(version=3, enable_prefill_logprobs=True)
    enabled = ask(decoder_input_details=True, tgi=options)
    assert len(json.loads(enabled.body)["details"]["prefill"]) == 5


def test_top_n_tokens() -> None:
    details = json.loads(ask(details=True, top_n_tokens=2).body)["details"]
    assert [len(top) for top in details["top_tokens"]] == [2] * 4
    assert all(
        len(event["top_tokens"]) == 2 for event in frames(ask("/", stream=True, top_n_tokens=2))
    )


INVALID = b'{"error":"Input validation error: `inputs` cannot be empty","error_type":"validation"}'


def test_errors_are_events_of_streams() -> None:
    whole = ask(inputs="")
    assert (whole.status, whole.body) == (422, INVALID)
    assert whole.headers["content-type"] == "application/json"
    for answer in (ask("/generate_stream", inputs=""), ask("/", stream=True, inputs="")):
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.body == b"data: " + INVALID + b"\n\n"


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_a_failed_step(path: str) -> None:
    runner = FakeRunner()
    runner.fail_step = lambda number: "no such kernel"
    answer = ask(path, runner=runner)
    error = answer.body.removeprefix(b"data: ")
    assert answer.status == (424 if path == "/generate" else 200)
    assert json.loads(error) == {
        "error": "Request failed during generation: Server error: "
        "the step that served the request: no such kernel",
        "error_type": "generation",
    }


@pytest.mark.parametrize(
    ("body", "headers", "status", "text"),
    [
        (b'{"inputs":"a"}', {"Content-Type": "text/plain"}, 415, "Expected request with"),
        (b"{", {"Content-Type": "application/json"}, 400, "Failed to parse the request body"),
        (b"{}", {"Content-Type": "application/json"}, 422, "Failed to deserialize the JSON body"),
        (
            b" " * 2000,
            {"Content-Type": "application/json"},
            413,
            "Failed to buffer the request body: length limit exceeded",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
def test_the_http_layer_answers_in_plain_text(
    path: str, body: bytes, headers: dict[str, str], status: int, text: str
) -> None:
    answer = post(body, path, headers=headers, max_request_bytes=1000)
    assert answer.status == status
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.body.decode().startswith(text)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/generate", 405), ("DELETE", "/", 405), ("GET", "/nothing", 404)],
)
def test_unknown_routes_are_empty(method: str, path: str, status: int) -> None:
    async def run() -> None:
        async with serving() as served, served.client.request(method, path) as response:
            assert response.status == status
            assert await response.read() == b""

    asyncio.run(run())


def test_health() -> None:
    async def run() -> None:
        runner = FakeRunner()
        async with serving(runner) as served:
            for path in ("/", "/health", "/ping"):
                async with served.client.get(path) as response:
                    assert (response.status, await response.read()) == (200, b"")
            runner.fail_step = lambda number: "broken"
            for _ in range(2):
                await served.post({"inputs": "a"}, "/generate")
            async with served.client.get("/health") as response:
                assert response.status == 503
                body = await response.read()
                assert body == b'{"error":"unhealthy","error_type":"healthcheck"}'

    asyncio.run(run())


def test_overload() -> None:
    overloaded = b'{"error":"Model is overloaded","error_type":"overloaded"}'

    async def run() -> None:
        body = {"inputs": "a", "parameters": {"max_new_tokens": 20}}
        options = TgiOptions(max_concurrent_requests=1)
        async with serving(FakeRunner(step_s=0.01), options) as served:
            running = asyncio.create_task(served.post(body, "/generate"))
            await eventually(lambda: served.engine.stats().num_running == 1)
            refused = await served.post(body, "/generate")
            assert (refused.status, refused.body) == (429, overloaded)
            streamed = await served.post(body, "/generate_stream")
            assert (streamed.status, streamed.body) == (200, b"data: " + overloaded + b"\n\n")
            assert (await running).status == 200
            both = {"inputs": "a", "parameters": {**GREEDY, "best_of": 2, "do_sample": True}}
            assert (await served.post(both, "/generate")).status == 429
            assert (await served.post(body, "/generate")).status == 200

    asyncio.run(run())


def test_silent_streams_are_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrameWriter, "INTERVAL_S", 0.03)
    answer = ask("/generate_stream", runner=FakeRunner(step_s=0.1), max_new_tokens=2)
    assert answer.body.count(b":\n\n") >= 2
    rest = answer.body.replace(b":\n\n", b"")
    assert rest.count(b"data: ") == 2


def test_a_disconnect_frees_the_sequence() -> None:
    async def run() -> None:
        async with serving(FakeRunner(step_s=0.005)) as served:
            body = json.dumps({"inputs": "a", "parameters": {"max_new_tokens": 500}}).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(f"POST /generate_stream HTTP/1.1\r\nHost: x\r\n{head}".encode() + body)
            await reader.readuntil(b"data: ")
            writer.transport.abort()
            await eventually(lambda: served.engine.stats().num_running == 0)

    asyncio.run(run())


def test_watermarks() -> None:
    runner = FakeRunner()
    tgi = configured("option.watermark_gamma=0.25", "option.watermark_delta=-1.5")["tgi"]
    assert ask(tgi=tgi, runner=runner, watermark=True).status == 200
    settings = runner.fake_sampling.rows[0].settings
    assert (settings["watermark_gamma"], settings["watermark_delta"]) == (0.25, -1.5)
    plain, usual = FakeRunner(), FakeRunner()
    assert ask(tgi=tgi, runner=plain).status == 200
    assert plain.fake_sampling.rows[0].settings["watermark_delta"] == 0.0
    assert ask(runner=usual, watermark=True).status == 200
    settings = usual.fake_sampling.rows[0].settings
    assert (settings["watermark_gamma"], settings["watermark_delta"]) == (0.5, 2.0)


def test_watermarks_may_be_ignored() -> None:
    tgi = configured("ignore_watermark=true")["tgi"]
    answer = ask(tgi=tgi, watermark=True)
    assert (answer.status, answer.headers[IGNORED_HEADER]) == (200, "parameters.watermark")
    assert IGNORED_HEADER not in ask(tgi=tgi, watermark=False).headers


def test_the_compute_type() -> None:
    assert ask().headers["x-compute-type"] == "cpu"
    tgi = configured("option.compute_type=gpu+optimized")["tgi"]
    assert ask(tgi=tgi).headers["x-compute-type"] == "gpu+optimized"
