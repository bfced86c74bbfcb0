"""How much of JSON Schema grammars hold, by the test suite in jsonschema's source distribution.

    python -m bench.json_schema_suite                    fetched by pip into a temporary folder
    python -m bench.json_schema_suite DIR --named        a folder with draft7, draft2020-12, ...

Prints per draft and keyword: how many schemas compile, how many valid instances their grammars let
through, as written or with properties in another order, and how many invalid ones they refuse.
``--named`` lists what compiles and still lets something invalid through, or nothing valid.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lmi_core.demo import MODEL_DIR
from lmi_core.errors import UserError
from lmi_core.structured.grammar import Grammar
from lmi_core.structured.guidance import GuidanceLibrary
from lmi_core.structured.matcher import Matcher
from lmi_core.text.tokenizer import Tokenizer

_PACKAGE = "jsonschema==4.26.0"
_DRAFTS = ("draft3", "draft4", "draft6", "draft7", "draft2019-09", "draft2020-12")
_MAX_ORDERS = 720


@dataclass
class Counts:
    """Of one keyword in one draft."""

    schemas: int = 0
    compiled: int = 0
    valid: int = 0
    accepted: int = 0
    reordered: int = 0
    """Accepted with properties in another order than the suite has them."""
    invalid: int = 0
    refused: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def row(self, *names: str) -> str:
        cells = (
            *names,
            f"{self.compiled} of {self.schemas}",
            f"{self.accepted} + {self.reordered} of {self.valid}",
            f"{self.refused} of {self.invalid}",
            "; ".join(f"{reason} ({count})" for reason, count in self.reasons.most_common(3)),
        )
        return f"| {' | '.join(cells)} |"

    def add(self, other: Counts) -> None:
        for name in ("schemas", "compiled", "valid", "accepted", "reordered", "invalid", "refused"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Judge:
    """Whether texts follow grammars, by the demo model's tokens."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.load(MODEL_DIR)
        self._size = self._tokenizer.num_tokens
        self._eos_id = 5
        self._library = GuidanceLibrary(
            self._tokenizer, vocab_size=self._size, eos_token_ids=[self._eos_id]
        )

    def compile(self, schema: Any) -> Any:
        return self._library.compile(Grammar.json_schema(schema, field="schema"))

    def follows(self, matcher: Matcher, text: str) -> bool:
        mask = np.zeros(-(-self._size // 32), np.uint32)
        ids = self._tokenizer.encode_now(text, add_special_tokens=False)
        for token_id in (*ids, self._eos_id):
            matcher.fill_mask(mask)
            if not int(mask[token_id >> 5]) >> (token_id & 31) & 1:
                return False
            matcher.accept(token_id)
        return True


def count(judge: Judge, cases: list[dict[str, Any]]) -> Counts:
    counts = Counts()
    for case in cases:
        counts.schemas += 1
        try:
            compiled = judge.compile(case["schema"])
        except UserError as error:
            counts.reasons[_reason(str(error))] += 1
            continue
        counts.compiled += 1
        for test in case["tests"]:
            _count_instance(judge, compiled, case["description"], test, counts)
    return counts


def _count_instance(
    judge: Judge, compiled: Any, description: str, test: dict[str, Any], counts: Counts
) -> None:
    orders = _orders(test["data"])
    is_first = judge.follows(compiled.matcher(), _text(next(orders)))
    if not test["valid"]:
        counts.invalid += 1
        counts.refused += not is_first
        if is_first:
            counts.wrong.append(f"lets through: {description}: {test['description']}")
        return
    counts.valid += 1
    counts.accepted += is_first
    if is_first:
        return
    if any(judge.follows(compiled.matcher(), _text(data)) for data in orders):
        counts.reordered += 1
    else:
        counts.wrong.append(f"refuses: {description}: {test['description']}")


def _orders(data: Any) -> Iterator[Any]:
    """The instance as it is, then with the properties of its outermost object in other orders."""
    if not isinstance(data, dict):
        yield data
        return
    for order in itertools.islice(itertools.permutations(data), _MAX_ORDERS):
        yield {name: data[name] for name in order}


def _text(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def _reason(message: str) -> str:
    reason = message.removeprefix("schema can't be used: ")
    return reason if len(reason) <= 70 else reason[:70] + "..."


def fetch(into: Path) -> Path:
    """The suite's folder ``tests``, from the source distribution."""
    command = [sys.executable, "-m", "pip", "-q", "download", "--no-deps", "--no-binary"]
    subprocess.run([*command, "jsonschema", "-d", str(into), _PACKAGE], check=True)
    [archive] = into.glob("jsonschema-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(into, filter="data")
    [tests] = into.glob("jsonschema-*/json/tests")
    return tests


def report(tests: Path, drafts: list[str], *, named: bool) -> None:
    judge = Judge()
    print(
        "| draft | keyword | schemas that compile | valid let through | invalid refused | why not |"
    )
    print("|---|---|---|---|---|---|")
    totals = []
    for draft in drafts:
        total = Counts()
        for path in sorted((tests / draft).glob("*.json")):
            counts = count(judge, json.loads(path.read_text()))
            print(counts.row(draft, path.stem), flush=True)
            total.add(counts)
            if named:
                print("\n".join(f"    {line}" for line in counts.wrong))
        totals.append(total.row(draft, "all"))
    print("\n".join(totals))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tests", nargs="?", type=Path)
    parser.add_argument("--draft", action="append", choices=_DRAFTS)
    parser.add_argument("--named", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tests = arguments.tests or fetch(Path(folder))
        report(tests, arguments.draft or list(_DRAFTS[1:]), named=arguments.named)


if __name__ == "__main__":
    main()
