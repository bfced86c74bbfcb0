"""Streams read by a browser's ``fetch``, from a page of another origin.

``make test-browser`` fetches a headless Chromium (``chromium.py``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.server.fake_engine import WORDS, FakeEngine
from tests.server.harness import eventually, serving
from tests.server.http.chromium import BROWSER, browser

PAGE = Path(__file__).parent / "browser_page.html"


class PageServer:
    """Serves the page, and takes what its script found."""

    def __init__(self) -> None:
        self.results: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def page(self, request: web.Request) -> web.Response:
        return web.Response(text=PAGE.read_text(), content_type="text/html")

    async def take(self, request: web.Request) -> web.Response:
        self.results.set_result(json.loads(await request.text()))
        return web.Response()


@asynccontextmanager
async def page_server() -> AsyncIterator[tuple[PageServer, str]]:
    server, app = PageServer(), web.Application()
    app.router.add_get("/", server.page)
    app.router.add_post("/results", server.take)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def visit(directory: Path) -> dict[str, Any]:
    """What the page's script found."""
    async with page_server() as (page, origin):
        engine = FakeEngine(delay_s=0.05)
        async with serving(engine, cors_origins=(origin,)) as served:
            url = f"{origin}/?server=http://127.0.0.1:{served.port}"
            async with browser(url, directory), asyncio.timeout(60):
                results = await page.results
                await eventually(lambda: engine.aborted)
        return results


@pytest.mark.skipif(BROWSER is None, reason="run: make test-browser")
def test_streams_reach_a_page_piece_by_piece(tmp_path: Path) -> None:
    results = asyncio.run(visit(tmp_path))
    assert "failure" not in results
    text = "".join(WORDS)
    openai, lmi = results["openai"], results["lmi"]
    assert (openai["status"], openai["type"]) == (200, "text/event-stream; charset=utf-8")
    events = openai["text"].split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert (lmi["status"], lmi["type"]) == (200, "application/jsonlines")
    assert json.loads(lmi["text"].splitlines()[-1])["generated_text"] == text
    for answer in (openai, lmi):
        assert answer["pieces"] >= 4
        assert answer["ms"] > 150  # eight tokens, 50 ms apart
    assert results["missing"]["status"] == 404
    assert json.loads(results["missing"]["text"])["error"]["code"] == "model_not_found"
    assert results["left"] == "AbortError"
