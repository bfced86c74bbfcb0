"""A headless Chromium that tests tell what to do, by its DevTools protocol.

``LMI_BROWSER`` names one; else that on the path is taken.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

BROWSER = os.environ.get("LMI_BROWSER") or shutil.which("chromium")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-zygote")
SCREENSHOTS = os.environ.get("LMI_SCREENSHOTS")
"""A directory that pictures are kept in, for those who look at them."""


@asynccontextmanager
async def browser(url: str, directory: Path) -> AsyncIterator[None]:
    """One that shows a page; ``directory``: where it keeps its own files."""
    assert BROWSER is not None
    process = await asyncio.create_subprocess_exec(
        BROWSER,
        *FLAGS,
        f"--user-data-dir={directory}",
        "--remote-debugging-port=0",
        "--window-size=1200,900",
        url,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        await process.wait()


class Page:
    """One tab: what it is told, and what went wrong in it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.faults: list[str] = []
        """Exceptions, errors in the console, and what the page's own rules forbade."""
        self.urls: list[str] = []
        """What it asked for."""

    async def listen(self) -> None:
        async for message in self._socket:
            said = message.json()
            params = said.get("params", {})
            match said.get("method"):
                case None:
                    answer = self._answers.pop(said["id"])
                    if not answer.done():
                        answer.set_result(said)
                case "Runtime.exceptionThrown":
                    self.faults.append(json.dumps(params["exceptionDetails"])[:500])
                case "Log.entryAdded" if params["entry"]["level"] == "error":
                    self.faults.append(params["entry"]["text"])
                case "Network.requestWillBeSent":
                    self.urls.append(params["request"]["url"])

    async def tell(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        said = await answer
        assert "error" not in said, said
        return said["result"]

    async def go(self, url: str) -> None:
        """Open a page and wait until its script has run."""
        await self.tell("Page.navigate", url=url)
        await self.until(
            f"location.href === {json.dumps(url)} && document.readyState === 'complete'"
        )

    async def value(self, expression: str) -> Any:
        """What an expression in the page is."""
        params = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        result = await self.tell("Runtime.evaluate", **params)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, condition: str, timeout_s: float = 30.0) -> None:
        """Wait for an expression in the page to be true."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.value(condition):  # noqa: ASYNC110 (it is the page's)
                    await asyncio.sleep(0.02)
        except TimeoutError:
            shown = await self.value("document.body.innerText")
            raise AssertionError(
                f"never came: {condition}; faults: {self.faults}; {shown}"
            ) from None

    async def picture(self, name: str) -> None:
        if SCREENSHOTS:
            data = await self.tell("Page.captureScreenshot", format="png")
            (Path(SCREENSHOTS) / f"{name}.png").write_bytes(base64.b64decode(data["data"]))


@asynccontextmanager
async def page(directory: Path) -> AsyncIterator[Page]:
    """An empty tab."""
    async with browser("about:blank", directory), aiohttp.ClientSession() as session:
        active = directory / "DevToolsActivePort"
        async with asyncio.timeout(60):
            while not (active.is_file() and "\n" in active.read_text()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        port = active.read_text().split()[0]
        async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
            targets = await response.json(content_type=None)
        url = next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page")
        async with session.ws_connect(url, max_msg_size=0) as socket:
            tab = Page(socket)
            listener = asyncio.create_task(tab.listen())
            for domain in ("Page", "Runtime", "Log", "Network"):
                await tab.tell(f"{domain}.enable")
            yield tab
            listener.cancel()
