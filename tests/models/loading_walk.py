"""What one reads to follow how a model is loaded: the functions of lmi_core that the loading thread
calls, in order. As a program: ``python -m tests.models.loading_walk DIRECTORY`` prints them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import lmi_core

_ROOT = Path(lmi_core.__file__).parent


class Walk(NamedTuple):
    """Calls as (file, function): of each function that one has from each of its callers the first.
    What modules call while they are imported isn't among them, nor lambdas, comprehensions and
    what dataclasses generate."""

    calls: tuple[tuple[str, str], ...]

    @property
    def stays(self) -> list[tuple[str, list[str]]]:
        """Uninterrupted visits of a file, with the functions that are called there."""
        visits = groupby(self.calls, key=lambda call: call[0])
        return [(file, [name for _, name in calls]) for file, calls in visits]

    @property
    def num_files(self) -> int:
        return len({file for file, _ in self.calls})

    @property
    def num_returns(self) -> int:
        """Visits of a file that was visited before."""
        return len(self.stays) - self.num_files


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and not code.co_name.startswith("<")


def walk_of(work: Callable[[], object]) -> Walk:
    """What ``work`` calls in this thread. Functions whose results are kept are in it only the first
    time in a process."""
    calls: dict[tuple[CodeType, CodeType | None], tuple[str, str]] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code, caller = frame.f_code, None if frame.f_back is None else frame.f_back.f_code
        path = Path(code.co_filename)
        if event == "call" and _is_function(code) and path.is_relative_to(_ROOT):
            is_import = caller is not None and not caller.co_flags & inspect.CO_OPTIMIZED
            if not is_import and code.co_name != "__getattr__":
                named = str(path.relative_to(_ROOT)), code.co_qualname
                calls.setdefault((code, caller), named)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return Walk(tuple(calls.values()))


def walk_of_loading(directory: Path) -> Walk:
    """From an engine's parts being asked for until they are there, on the CPU."""
    from lmi_core.engine.parts import EngineParts, load_parts
    from lmi_core.settings.engine_config import EngineConfig

    config, loaded = EngineConfig(model=directory), list[EngineParts]()
    try:
        return walk_of(lambda: loaded.append(load_parts(config)))
    finally:
        for parts in loaded:
            parts.runner.close()
            parts.close()


def main() -> None:
    walk = walk_of_loading(Path(sys.argv[1]))
    for file, names in walk.stays:
        print(f"{file}: {', '.join(names)}")
    print(f"{len(walk.stays)} stays in {walk.num_files} files, {walk.num_returns} returns")


if __name__ == "__main__":
    main()
