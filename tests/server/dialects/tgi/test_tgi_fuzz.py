"""Mutated bodies on TGI's routes: a result or an error of TGI's forms, and nothing leaks."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects.tgi.options import TgiOptions
from lmi_server.dialects.tgi.schema import GenerateParameters
from lmi_server.dialects.tgi.v1_schema import ChatBody, CompletionBody
from tests.server.dialects.tgi.test_tgi_http import serving
from tests.server.test_fuzz import mutated

TEMPLATE = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"})
SAMPLED = {"do_sample": True, "temperature": 0.7, "stop": ["y"], "max_new_tokens": 2}
KINDS: list[tuple[tuple[str, ...], list[dict[str, Any]], tuple[str, ...]]] = [
    (
        ("/", "/generate", "/generate_stream", "/tokenize", "/invocations"),
        [
            {"inputs": "hello", "parameters": {"max_new_tokens": 3, "details": True}},
            {"inputs": "x", "stream": True, "parameters": SAMPLED},
            {"inputs": "x", "parameters": {**SAMPLED, "best_of": 2, "truncate": 3}},
        ],
        GenerateParameters.__struct_fields__,
    ),
    (
        ("/v1/chat/completions", "/chat_tokenize", "/invocations"),
        [
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "logprobs": True},
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
                "max_tokens": 2,
                "stream": True,
                "logit_bias": {"5": 1},
            },
        ],
        ChatBody.__struct_fields__,
    ),
    (
        ("/v1/completions", "/invocations"),
        [{"prompt": ["a", "b"], "max_tokens": 2, "stream": True}, {"prompt": "a", "max_tokens": 2}],
        CompletionBody.__struct_fields__,
    ),
]


def test_every_answer_is_a_result_or_an_error() -> None:
    async def run() -> None:
        rng = random.Random(11)
        num_answered = 0
        async with serving(tgi=TgiOptions(max_stop_sequences=99), chat_template=TEMPLATE) as served:
            for _ in range(600):
                paths, bodies, names = rng.choice(KINDS)
                body = mutated(rng, bodies, [*names, "no_such"])
                path = rng.choice(paths)
                answer = await served.post(body, path, headers={"Content-Type": "application/json"})
                assert answer.status in (200, 400, 422), (path, body, answer)
                if answer.status == 200:
                    num_answered += 1
                elif answer.headers["content-type"] == "application/json":
                    assert set(json.loads(answer.body)) == {"error", "error_type"}
                else:
                    assert answer.body.startswith(b"Failed to "), (path, body, answer)
        assert 50 < num_answered < 550

    asyncio.run(run())
