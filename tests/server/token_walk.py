"""What one has to know to follow a token of a streamed completion: the classes of lmi_core and
lmi_server whose methods run, or of which objects are made, in the server's event loop from the
arrival of a body until its last frame is written. As a program, ``python -m
tests.server.token_walk DIRECTORY`` prints them for a model's directory."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from aiohttp import web

import lmi_core
import lmi_server
from lmi_core.engine.engine import Engine
from lmi_core.settings.engine_config import EngineConfig
from lmi_server.http.connections import Connection
from lmi_server.http.metrics import Metrics
from lmi_server.http.turns import new_event_loop
from tests.server.harness import serving_backend

_PACKAGES = (lmi_core.__name__, lmi_server.__name__)
_BODY = {"prompt": "a streamed completion", "max_tokens": 32, "ignore_eos": True, "stream": True}
_BEGIN = Connection.data_received.__code__
_END = web.StreamResponse.write_eof.__code__
_CALLBACK = asyncio.Handle._run.__code__
"""Of the event loop; what timers call is on nobody's way."""
_GENERATED = "<string>"
"""The file of what dataclasses generate."""


class Walk(NamedTuple):
    """Classes in the order in which they are met, with their methods. Of an object the class that
    it is of counts, and the one that has the method. Those that C++ has, enumerations, and classes
    of which only fields are read don't count, nor do protocols and abstract classes by themselves.
    """

    classes: dict[type, list[str]]
    files: list[str]
    """Those of their methods, and of the functions that run between these."""


class _Calls:
    """A profile function that notes what runs, once for each class of a first argument."""

    def __init__(self) -> None:
        self.noted: dict[tuple[int, type | None], CodeType] = {}
        """By identity: functions that are generated can be equal."""
        self._is_noting = self._is_timer = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code is _BEGIN or code is _END:
            self._is_noting = code is _BEGIN
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if code is _CALLBACK:
            self._is_timer = isinstance(first, asyncio.TimerHandle)
        if self._is_noting and not self._is_timer and code.co_flags & inspect.CO_OPTIMIZED:
            kind = first if isinstance(first, type) else type(first)
            self.noted.setdefault((id(code), kind if _is_ours(kind) else None), code)


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _PACKAGES


def _codes_of(value: object) -> Iterator[CodeType]:
    """Of a class's attribute: its own functions, and those within them."""
    match value:
        case staticmethod() | classmethod():
            yield from _codes_of(value.__func__)
        case property():
            for function in (value.fget, value.fset):
                yield from _codes_of(function)
        case functools.cached_property():
            yield from _codes_of(value.func)
        case CodeType():
            yield value
            for constant in value.co_consts:
                if isinstance(constant, CodeType):
                    yield from _codes_of(constant)
        case _ if inspect.isfunction(value):
            code = inspect.unwrap(value).__code__
            if code.co_filename == _GENERATED or _file_of(code.co_filename) is not None:
                yield from _codes_of(code)


def _owners() -> dict[int, type]:
    """The classes that have methods, by the identities of these."""
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] in _PACKAGES]
    classes = {v for m in modules for v in vars(m).values() if isinstance(v, type) and _is_ours(v)}
    return {
        id(code): kind
        for kind in classes
        for value in vars(kind).values()
        for code in _codes_of(value)
    }


def _file_of(path: str | None) -> str | None:
    for package in (lmi_core, lmi_server):
        root = Path(str(package.__file__)).parent
        if path is not None and Path(path).is_relative_to(root):
            return str(Path(package.__name__) / Path(path).relative_to(root))
    return None


def _walk(calls: _Calls) -> Walk:
    owners = _owners()
    classes: dict[type, dict[str, None]] = {}
    files: dict[str, None] = {}
    for (number, kind), code in calls.noted.items():
        owner = owners.get(number)
        met = [] if owner is None else [owner]
        if kind is not None and kind is not owner and owner in kind.__mro__:
            met.append(kind)
        for each in met:
            names = classes.setdefault(each, {})
            if each is owner:
                names[code.co_name] = None
        paths = [code.co_filename, *(sys.modules[each.__module__].__file__ for each in met)]
        files.update((file, None) for file in map(_file_of, paths) if file is not None)
    return Walk({kind: list(names) for kind, names in classes.items()}, list(files))


async def _completed(directory: Path) -> Walk:
    metrics, calls = Metrics(), _Calls()
    async with (
        Engine(EngineConfig(model=directory), observer=metrics.observer("model")) as engine,
        serving_backend(engine, metrics) as served,
    ):
        before = sys.getprofile()
        sys.setprofile(calls)
        try:
            answer = await served.post(_BODY, "/v1/completions")
        finally:
            sys.setprofile(before)
    assert answer.body.endswith(b"data: [DONE]\n\n"), answer
    return _walk(calls)


def walk_of_completion(directory: Path) -> Walk:
    """Of a model's first call, by an HTTP client and the CPU engine, in the loop that servers
    have."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_completed(directory))


def main() -> None:
    walk = walk_of_completion(Path(sys.argv[1]))
    for kind, names in walk.classes.items():
        purpose = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
        print(f"{kind.__module__}.{kind.__qualname__}: {purpose}")
        print(f"    {', '.join(names)}")
    print(f"{len(walk.classes)} classes in {len(walk.files)} files")


if __name__ == "__main__":
    main()
