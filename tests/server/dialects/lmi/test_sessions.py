"""Stateful sessions: opened, used, closed, expired; and the blocks that they keep."""

from __future__ import annotations

import asyncio
import json
import resource
import stat
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmi_core.copies.copies import Copies
from lmi_core.demo import MODEL_DIR
from lmi_core.engine.engine import Engine
from lmi_core.errors import CapacityError, UserError
from lmi_core.settings.engine_config import EngineConfig
from lmi_server.dialects.lmi import sessions
from lmi_server.dialects.lmi.options import LmiOptions
from lmi_server.dialects.lmi.session_store import SessionOptions, SessionStore
from lmi_server.http.metrics import Metrics
from tests.engine.harness import until
from tests.server.configured import configured
from tests.server.harness import Answer, Served, serving, serving_backend

HEADER = "X-Amzn-SageMaker-Session-Id"
INPUTS = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 2}}


def options(directory: Path, lifetime_s: int = 60) -> LmiOptions:
    return LmiOptions(sessions=SessionOptions(directory=directory, lifetime_s=lifetime_s))


async def opened(served: Served, **headers: str) -> str:
    answer = await served.post({"requestType": "NEW_SESSION"}, headers=headers)
    assert answer.status == 200, answer.body
    session_id, expires = answer.headers[HEADER].split("; Expires=")
    assert len(expires) == len("2026-01-01T00:00:00Z")
    assert json.loads(answer.body) == {"result": f"Session {session_id} created"}
    return session_id


def listed(directory: Path) -> list[Path]:
    return list(directory.iterdir())


def message(answer: Answer) -> Any:
    assert answer.status == 424, answer.body
    return json.loads(answer.body)["error"]


def test_open_use_and_close(tmp_path: Path) -> None:
    async def use() -> None:
        async with serving(lmi=options(tmp_path)) as served:
            session_id = await opened(served, **{HEADER: "NEW_SESSION"})
            [directory] = listed(tmp_path)
            assert directory.name == session_id
            assert stat.S_IMODE((directory / "session.json").stat().st_mode) == 0o600
            answer = await served.post(INPUTS, headers={HEADER: session_id})
            assert answer.status == 200
            assert served.engine.requests[-1].session == f"session {session_id}"
            assert HEADER not in answer.headers
            streamed = await served.post({**INPUTS, "stream": True}, headers={HEADER: session_id})
            assert streamed.status == 200
            closed = await served.post({"requestType": "CLOSE"}, headers={HEADER: session_id})
            assert closed.headers["X-Amzn-SageMaker-Closed-Session-Id"] == session_id
            assert json.loads(closed.body) == {"result": f"Session {session_id} closed"}
            assert not listed(tmp_path)
            for body in (INPUTS, {"requestType": "CLOSE"}):
                gone = await served.post(body, headers={HEADER: session_id})
                assert message(gone) == f"session not found: {session_id}"
            # A request may open its session itself, and need not be in one.
            answer = await served.post(INPUTS, headers={HEADER: "NEW_SESSION"})
            assert answer.status == 200
            session_id = answer.headers[HEADER].partition(";")[0]
            assert (await served.post(INPUTS, headers={HEADER: session_id})).status == 200
            assert (await served.post(INPUTS)).status == 200
            assert served.engine.requests[-1].session == ""
            refused = await served.post({"inputs": 7}, headers={HEADER: "NEW_SESSION"})
            assert refused.status >= 400
            assert [directory.name for directory in listed(tmp_path)] == [session_id]
            wrong = await served.post({"requestType": "PAUSE"}, headers={HEADER: session_id})
            assert message(wrong) == "requestType must be NEW_SESSION or CLOSE, got 'PAUSE'"

    asyncio.run(use())


def test_where_they_are_off() -> None:
    async def use() -> None:
        async with serving() as served:
            for body in (INPUTS, {"requestType": "NEW_SESSION"}):
                refused = await served.post(body, headers={HEADER: "NEW_SESSION"})
                assert "option.enable_stateful_sessions" in message(refused)

    asyncio.run(use())


def test_the_options_of_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time()
    store = partial(SessionStore, clock=lambda: now_s)
    monkeypatch.setattr(sessions, "SessionStore", store)

    async def use() -> None:
        nonlocal now_s
        settings = configured(
            "option.enable_stateful_sessions=true",
            f"option.sessions_path={tmp_path / 'there'}",
            "option.sessions_expiration=1",
        )
        async with serving(**settings) as served:
            session_id = await opened(served)
            assert (tmp_path / "there" / session_id).is_dir()
            assert (await served.post(INPUTS, headers={HEADER: session_id})).status == 200
            now_s += 1.1
            expired = await served.post(INPUTS, headers={HEADER: session_id})
            assert message(expired).startswith(f"session not found: {session_id} (it expired at 2")

    asyncio.run(use())


def test_a_restart_finds_them_and_tenants_have_their_own(tmp_path: Path) -> None:
    async def use() -> None:
        settings: dict[str, Any] = {"lmi": options(tmp_path), "api_keys": ("a", "b")}
        mine, theirs = ({"Authorization": f"Bearer {key}"} for key in ("a", "b"))
        async with serving(**settings) as served:
            session_id = await opened(served, **mine)
        async with serving(**settings) as served:
            kept = {HEADER: session_id}
            assert (await served.post(INPUTS, headers={**mine, **kept})).status == 200
            refused = await served.post(INPUTS, headers={**theirs, **kept})
            assert message(refused) == f"session not found: {session_id}"

    asyncio.run(use())


def test_the_store_is_bounded_and_forgets(tmp_path: Path) -> None:
    now = 1e9
    given = SessionOptions(directory=tmp_path, lifetime_s=10)
    store = SessionStore(given, "m", clock=lambda: now, max_sessions=2)
    first, second = store.create("t"), store.create("t")
    assert not store.end_expired()
    with pytest.raises(CapacityError, match="2 sessions"):
        store.create("t")
    store.close(store.create("other").id, "other")
    now += 10
    with pytest.raises(UserError, match="expired at 2001-09-09T01:46:50Z"):
        store.get(first.id, "t")
    (tmp_path / "not-one").mkdir()
    (tmp_path / second.id / "session.json").write_text("{")
    again = SessionStore(given, "m", clock=lambda: now)
    assert [session.id for session in again._known().values()] == [first.id]
    assert not SessionStore(given, "other", clock=lambda: now)._known()
    assert not again.end_expired()
    assert store.end_expired() == [first, second]  # where there are many
    assert store.create("t")
    now += 3600
    assert again.end_expired() == [first]
    assert not (tmp_path / first.id).exists()
    blocked = SessionOptions(directory=tmp_path / "file" / "in", lifetime_s=1)
    (tmp_path / "file").touch()
    with pytest.raises(CapacityError, match=r"option\.sessions_path"):
        SessionStore(blocked, "m").create("t")


def test_a_full_disk_keeps_nothing_of_a_session(tmp_path: Path) -> None:
    store = SessionStore(SessionOptions(directory=tmp_path, lifetime_s=10), "m")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))  # a write beyond it fails in the middle
    try:
        with pytest.raises(CapacityError, match=r"option\.sessions_path"):
            store.create("t")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [*tmp_path.iterdir()]
    assert store.create("t")


CONFIG = EngineConfig(model=MODEL_DIR, num_threads=1, kv_cache_bytes=4 << 20, block_size=16)


@asynccontextmanager
async def serving_engine(directory: Path, kind: str = "engine") -> Any:
    metrics = Metrics()
    observer = metrics.observer("model")
    if kind == "copies":
        backend: Any = Copies(CONFIG, 2, observer=observer)
    elif kind == "ranks":
        backend = Engine(replace(CONFIG, tensor_parallel_degree=2), observer=observer)
    else:
        backend = Engine(CONFIG, observer=observer, check_integrity=True)
    async with (
        backend as engine,
        serving_backend(engine, metrics, lmi=options(directory)) as served,
    ):
        yield served, engine


@pytest.mark.parametrize("kind", ["engine", "ranks", "copies"])
def test_a_conversation_stays_cached_until_its_session_ends(tmp_path: Path, kind: str) -> None:
    story = "Once upon a time there was a dog. " * 6

    async def use() -> None:
        async with serving_engine(tmp_path, kind) as (served, engine):
            body = {"inputs": story, "parameters": {"max_new_tokens": 8}}
            session_id = await opened(served)
            await served.post(body, headers={HEADER: session_id})
            await until(lambda: engine.stats().num_running == 0 < engine.stats().num_used_blocks)
            num_kept = engine.stats().num_used_blocks
            assert num_kept >= 2
            # What others ask, as much as fills the pool several times, doesn't take its blocks.
            for i in range(60):
                other = {"inputs": f"{i} {i * 7} {story}", "parameters": {"max_new_tokens": 1}}
                assert (await served.post(other)).status == 200
            await until(lambda: engine.stats().num_used_blocks == num_kept)
            await asyncio.sleep(0.3 if kind == "copies" else 0)  # until copies have said it all
            cached = engine.stats().totals.num_cached_tokens + (num_kept - 1) * 16
            await served.post(body, headers={HEADER: session_id})
            await until(lambda: engine.stats().totals.num_cached_tokens >= cached)
            await served.post({"requestType": "CLOSE"}, headers={HEADER: session_id})
            await until(lambda: engine.stats().num_used_blocks == 0)

    asyncio.run(use())


def test_what_runs_when_its_session_is_closed_leaves_nothing(tmp_path: Path) -> None:
    """Several requests of one session at once, of which none has ended."""

    async def use() -> None:
        async with serving_engine(tmp_path) as (served, engine):
            session_id = await opened(served)
            parameters = {"max_new_tokens": 60, "ignore_eos_token": True}
            asked = [
                asyncio.create_task(
                    served.post(
                        {"inputs": f"Once {i} " * 9, "parameters": parameters},
                        headers={HEADER: session_id},
                    )
                )
                for i in range(3)
            ]
            await until(lambda: engine.stats().num_running == 3)
            await served.post({"requestType": "CLOSE"}, headers={HEADER: session_id})
            assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 3
            assert engine.stats().num_used_blocks == 0

    asyncio.run(use())


def test_a_session_that_is_closed_before_its_request_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use() -> None:
        async with serving_engine(tmp_path) as (served, engine):
            session_id = await opened(served)

            async def parsed(*arguments: Any) -> Any:
                call = await parse(*arguments)
                await served.post({"requestType": "CLOSE"}, headers={HEADER: session_id})
                return call

            monkeypatch.setattr(sessions, "parse_call", parsed)
            body = {"inputs": "Once upon a time " * 20, "parameters": {"max_new_tokens": 2}}
            assert (await served.post(body, headers={HEADER: session_id})).status == 200
            await until(lambda: engine.stats().num_used_blocks == 0)

    parse: Any = sessions.parse_call
    asyncio.run(use())


def test_sequences_come_before_what_is_kept(tmp_path: Path) -> None:
    async def use() -> None:
        async with serving_engine(tmp_path) as (served, engine):
            num_blocks = engine.stats().num_blocks
            for i in range(12):
                session_id = await opened(served)
                body = {"inputs": f"{i} " * 90, "parameters": {"max_new_tokens": 1}}
                assert (await served.post(body, headers={HEADER: session_id})).status == 200
                assert engine.stats().num_used_blocks <= num_blocks // 2
            whole = {
                "inputs": "a b " * (num_blocks * 16 // 4 - 20),
                "parameters": {"max_new_tokens": 2},
            }
            assert (await served.post(whole)).status == 200

    asyncio.run(use())
