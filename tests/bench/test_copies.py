"""That the router's benchmark opens requests as copies do, and every token is handed out."""

from __future__ import annotations

import argparse
import re

import pytest

from bench import copies


def test_the_router_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    copies.router(argparse.Namespace(streams=3, tokens=4))
    assert re.match(r"router: \d+\.\d\d us of processor time a token", capsys.readouterr().out)
