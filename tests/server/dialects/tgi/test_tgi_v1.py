"""TGI's chats, completions, ``/invocations`` and small routes over the real engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects.tgi.options import TgiOptions
from tests.engine.fake_runner import FakeRunner
from tests.server.dialects.tgi.test_tgi_http import frames, post, serving
from tests.server.harness import Answer

TEMPLATE = ChatTemplate(
    {
        "default": "{% for m in messages %}{{ raise_exception('no system') if m.role == 'system' }}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
    }
)
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
OPTIONS = TgiOptions(model_id="org/model")


def chat(path: str = CHAT, *, tgi: TgiOptions = OPTIONS, **body: Any) -> Answer:
    body = {"model": "tgi", "messages": MESSAGES, "max_tokens": 3, "temperature": 0, **body}
    return post(body, path, tgi=tgi, chat_template=TEMPLATE)


def complete(prompt: Any, *, tgi: TgiOptions = OPTIONS, **body: Any) -> Answer:
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, **body}
    return post(body, "/v1/completions", tgi=tgi)


def untimed(body: bytes) -> bytes:
    """With the creation times replaced by 0."""
    first, *rest = body.split(b'"created":')
    return first + b"".join(b'"created":0' + part[part.index(b",") :] for part in rest)


def events(answer: Answer) -> list[dict[str, Any]]:
    assert answer.body.endswith(b"data: [DONE]\n\n")
    return frames(Answer(200, {}, answer.body.removesuffix(b"data: [DONE]\n\n")))


def test_chat_object() -> None:
    answer = chat()
    assert answer.status == 200
    text = json.loads(answer.body)["choices"][0]["message"]["content"]
    quoted = json.dumps(text, ensure_ascii=False)
    assert untimed(answer.body).decode() == (
        '{"object":"chat.completion","id":"","created":0,"model":"org/model",'
        '"system_fingerprint":"2.4.0-native","choices":[{"index":0,"message":'
        f'{{"role":"assistant","content":{quoted}}},"logprobs":null,"finish_reason":"length"}}],'
        '"usage":{"prompt_tokens":13,"completion_tokens":3,"total_tokens":16}}'
    )
    assert answer.headers["x-compute-characters"] == str(len("[user]Hi[bot]"))
    assert answer.headers["x-prompt-tokens"] == "13"


def test_chat_stream() -> None:
    answer = chat(stream=True, stream_options={"include_usage": True})
    first = untimed(answer.body).split(b"\n\n")[0].decode()
    content = json.dumps(events(answer)[0]["choices"][0]["delta"]["content"], ensure_ascii=False)
    assert first == (
        'data: {"object":"chat.completion.chunk","id":"","created":0,"model":"org/model",'
        '"system_fingerprint":"2.4.0-native","choices":[{"index":0,"delta":'
        f'{{"role":"assistant","content":{content}}},"logprobs":null,"finish_reason":null}}],'
        '"usage":null}'
    )
    *chunks, usage = events(answer)
    whole = json.loads(chat().body)
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert "".join(texts) == whole["choices"][0]["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert all(chunk["choices"] for chunk in events(chat(stream=True)))


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(stream: bool) -> None:
    answer = chat(logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        content = [
            entry
            for chunk in events(answer)
            for entry in chunk["choices"][0]["logprobs"]["content"]
        ]
    else:
        content = json.loads(answer.body)["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    for entry in content:
        assert list(entry) == ["token", "logprob", "top_logprobs"]
        assert len(entry["top_logprobs"]) == 2


def test_chats_are_sampled_unless_the_temperature_is_0() -> None:
    greedy = json.loads(chat().body)["choices"]
    assert json.loads(chat(seed=3).body)["choices"] == greedy
    sampled = [json.loads(chat(seed=seed, temperature=None).body)["choices"] for seed in (3, 3, 4)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_the_last_assistant_message_is_continued() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Well"}]
    answer = chat("/chat_tokenize", messages=messages)
    assert json.loads(answer.body)["templated_text"] == "[user]Hi[assistant]Well"


def test_release_3_repeats_the_model_and_has_no_limit_of_its_own() -> None:
    answer = chat(tgi=TgiOptions(version=3, model_id="m"), model="other", max_tokens=None)
    result = json.loads(answer.body)
    assert (result["model"], result["system_fingerprint"]) == ("other", "3.3.7-native")
    assert result["usage"]["completion_tokens"] > 100
    older = json.loads(chat(max_tokens=None).body)
    assert older["usage"]["completion_tokens"] == 100


@pytest.mark.parametrize(
    ("body", "error_type", "text"),
    [
        ({"messages": [{"role": "system", "content": "x"}]}, "template_error", "Template error: "),
        ({"tools": [{"type": "function"}]}, "tool_error", "Tool error: "),
        ({"top_p": 1.0}, "validation", "Input validation error: `top_p` must be > 0.0 and < 1.0"),
        (
            {"response_format": {"type": "json", "value": "{"}},
            "validation",
            "Input validation error: grammar is not valid: ",
        ),
        ({"max_tokens": 0}, "validation", "Input validation error: `max_new_tokens` must be"),
        ({"logit_bias": {"x": 1}}, "validation", "Input validation error: the keys of"),
        (
            {"top_logprobs": 6, "logprobs": True},
            "validation",
            "Input validation error: `top_n_tokens` must be >= 0 and <= 5. Given: 6",
        ),
    ],
)
def test_chat_errors(body: dict[str, Any], error_type: str, text: str) -> None:
    answer = chat(**body)
    error = json.loads(answer.body)
    assert (answer.status, error["error_type"]) == (422, error_type)
    assert error["error"].startswith(text)


def test_errors_in_streams() -> None:
    assert chat(stream=True, messages=[{"role": "system", "content": "x"}]).status == 422
    older = chat(stream=True, top_p=1.0)
    assert older.status == 200
    message = "Input validation error: `top_p` must be > 0.0 and < 1.0"
    assert events(older) == [{"error": message, "error_type": "validation"}]
    newer = chat(stream=True, top_p=1.0, tgi=TgiOptions(version=3))
    assert events(newer) == [{"error": {"message": message, "http_status_code": 422}}]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "x"},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"max_completion_tokens": 3},
        {"stream": None},
        {"stream_options": None},
        {"response_format": {}},
    ],
)
def test_chat_shapes(body: dict[str, Any]) -> None:
    answer = chat(**body)
    assert answer.status == 422
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


def test_completions() -> None:
    answer = complete(["ab", "c"])
    result = json.loads(answer.body)
    assert list(result) == [
        "object",
        "id",
        "created",
        "model",
        "system_fingerprint",
        "choices",
        "usage",
    ]
    assert sorted(choice["index"] for choice in result["choices"]) == [0, 1]
    assert result["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    [choice] = json.loads(complete("ab").body)["choices"]
    assert choice in result["choices"]
    assert "x-compute-time" not in answer.headers
    assert answer.headers["x-prompt-tokens"] == "3"


def test_completion_stream() -> None:
    chunks = events(complete(["ab", "c"], stream=True))
    whole = {c["index"]: c["text"] for c in json.loads(complete(["ab", "c"]).body)["choices"]}
    for index, num_prompt_tokens in ((0, 2), (1, 1)):
        *others, last = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert all(chunk["choices"][0]["finish_reason"] == "" for chunk in others)
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["usage"]["prompt_tokens"] == num_prompt_tokens
        text = "".join(chunk["choices"][0]["text"] for chunk in (*others, last))
        assert text == whole[index]
    assert list(chunks[0]) == [
        "object",
        "id",
        "created",
        "choices",
        "model",
        "system_fingerprint",
    ]


def test_too_many_prompts() -> None:
    answer = complete(["a"] * 3, tgi=TgiOptions(max_client_batch_size=2))
    assert (answer.status, answer.body) == (
        422,
        b'{"error":"Number of prompts exceeds the maximum allowed batch size of 2",'
        b'"error_type":"batch size exceeded"}',
    )


def test_completion_errors() -> None:
    answer = complete("a", suffix="b")
    assert json.loads(answer.body) == {
        "error": "Suffix is not supported and can be achieved by preprocessing the prompt.",
        "error_type": "suffix not supported",
    }
    assert complete([]).headers["content-type"] == "text/plain; charset=utf-8"
    assert json.loads(complete("").body)["error_type"] == "validation"


def test_invocations_take_three_kinds_of_bodies() -> None:
    greedy = {"max_new_tokens": 2}
    result = json.loads(post({"inputs": "a", "parameters": greedy}, "/invocations").body)
    assert list(result[0]) == ["generated_text"]
    assert json.loads(chat("/invocations").body)["object"] == "chat.completion"
    completion = {"prompt": "a", "max_tokens": 1}
    assert json.loads(post(completion, "/invocations").body)["object"] == "text_completion"
    wrong = post({"inputs": 1}, "/invocations")
    assert (wrong.status, wrong.body) == (
        422,
        b"Failed to deserialize the JSON body into the target type: "
        b"data did not match any variant of untagged enum SagemakerRequest",
    )


def test_tokenize_counts_bytes() -> None:
    answer = post({"inputs": "aé"}, "/tokenize")
    assert answer.headers["content-type"] == "application/json"
    tokens = json.loads(answer.body)
    assert list(tokens[0]) == ["id", "text", "start", "stop"]
    assert (tokens[0]["text"], tokens[0]["start"], tokens[0]["stop"]) == ("a", 0, 1)
    assert (tokens[-1]["text"], tokens[-1]["stop"]) == ("é", 3)


def test_chat_tokenize() -> None:
    result = json.loads(chat("/chat_tokenize").body)
    assert result["templated_text"] == "[user]Hi[bot]"
    assert "".join(token["text"] for token in result["tokenize_response"]) == "[user]Hi[bot]"


@pytest.mark.parametrize("version", [2, 3])
def test_info_and_models(version: Any) -> None:
    async def run() -> None:
        options = TgiOptions(version=version, model_id="org/model", max_input_tokens=9)
        async with serving(FakeRunner(max_num_seqs=4), options) as served:
            async with served.client.get("/info") as response:
                info = await response.json()
            async with served.client.get("/v1/models") as response:
                models = await response.json()
            total = served.engine.info.max_total_tokens
        assert info["model_id"] == "org/model"
        assert (info["max_input_tokens"], info["max_total_tokens"]) == (9, total)
        assert info["router"] == "text-generation-router"
        assert ("max_batch_size" in info) is (version == 2)
        assert [model["id"] for model in models["data"]] == ["org/model"]

    asyncio.run(run())


def test_chats_without_a_template_are_refused() -> None:
    answer = post({"messages": MESSAGES}, CHAT)
    assert json.loads(answer.body) == {
        "error": "Template error: template not found",
        "error_type": "template_error",
    }
