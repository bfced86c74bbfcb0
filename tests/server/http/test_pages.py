"""The pages at /ui and /docs as a person uses them, in a headless Chromium."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cli.test_native import serving
from tests.server.http.chromium import BROWSER, Page, page

pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no chromium")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--ui", "--max-model-len", "256", "-o", "kv_cache_bytes=4M") as url:
        yield url


@asynccontextmanager
async def visiting(url: str, directory: Path) -> AsyncIterator[Page]:
    """A page of a server, in which nothing goes wrong and which asks nobody else."""
    async with page(directory) as tab:
        await tab.go(url)
        yield tab
        assert tab.faults == []
        server = url.rpartition("/")[0]
        assert [each for each in tab.urls if not each.startswith(server)] == []


def click(tab: str) -> str:
    return f"[...$('tabs').children].find((e) => e.textContent === '{tab}').click()"


def test_a_person_talks_completes_and_looks(url: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with visiting(f"{url}/ui", tmp_path) as tab:
            await tab.until("$('model').options.length === 1")
            await tab.until("$('cards').children.length === 12")
            assert "cached" in await tab.value("$('blocktext').textContent")
            await tab.picture("live")

            await tab.value(click("chat"))
            await tab.value("$('chatknobs').querySelector('input').value = 12")
            await tab.value("$('question').value = 'Hello'; $('send').click()")
            await tab.until("/tokens\\/s/.test($('chatspeed').textContent)")
            shown = await tab.value("[...$('talk').children].map((e) => e.textContent)")
            assert shown[0] == "Hello"
            assert shown[1]
            await tab.picture("chat")

            await tab.value(click("completion"))
            await tab.value(
                "$('compknobs').querySelector('input').value = 8; $('complete').click()"
            )
            await tab.until("$('out').querySelectorAll('.tok').length > 1")
            assert " %" in await tab.value("$('out').querySelector('.tok').title")
            await tab.picture("completion")

            await tab.value(click("configuration"))
            await tab.until("$('config').querySelectorAll('tr').length > 2")
            assert "kv_cache_bytes" in await tab.value("$('config').innerText")
            await tab.picture("configuration")

            await tab.value(click("api"))
            await tab.until("$('routes').querySelectorAll('tr').length > 20")
            assert await tab.value("$('live').hidden && !$('api').hidden")
            await tab.picture("api")

    asyncio.run(run())


PRESS_ENTER = "$('question').dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}))"


def test_enter_sends_and_forgetting_ends_an_answer(url: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with visiting(f"{url}/ui", tmp_path) as tab:
            await tab.until("$('model').options.length === 1")
            assert await tab.value("$('halt').disabled")
            await tab.value(click("chat"))
            await tab.value("$('question').value = 'Hello'")
            await tab.value(PRESS_ENTER.replace("'Enter'", "'Enter', shiftKey: true"))
            assert await tab.value("messages.length === 0")
            await tab.value(f"{PRESS_ENTER}; $('forget').click()")
            await tab.until("controller === null")
            assert await tab.value("messages.length + $('talk').children.length") == 0
            assert await tab.value("$('question').value") == ""

    asyncio.run(run())


def test_figures_have_their_places_before_there_are_any(url: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with visiting(f"{url}/ui", tmp_path) as tab:
            await tab.until("last !== null")
            shown = await tab.value("[...$('cards').querySelectorAll('b')].map((e) => e.innerText)")
            assert (len(shown), shown[2], shown[4]) == (12, "0 /s", "–")  # noqa: RUF001

    asyncio.run(run())


@pytest.mark.parametrize("path", ["ui", "docs"])
def test_nothing_is_wider_than_a_telephone(url: str, tmp_path: Path, path: str) -> None:
    async def run() -> None:
        async with visiting(f"{url}/{path}", tmp_path) as tab:
            params = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
            await tab.tell("Emulation.setDeviceMetricsOverride", **params)
            if path == "docs":
                await tab.until("document.querySelectorAll('details').length > 20")
                await tab.value(
                    "for (const e of document.querySelectorAll('details')) e.open = true"
                )
                await tab.until("document.querySelectorAll('textarea').length > 10")
            for name in ("live", "chat", "completion", "configuration", "api"):
                if path == "ui":
                    await tab.value(click(name))
                    await tab.until(f"!$('{name}').hidden")
                assert await tab.value("document.documentElement.scrollWidth") <= 390

    asyncio.run(run())


def test_a_refusal_is_shown_where_it_was_asked(url: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with page(tmp_path) as tab:
            await tab.go(f"{url}/ui")
            await tab.until("$('model').options.length === 1")
            await tab.value("$('prompt').value = 'word '.repeat(2000); $('complete').click()")
            await tab.until("/^400: .*maximum context length/.test($('out').textContent)")

    asyncio.run(run())


def test_a_route_is_tried_from_its_documentation(url: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with visiting(f"{url}/docs", tmp_path) as tab:
            await tab.until("document.querySelectorAll('details').length > 20")
            await tab.picture("docs")
            await tab.value(
                "window.route = [...document.querySelectorAll('details')].find((e) => "
                "e.querySelector('code').textContent === '/invocations'); route.open = true"
            )
            await tab.until("route.querySelector('textarea') !== null")
            body = '{"inputs": "Once", "parameters": {"max_new_tokens": 2}}'
            await tab.value(
                f"route.querySelector('textarea').value = '{body}'; "
                "route.querySelector('button').click()"
            )
            await tab.until(
                "/^200 OK\\s.*generated_text/s.test(route.querySelector('pre').textContent)"
            )
            await tab.value("route.scrollIntoView()")
            await tab.picture("docs-answer")

    asyncio.run(run())
