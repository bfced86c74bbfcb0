"""Drafts under the server: answers of every protocol are those without, to the last digit."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.speculation_config import SpeculationConfig
from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects.tgi.options import TgiOptions
from lmi_server.http.metrics import Metrics
from tests.engine.draft_models import drafted_by, near_copy
from tests.engine.eagle_heads import write_head as write_eagle
from tests.engine.random_drafts import draft_whatever_it_costs
from tests.engine.test_medusa_heads import write_heads
from tests.engine.test_model_drafts import TARGET, copy_of_target
from tests.server.harness import Answer, serving_backend

TEMPLATE = ChatTemplate(
    {
        "default": "{% if tools %}<tool_call>{% endif %}{% for m in messages %}"
        "{{ m.content or '' }};{% endfor %}"
    }
)
SCHEMA = {
    "type": "object",
    "properties": {"to": {"enum": ["Ulm", "Bern"]}, "on": {"type": "integer"}},
    "required": ["to", "on"],
    "additionalProperties": False,
}
FUNCTION = {"name": "go", "parameters": SCHEMA}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
CHAT = {"model": "model", "messages": [{"role": "user", "content": "Go"}], "max_tokens": 40}
HOT = {"temperature": 0.9, "seed": 3, "logprobs": True, "top_logprobs": 2}
INPUTS = {"max_new_tokens": 40, "do_sample": True, "seed": 3, "details": True}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, **HOT, "n": 2, "stop": ["a", "q7"]}),
    ("/v1/chat/completions", {**CHAT, **HOT, **TOOLS}),
    ("/v1/chat/completions", {**CHAT, **HOT, "response_format": FORMAT, "presence_penalty": 0.5}),
    (
        "/v1/completions",
        {"prompt": ["on", "ce"], "max_tokens": 40, "logprobs": 2, "seed": 3, "stop": ["e"]},
    ),
    ("/invocations", {"inputs": "once", "parameters": {**INPUTS, "stop_sequences": ["e"]}}),
    ("/invocations", {"inputs": "once", "parameters": {**INPUTS, "guided_regex": "[a-c]{9}[0-9]"}}),
    ("/invocations", {**CHAT, **HOT, **TOOLS}),
    ("/generate", {"inputs": "once", "parameters": {**INPUTS, "top_n_tokens": 2, "stop": ["e"]}}),
    (
        "/generate",
        {"inputs": "x", "parameters": {**INPUTS, "grammar": {"type": "json", "value": SCHEMA}}},
    ),
    ("/tgi/v1/chat/completions", {**CHAT, **HOT, "stop": ["e"]}),
    (
        "/v1/responses",
        {"model": "model", "input": "x", "temperature": 0, "max_output_tokens": 40, "store": False}
        | {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    ),
    (
        "/v1/messages",
        {**CHAT, "temperature": 0, "tool_choice": {"type": "any"}}
        | {"tools": [{"name": "go", "input_schema": SCHEMA}]},
    ),
]
_VARIES = re.compile(
    r'"(id|created|created_at|completed_at|item_id|call_id|system_fingerprint|cached_tokens|'
    r'cache_read_input_tokens|input_tokens|obfuscation)": ?("[^"]*"|[\d.]+|null)'
)


def streamed(path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return ("/generate_stream", body) if path == "/generate" else (path, {**body, "stream": True})


async def answers(speculation: SpeculationConfig | None) -> list[Any]:
    """To all bodies, whole and streamed, six at once."""
    config = EngineConfig(
        model=copy_of_target(),
        served_model_name="model",
        speculation=speculation,
        max_num_seqs=40,
        num_threads=1,
        kv_cache_bytes=16 << 20,
    )
    metrics = Metrics()
    options: dict[str, Any] = {"api": "lmi", "tgi": TgiOptions(), "chat_template": TEMPLATE}
    places = asyncio.Semaphore(6)
    calls = [call for path, body in BODIES for call in ((path, body), streamed(path, body))]
    async with (
        Engine(config, observer=metrics.observer("model"), check_integrity=True) as engine,
        serving_backend(engine, metrics, **options) as served,
    ):

        async def ask(path: str, body: dict[str, Any]) -> Answer:
            async with places:
                return await served.post(body, path)

        given = await asyncio.gather(*(ask(path, body) for path, body in calls))
        if speculation is not None:
            assert engine.stats().totals.num_model_draft_tokens > 20
    for (path, _), answer in zip(calls, given, strict=True):
        assert answer.status == 200, (path, answer.body)
    return [seen(_VARIES.sub('"":0', answer.body.decode())) for answer in given]


def seen(text: str) -> Any:
    """An answer's leaves by their paths, in order, texts joined: frames may hold several tokens."""
    frames = [line.removeprefix("data:").strip() for line in text.splitlines()]
    leaves: dict[tuple[str, ...], list[Any]] = {}

    def walk(value: Any, path: tuple[str, ...]) -> None:
        if isinstance(value, dict):
            place = str(value.get("index", ""))
            for key, each in value.items():
                walk(each, (*path, place, key))
        elif isinstance(value, list):
            for each in value:
                walk(each, path)
        elif isinstance(value, str | float) and path[-1] not in ("type", "object", "model", "role"):
            leaves.setdefault(path, []).append(value)

    for frame in frames:
        if frame.startswith("{"):
            walk(json.loads(frame), ())
    return {
        path: "".join(values) if isinstance(values[0], str) else values
        for path, values in leaves.items()
    }


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return asyncio.run(answers(None))


@pytest.mark.parametrize("kind", ["near", "eagle3", "eagle", "medusa"])
def test_answers_are_those_without_drafts(
    kind: str, expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_whatever_it_costs(monkeypatch)
    if kind == "near":
        draft = near_copy(*TARGET)
    elif kind == "medusa":
        draft = write_heads(tmp_path / kind)
    else:
        draft = write_eagle(tmp_path / kind, kind)
    found = asyncio.run(answers(drafted_by(draft, 3 if kind == "medusa" else 4)))
    for i, (answer, alone) in enumerate(zip(found, expected, strict=True)):
        assert answer == alone, (BODIES[i // 2], "streamed" if i % 2 else "whole")
