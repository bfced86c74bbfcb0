"""Which option keys a test sets through configuration, and whether options cite such tests.

What a test resolves counts, in its process or in one of ``lmi`` that it starts. At the end of a
session that ran whole files, an option whose cited tests all leave its key alone fails the session.
"""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lmi_core.config.problem import Problems
from lmi_core.config.resolve import examine
from lmi_core.config.sources import merge
from lmi_core.config.sources.origin import Setting
from lmi_core.config.table import OPTIONS
from lmi_core.config.table.option import Option
from lmi_core.config.targets.host import Host
from lmi_core.errors import LmiError

_ROOT = Path(__file__).parents[2]
_COMMANDS = ("serve", "explain", "generate", "chat", "bench")

Records = Mapping[str, set[str]]
"""Test function, as options cite it, to the keys that it has set."""


def cited_tests(options: Iterable[Option] = OPTIONS) -> dict[tuple[str, str], set[str]]:
    """The tests that show what each backend does with each key."""
    cited: dict[tuple[str, str], set[str]] = defaultdict(set)
    for option in options:
        for backend, action in option.actions.items():
            for each in (action, *(action.by_value or {}).values()):
                if each.test is not None:
                    cited[option.key, backend].add(each.test)
    return cited


def untrue_citations(records: Records, cited: Mapping[tuple[str, str], set[str]]) -> list[str]:
    """A line for each key that none of its cited tests has set; those that didn't run all are left
    out."""
    return [
        f"{key} ({backend}) cites {', '.join(sorted(tests))}: it never sets {key}"
        for (key, backend), tests in sorted(cited.items())
        if tests <= records.keys() and not any(key in records[test] for test in tests)
    ]


@contextmanager
def keys_set() -> Iterator[set[str]]:
    """The keys that are set through configuration while the block runs."""
    keys: set[str] = set()
    choose, start = merge._choose, subprocess.Popen.__init__

    def choosing(
        option: Option, candidates: list[Setting], values: merge.Values, problems: Problems
    ) -> None:
        choose(option, candidates, values, problems)
        if option.key in values.known:
            keys.add(option.key)

    def starting(process: Any, args: Any, *rest: Any, **named: Any) -> None:
        environ = named.get("env")
        _examine(args, os.environ if environ is None else environ)
        start(process, args, *rest, **named)

    merge._choose = choosing
    subprocess.Popen.__init__ = starting  # type: ignore[method-assign]
    try:
        yield keys
    finally:
        merge._choose = choose
        subprocess.Popen.__init__ = start  # type: ignore[method-assign]


def _examine(command: object, environ: Mapping[str, str]) -> None:
    """Resolve what a process of ``lmi`` is started with as it does."""
    if not isinstance(command, Sequence) or isinstance(command, str | bytes):
        return
    words = [str(word) for word in command]
    verb = next((i for i, word in enumerate(words) if word in _COMMANDS), None)
    if verb is not None and any(Path(word).name in ("lmi", "lmi_core") for word in words[:verb]):
        with suppress(LmiError, OSError):
            examine(words[verb + 1 :], environ, Host())


class Citations:
    """The plugin: records, also of the workers of a session, and the verdict."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tests = frozenset().union(*cited_tests().values())
        self._records: dict[str, set[str]] = {}
        self._failed: set[str] = set()
        self.untrue: list[str] = []

    @contextmanager
    def recording(self, item: pytest.Item) -> Iterator[None]:
        name = item.nodeid.split("[")[0]
        if name not in self._tests:
            yield
            return
        with keys_set() as keys:
            yield
        self._records.setdefault(name, set()).update(keys)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._failed.add(report.nodeid.split("[")[0])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for name, keys in getattr(node, "workeroutput", {}).get("configured", {}).items():
            self._records.setdefault(name, set()).update(keys)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output["configured"] = {name: sorted(keys) for name, keys in self._records.items()}
            return
        is_whole = bool(os.environ.get("TB")) or (
            not self._config.option.keyword
            and all("::" not in argument for argument in self._config.args)
        )
        records = {n: keys for n, keys in self._records.items() if n not in self._failed}
        self.untrue = untrue_citations(records, cited_tests()) if is_whole else []
        if self.untrue and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self.untrue:
            terminalreporter.line(f"UNTRUE {line}", red=True)
