"""Agents' libraries against a real server with a tiny model: loops of three tool calls, whose
arguments a grammar forces. Each runs where its library is installed."""

# mypy: ignore-errors
# The libraries are not among those that the checks are installed with.

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from lmi_core.demo import MODEL_DIR
from tests.cli.test_native import serving

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Ulm", "Bern", "Łódź"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA},
}
CITIES = set(SCHEMA["properties"]["city"]["enum"])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(str(MODEL_DIR), "--served-model-name", "demo") as base:
        yield base


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
@pytest.mark.parametrize("streams", [False, True])
def test_litellm(url: str, provider: str, streams: bool) -> None:
    litellm = pytest.importorskip("litellm")
    base = f"{url}/v1" if provider == "openai" else url
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    for _ in range(3):
        answer = litellm.completion(
            model=f"{provider}/demo",
            api_base=base,
            api_key="none",
            messages=messages,
            tools=[WEATHER],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=200,
            stream=streams,
        )
        if streams:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        assert json.loads(call.function.arguments)["city"] in CITIES
        messages += [
            choice.message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]


def test_litellm_responses(url: str) -> None:
    litellm = pytest.importorskip("litellm")
    given: Any = "Weather?"
    previous = None
    for _ in range(3):
        answer = litellm.responses(
            model="openai/demo",
            api_base=f"{url}/v1",
            api_key="none",
            input=given,
            tools=[{"type": "function", **WEATHER["function"]}],
            tool_choice="required",
            parallel_tool_calls=False,
            previous_response_id=previous,
        )
        [call] = answer.output
        assert json.loads(call.arguments)["city"] in CITIES
        given = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
        previous = answer.id


def test_smolagents(url: str) -> None:
    """The agent forces calls by itself, of its tools or of ``final_answer``."""
    smolagents = pytest.importorskip("smolagents")
    asked = []

    class Weather(smolagents.Tool):  # type: ignore[name-defined, misc]
        name = "weather"
        description = "of a city"
        inputs = {"city": {"type": "string", "description": "which", "enum": sorted(CITIES)}}
        output_type = "string"

        def forward(self, city: str) -> str:
            asked.append(city)
            return "rain"

    only = {"type": "function", "function": {"name": "weather"}}
    model = smolagents.OpenAIModel(
        "demo", api_base=f"{url}/v1", api_key="none", max_tokens=200, tool_choice=only
    )
    agent = smolagents.ToolCallingAgent(
        tools=[Weather()], model=model, max_steps=3, verbosity_level=0
    )
    agent.prompt_templates["system_prompt"] = "Call weather"  # its own is longer than the model's
    agent.memory.system_prompt.system_prompt = "Call weather"
    agent.run("Weather?")
    assert len(asked) == 3
    assert set(asked) <= CITIES


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_pydantic_ai(url: str, kind: str) -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.exceptions import UsageLimitExceeded
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.usage import UsageLimits

    made = OpenAIChatModel if kind == "chat" else OpenAIResponsesModel
    named: Any = {"type": "function", "name": "weather"}
    if kind == "chat":
        named = {"type": "function", "function": {"name": "weather"}}
    model: Any = made("demo", provider=OpenAIProvider(api_key="k", base_url=f"{url}/v1"))
    agent = Agent(model, model_settings={"extra_body": {"tool_choice": named}, "max_tokens": 200})
    asked = []

    @agent.tool_plain
    def weather(city: str) -> str:
        asked.append(city)
        return "rain"

    with pytest.raises(UsageLimitExceeded):
        agent.run_sync("Weather?", usage_limits=UsageLimits(request_limit=3))
    assert len(asked) >= 3


@pytest.mark.parametrize("kind", ["chat", "responses", "anthropic"])
@pytest.mark.parametrize("streams", [False, True])
def test_langchain(url: str, kind: str, streams: bool) -> None:
    messages_of = pytest.importorskip("langchain_core.messages")
    if kind == "anthropic":
        made = pytest.importorskip("langchain_anthropic").ChatAnthropic
        model = made(model="demo", base_url=url, api_key="k", max_tokens=200)
    else:
        made = pytest.importorskip("langchain_openai").ChatOpenAI
        model = made(
            model="demo",
            base_url=f"{url}/v1",
            api_key="k",
            use_responses_api=kind == "responses",
            max_tokens=200,
        )
    bound = model.bind_tools([WEATHER], tool_choice="weather", parallel_tool_calls=False)
    messages: list[Any] = [messages_of.HumanMessage("Weather?")]
    for _ in range(3):
        if streams:
            chunks = list(bound.stream(messages))
            said = chunks[0]
            for chunk in chunks[1:]:
                said += chunk
        else:
            said = bound.invoke(messages)
        [call] = said.tool_calls
        assert call["args"]["city"] in CITIES
        messages += [said, messages_of.ToolMessage("rain", tool_call_id=call["id"])]
    if kind != "anthropic":
        shaped = model.with_structured_output({"title": "Place", **SCHEMA}, method="json_schema")
        assert shaped.invoke("Where?")["city"] in CITIES


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_openai_agents(url: str, kind: str) -> None:
    agents = pytest.importorskip("agents")
    import openai

    agents.set_tracing_disabled(True)
    asked = []

    @agents.function_tool  # type: ignore[untyped-decorator]
    def weather(city: str) -> str:
        """Of a city."""
        asked.append(city)
        return "rain"

    async def use() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as client:
            made = {
                "chat": agents.OpenAIChatCompletionsModel,
                "responses": agents.OpenAIResponsesModel,
            }[kind]
            agent = agents.Agent(
                name="a",
                instructions="Call",
                tools=[weather],
                model=made(model="demo", openai_client=client),
                model_settings=agents.ModelSettings(tool_choice="required", max_tokens=300),
                reset_tool_choice=False,
            )
            with pytest.raises(agents.MaxTurnsExceeded):
                await agents.Runner.run(agent, "Weather?", max_turns=3)

    asyncio.run(use())
    assert len(asked) >= 3
