"""The Batch API: the real ``openai`` client, bad input, and a process that is killed."""

from __future__ import annotations

import asyncio
import io
import json
import math
import stat
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import openai.resources.responses.responses  # lazily it would be compiled beside a watched loop
import pytest

from lmi_core.demo import MODEL_DIR
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.errors import UserError
from lmi_core.settings.batch_config import BatchConfig
from lmi_core.text.chat import ChatTemplate
from lmi_server.batches.store import ENDED, BatchStore
from tests.server.configured import configured
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Served, serving
from tests.server.serve_process import ServeProcess, serve

pytestmark = pytest.mark.timeout(180)
TEMPLATE = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"})
CHAT = "/v1/chat/completions"


def line(number: int, url: str = CHAT, **body: Any) -> str:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": f"Go {number}"}]}
    if url != CHAT:
        asked = {"prompt": f"Go {number}"}
    asked = {"model": "model", "max_tokens": 3, **asked, **body}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": asked})


def text_of(*lines: str) -> io.BytesIO:
    file = io.BytesIO("\n".join(lines).encode())
    file.name = "asked.jsonl"
    return file


def client_of(served: Served, key: str = "k") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key=key, max_retries=0)


def begin(client: openai.OpenAI, *lines: str, endpoint: Any = CHAT) -> str:
    file = client.files.create(file=text_of(*lines), purpose="batch")
    assert (file.filename, file.purpose, file.status) == ("asked.jsonl", "batch", "processed")
    made = client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )
    assert made.metadata == {"a": "b"}
    return made.id


def ended(client: openai.OpenAI, batch_id: str, timeout_s: float = 60.0) -> Any:
    until = time.monotonic() + timeout_s
    while (batch := client.batches.retrieve(batch_id)).status not in ENDED:
        assert time.monotonic() < until, batch
        time.sleep(0.02)
    return batch


def answers(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """By their ids, each of which is there once."""
    if file_id is None:
        return {}
    lines = [json.loads(each) for each in client.files.content(file_id).text.splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    return found


def run(
    use: Callable[[openai.OpenAI], None], directory: Path, engine: Any = None, **options: Any
) -> None:
    async def serve_it() -> None:
        config = options.pop("batch", BatchConfig(directory=directory))
        async with serving(engine, batch=config, chat_template=TEMPLATE, **options) as served:
            with client_of(served) as client:
                await asyncio.to_thread(use, client)

    asyncio.run(serve_it())


def test_files_and_batches(tmp_path: Path) -> None:
    engine = FakeEngine()

    def use(client: openai.OpenAI) -> None:
        lines = [line(i) for i in range(20)]
        batch_id = begin(client, *lines, "", line(20, stream=True), line(21, model="other"))
        batch = ended(client, batch_id)
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (22, 20, 2)
        output = answers(client, batch.output_file_id)
        assert set(output) == {f"r{i}" for i in range(20)}
        said = output["r3"]["response"]
        assert said["status_code"] == 200
        assert said["body"]["choices"][0]["message"]["content"]
        failed = answers(client, batch.error_file_id)
        assert failed["r20"]["response"]["body"]["error"]["param"] == "stream"
        assert failed["r21"]["response"]["status_code"] == 404
        assert {each.id for each in client.batches.list(limit=1)} == {batch_id}
        files = client.files.list(purpose="batch_output").data
        assert {file.id for file in files} == {batch.output_file_id, batch.error_file_id}
        assert client.files.retrieve(batch.input_file_id).bytes > 0
        assert client.files.delete(batch.input_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(batch.input_file_id)
        with pytest.raises(openai.ConflictError, match="can't be cancelled"):
            client.batches.cancel(batch_id)
        second = ended(
            client, begin(client, line(0, "/v1/completions"), endpoint="/v1/completions")
        )
        assert second.request_counts.completed == 1
        assert [each.id for each in client.batches.list(limit=1).data] == [second.id]
        assert [each.id for each in client.batches.list(after=second.id).data] == [batch_id]

    run(use, tmp_path, engine)
    waits = {(request.priority, request.max_queue_s) for request in engine.requests}
    assert waits == {(1 << 20, math.inf)}  # of lines: behind everybody's, as long as it takes
    modes = {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*") if p.is_file()}
    assert modes == {0o600}


def test_async_client(tmp_path: Path) -> None:
    async def tried(url: Any) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
            file = await client.files.create(file=text_of(line(1), line(2)), purpose="batch")
            assert (await client.files.wait_for_processing(file.id)).id == file.id
            assert (await client.files.content(file.id)).text.splitlines() == [line(1), line(2)]
            made = await client.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h"
            )
            while (  # noqa: ASYNC110
                batch := await client.batches.retrieve(made.id)
            ).status not in ENDED:
                await asyncio.sleep(0.02)
            assert [each.id async for each in client.batches.list()] == [made.id]
            assert batch.output_file_id is not None
            said = (await client.files.content(batch.output_file_id)).text
            assert {json.loads(each)["custom_id"] for each in said.splitlines()} == {"r1", "r2"}
            assert len([each async for each in client.files.list()]) == 2
            with pytest.raises(openai.ConflictError, match="can't be cancelled"):
                await client.batches.cancel(made.id)
            assert (await client.files.delete(file.id)).deleted
            with pytest.raises(openai.NotFoundError):
                await client.files.retrieve(file.id)

    run(lambda client: asyncio.run(tried(client.base_url)), tmp_path)


def test_bad_input(tmp_path: Path) -> None:
    def use(client: openai.OpenAI) -> None:
        for lines, code in (
            (["{"], "invalid_json_line"),
            ([line(1), line(1)], "duplicate_custom_id"),
            ([line(1, "/v1/completions")], "mismatched_url"),
            ([line(1).replace("POST", "GET")], "invalid_method"),
            (["\n"], "empty_file"),
            ([line(1).replace('"r1"', '""')], "invalid_custom_id"),
        ):
            batch = ended(client, begin(client, *lines))
            assert batch.status == "failed"
            assert batch.errors.data[0].code == code
            assert batch.output_file_id is None
        file = client.files.create(file=text_of(line(1)), purpose="batch")
        made: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        for changes, param in (
            ({"endpoint": "/v1/images"}, "endpoint"),
            ({"completion_window": "1h"}, "completion_window"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                client.batches.create(**{**made, **changes})
            assert refused.value.param == param
        for wrong in ("file-1", "../../etc", f"file-{'0' * 32}"):
            with pytest.raises(openai.NotFoundError):
                client.batches.create(**{**made, "input_file_id": wrong})
        with pytest.raises(openai.BadRequestError, match="purpose must be batch"):
            client.files.create(file=text_of("x"), purpose="fine-tune")
        with pytest.raises(openai.BadRequestError, match="limit must be"):
            client.batches.list(limit=0)
        with pytest.raises(openai.BadRequestError, match="after names"):
            client.batches.list(after="batch_1")

    run(use, tmp_path)


def test_cancel(tmp_path: Path) -> None:
    def use(client: openai.OpenAI) -> None:
        batch_id = begin(client, *(line(i) for i in range(50)))
        while client.batches.retrieve(batch_id).request_counts.completed < 3:
            time.sleep(0.01)
        with pytest.raises(openai.ConflictError, match="is being read"):
            client.files.delete(client.batches.retrieve(batch_id).input_file_id)
        assert client.batches.cancel(batch_id).status in ("cancelling", "cancelled")
        batch = ended(client, batch_id)
        assert batch.status == "cancelled"
        output = answers(client, batch.output_file_id)
        assert len(output) == batch.request_counts.completed < 50
        # Its places are free again.
        assert ended(client, begin(client, line(1))).status == "completed"

    run(use, tmp_path, FakeEngine(delay_s=0.03))


def test_tenants_have_their_own_and_there_is_an_end_to_room(tmp_path: Path) -> None:
    def use(client: openai.OpenAI) -> None:
        file = client.files.create(file=text_of(line(1)), purpose="batch")
        with openai.OpenAI(base_url=client.base_url, api_key="j", max_retries=0) as other:
            assert other.files.list().data == []
            with pytest.raises(openai.NotFoundError):
                other.files.content(file.id)
        with pytest.raises(openai.BadRequestError, match=r"\(batch_dir_size\)"):
            client.files.create(file=text_of("x" * 4000), purpose="batch")
        batch = ended(client, begin(client, *(line(i, max_tokens=90) for i in range(12))))
        assert batch.status == "failed"
        assert "batch_dir_size" in batch.errors.data[0].message
        assert 0 < len(answers(client, batch.output_file_id)) < 12

    config = BatchConfig(directory=tmp_path, max_bytes=4000)
    run(use, tmp_path, batch=config, api_keys=("k", "j"))


def test_the_options_of_a_configuration(tmp_path: Path) -> None:
    there = tmp_path / "there"
    settings = configured(f"batch_dir={there}", "batch_dir_size=2000", "batch_concurrency=2")
    engine = FakeEngine(delay_s=0.002)
    most = 0

    def use(client: openai.OpenAI) -> None:
        nonlocal most
        batch_id = begin(client, *(line(i) for i in range(6)))
        while client.batches.retrieve(batch_id).status not in ENDED:
            most = max(most, len(engine.running))
        assert there.is_dir()
        with pytest.raises(openai.BadRequestError, match="the 2000 that there is room for"):
            client.files.create(file=text_of("x" * 3000), purpose="batch")

    run(use, tmp_path, engine, **settings)
    assert most <= 2


def test_where_it_is_off(tmp_path: Path) -> None:

    def use(client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="batch_dir"):
            client.files.list()

    run(use, tmp_path, batch=None)


def test_a_directory_that_cannot_be_used_is_the_servers_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def use(client: openai.OpenAI) -> None:
        with pytest.raises(openai.InternalServerError, match=r"batch_dir .*/file can't be used"):
            client.batches.list()

    run(use, tmp_path / "file")


def test_a_batch_that_expires(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, "", 1 << 20)
    file = store.add_file("a", "batch", "\n".join(line(i) for i in range(4)).encode())
    fields = {
        "input_file_id": file["id"],
        "endpoint": CHAT,
        "status": "in_progress",
        "expires_at": int(time.time()) - 1,
        "request_counts": {"total": 4, "completed": 0, "failed": 0},
        "output_id": f"file-{'a' * 32}",
        "errors_id": f"file-{'b' * 32}",
        "completion_window": "24h",
    }
    batch_id = store.add_batch(fields)["id"]

    def use(client: openai.OpenAI) -> None:
        batch = ended(client, batch_id)
        assert (batch.status, batch.request_counts.failed) == ("expired", 4)
        failed = answers(client, batch.error_file_id)
        assert {each["error"]["code"] for each in failed.values()} == {"batch_expired"}

    run(use, tmp_path)


def test_a_killed_process_neither_loses_nor_doubles_lines(tmp_path: Path) -> None:
    arguments = ("--option", f"batch_dir={tmp_path / 'b'}", "--served-model-name", "model")
    lines = [line(i, max_tokens=30, ignore_eos=True, seed=i, temperature=1) for i in range(60)]
    server = ServeProcess(MODEL_DIR, *arguments)
    try:
        server.wait_until_ready()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k") as client:
            batch_id = begin(client, *lines)
            while client.batches.retrieve(batch_id).request_counts.completed < 5:
                time.sleep(0.005)
    finally:
        server.kill()
    [partial] = (tmp_path / "b").rglob("*.output")
    num_before = partial.read_bytes().count(b"\n")
    with partial.open("ab") as torn:
        torn.write(b"\0\0\0\n" + b'{"custom_id": "r')
    before = {json.loads(each)["custom_id"] for each in whole_lines(partial)[:num_before]}
    assert 5 <= num_before == len(before) < 60
    with (
        serve(MODEL_DIR, *arguments) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k") as client,
    ):
        batch = ended(client, batch_id, 120.0)
        assert (batch.status, batch.request_counts.completed) == ("completed", 60)
        assert set(answers(client, batch.output_file_id)) == {f"r{i}" for i in range(60)}


def whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


class Refusing(FakeEngine):
    """Refuses prompts with a word."""

    def generate_batches(
        self, request: GenerationRequest
    ) -> AsyncGenerator[Sequence[TokenEvent], None]:
        if "long" in (request.prompt or ""):
            raise UserError("the prompt is too long", field="prompt")
        return super().generate_batches(request)


def test_errors_are_those_of_the_route(tmp_path: Path) -> None:
    bodies: dict[Any, list[dict[str, Any]]] = {
        "/v1/completions": [{"prompt": ["a", "long"]}, {"prompt": "long"}, {"prompt": "a", "x": 1}],
        CHAT: [{"messages": [{"role": "user", "content": "long"}]}],
        "/v1/responses": [{"input": "long"}],
    }

    def use(client: openai.OpenAI) -> None:
        for url, asked in bodies.items():
            lines = [
                json.dumps({"custom_id": f"r{i}", "method": "POST", "url": url, "body": body})
                for i, body in enumerate(asked)
            ]
            batch = ended(client, begin(client, *lines, endpoint=url))
            failed = answers(client, batch.error_file_id)
            for i, body in enumerate(asked):
                with pytest.raises(openai.APIStatusError) as raised:
                    client.post(url.removeprefix("/v1"), body=body, cast_to=object)
                told = failed[f"r{i}"]["response"]
                assert told["status_code"] == raised.value.status_code
                assert told["body"] == raised.value.response.json()

    run(use, tmp_path, Refusing(), strict_requests=True)


def test_responses(tmp_path: Path) -> None:
    """As their route gives them, kept for the tenant whose batch it is."""

    def use(client: openai.OpenAI) -> None:
        url: Any = "/v1/responses"
        before = client.responses.create(input="Before", max_output_tokens=2)
        bodies = [
            {"input": "Go", "max_output_tokens": 3},
            {"input": "On", "max_output_tokens": 3, "previous_response_id": before.id},
            {"input": "Go", "background": True},
            {"input": "Go", "stream": True},
        ]
        lines = [
            json.dumps({"custom_id": f"r{i}", "method": "POST", "url": url, "body": body})
            for i, body in enumerate(bodies)
        ]
        batch = ended(client, begin(client, *lines, endpoint=url))
        output = answers(client, batch.output_file_id)
        assert set(output) == {"r0", "r1"}
        said = output["r0"]["response"]["body"]
        assert client.responses.retrieve(said["id"]).output_text
        assert output["r1"]["response"]["body"]["previous_response_id"] == before.id
        failed = answers(client, batch.error_file_id)
        params = [failed[name]["response"]["body"]["error"]["param"] for name in ("r2", "r3")]
        assert params == ["background", "stream"]
        with (
            openai.OpenAI(base_url=client.base_url, api_key="j", max_retries=0) as other,
            pytest.raises(openai.NotFoundError),
        ):
            other.responses.retrieve(said["id"])

    run(use, tmp_path, api_keys=("k", "j"), response_store_bytes=1 << 20)
