"""Calls a server with the ``text-generation`` package; prints the name of each part that passed.

Run by the tests in an environment of its own: ``python text_generation_client.py URL``.
"""

import asyncio
import sys

from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError

PROMPT = "hello there"


def generate(client: Client) -> None:
    response = client.generate(PROMPT, max_new_tokens=6, decoder_input_details=True)
    details = response.details
    assert details.generated_tokens == len(details.tokens) <= 6
    assert details.seed is None
    assert details.prefill[0].logprob is None
    assert response.generated_text.endswith(
        "".join(token.text for token in details.tokens if not token.special)
    )
    best = client.generate(PROMPT, max_new_tokens=4, best_of=2, do_sample=True)
    assert len(best.details.best_of_sequences) == 1
    assert best.details.best_of_sequences[0].seed is not None


def stream(client: Client) -> None:
    responses = list(client.generate_stream(PROMPT, max_new_tokens=6))
    text = "".join(r.token.text for r in responses if not r.token.special)
    whole = client.generate(PROMPT, max_new_tokens=6, return_full_text=False)
    assert text == whole.generated_text
    assert responses[-1].details is not None
    assert all(r.details is None for r in responses[:-1])


def errors(client: Client) -> None:
    for call in (client.generate, lambda *a, **k: list(client.generate_stream(*a, **k))):
        message = ""
        try:
            call("x" * 200, max_new_tokens=4)
        except ValidationError as error:
            message = str(error)
        assert "`inputs` must have less than 50 tokens" in message, message


async def asynchronous(url: str) -> None:
    client = AsyncClient(url)
    response = await client.generate(PROMPT, max_new_tokens=3)
    assert response.details.generated_tokens <= 3
    pieces = [r.token.text async for r in client.generate_stream(PROMPT, max_new_tokens=3)]
    assert pieces


def chat(client: Client) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    response = client.chat(messages, max_tokens=3)
    assert response.choices[0].message.role == "assistant"
    assert response.usage["completion_tokens"] <= 3


def main() -> None:
    url = sys.argv[1]
    client = Client(url)
    generate(client)
    print("generate")
    stream(client)
    print("stream")
    errors(client)
    print("errors")
    asyncio.run(asynchronous(url))
    print("async")
    chat(client)
    print("chat")


if __name__ == "__main__":
    main()
