"""The page that says which client proved which route: complete, and true of the tests there are."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

from lmi_server.dialects.dialects import DIALECTS
from lmi_server.http.route_page import shown_path

HERE = Path(__file__).parent


class Proof(NamedTuple):
    protocol: str
    path: str
    client: str
    file: str
    test: str


def proofs() -> list[Proof]:
    lines = (HERE / "CLIENTS.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
    found = []
    for protocol, path, client, test in rows:
        file, _, name = test.strip("`").partition("::")
        found.append(Proof(protocol, path.strip("`"), client, file, name))
    return found


def test_every_route_has_its_line() -> None:
    routes = {(dialect.name, shown_path(route)) for dialect in DIALECTS for route in dialect.routes}
    assert {(proof.protocol, proof.path) for proof in proofs()} == routes


@pytest.mark.parametrize("file", sorted({proof.file for proof in proofs()}))
def test_named_tests_exist(file: str) -> None:
    tree = ast.parse((HERE / file).read_text())
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {proof.test for proof in proofs() if proof.file == file} <= there
