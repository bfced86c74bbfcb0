"""The page at /ui, and who gets it where."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi_server.http.ui import DOCS, PAGE
from tests.cli.test_native import serving

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def get(url: str, **headers: str) -> tuple[int, str, str]:
    request = urllib.request.Request(url)
    for name, value in headers.items():
        request.add_header(name.replace("_", "-"), value)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            kind = response.headers["Content-Type"]
            return response.status, kind, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "", error.read().decode()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--ui", "--api", "tgi", "--api-key", "secret", "--max-model-len", "99") as url:
        yield url


def test_the_page_is_for_everybody(url: str) -> None:
    status, kind, text = get(f"{url}/ui")
    assert (status, kind, text) == (200, "text/html; charset=utf-8", PAGE.read_text())


def test_the_interface_is_for_everybody(url: str) -> None:
    """It shows nothing but what /openapi.json says to who has the key."""
    status, kind, text = get(f"{url}/docs")
    assert (status, kind, text) == (200, "text/html; charset=utf-8", DOCS.read_text())
    assert get(f"{url}/openapi.json")[0] == 401


def test_browsers_get_it_at_the_root_and_nobody_else(url: str) -> None:
    """GET / is TGI's health check."""
    assert get(f"{url}/", Accept=BROWSER)[1].startswith("text/html")
    for accept in ("*/*", "application/json", "application/json, text/html"):
        assert not get(f"{url}/", Accept=accept)[1].startswith("text/html")


def test_the_configuration_takes_the_key_and_hides_it(url: str) -> None:
    assert get(f"{url}/ui/config.json")[0] == 401
    status, _, text = get(f"{url}/ui/config.json", Authorization="Bearer secret")
    assert status == 200
    report = json.loads(text)
    (row,) = (row for row in report["models"][0]["rows"] if row["key"] == "option.max_model_len")
    assert (row["value"], row["from"]) == ("99", "--max-model-len")
    assert "secret" not in text


def test_there_is_no_page_unless_asked() -> None:
    with serving() as url:
        assert get(f"{url}/ui", Accept=BROWSER)[0] == 404
        assert get(f"{url}/ui/config.json")[0] == get(f"{url}/docs")[0] == 404
        assert not get(f"{url}/", Accept=BROWSER)[1].startswith("text/html")


@pytest.mark.parametrize("page", [PAGE, DOCS], ids=["ui", "docs"])
def test_the_page_is_one_small_file_that_asks_nobody_else(page: Path) -> None:
    text = page.read_text()
    assert len(text.encode()) < 60_000
    assert not re.findall(r"(?:src|href)=\"(?!openapi\.json|docs\")|https?://|@import|url\(", text)


def test_the_page_asks_for_routes_and_metrics_that_there_are() -> None:
    text = PAGE.read_text()
    with serving("--ui") as url:
        metrics = get(f"{url}/metrics")[2]
        for name in set(re.findall(r"\"(lmi_\w+)\"", text)):
            assert re.search(rf"^(?:# TYPE )?{name}\b", metrics, re.MULTILINE), name
        paths = json.loads(get(f"{url}/openapi.json")[2])["paths"]
        for path in set(re.findall(r"ask\(\"(/[\w/.]+)\"", text)) - {"/ui/config.json"}:
            assert path in paths or path == "/openapi.json", path
