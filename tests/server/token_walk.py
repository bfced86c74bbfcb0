"""What one has to know to follow a token of a streamed completion through the server's event loop,
from the arrival of a body until its last frame is written: as a program, ``python -m
tests.server.token_walk DIRECTORY`` prints it for a model's directory."""

from __future__ import annotations

import asyncio
import enum
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

import lmi_core
import lmi_server
from lmi_core.engine.engine import Engine
from lmi_core.engine.kv_memory import KvMemory
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.scheduler import Scheduler
from lmi_core.engine.sequence import Sequence
from lmi_core.engine.stream import EventStream
from lmi_core.runners.cpu.cpu_runner import CpuRunner
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.text.detokenizer import ByteDetokenizer
from lmi_core.text.tokenizer import Tokenizer
from lmi_server.dialects.openai.completion_output import CompletionStreamRenderer
from lmi_server.http.connections import Connection
from lmi_server.http.frame_writer import FrameWriter
from lmi_server.http.metrics import Metrics
from lmi_server.http.turns import new_event_loop
from tests.server.harness import serving_backend

_PACKAGES = (lmi_core.__name__, lmi_server.__name__)
_BODY = {"prompt": "a streamed completion", "max_tokens": 32, "ignore_eos": True, "stream": True}
_BEGIN = Connection.data_received.__code__
_END = web.StreamResponse.write_eof.__code__
_CALLBACK = asyncio.Handle._run.__code__
"""Of the event loop; what timers call is on nobody's way."""
_REQUEST = RequestHandler._handle_request.__code__
"""A request's task, which begins within its connection's from Python 3.12 on."""
_GENERATED = "<string>"
"""The file of what dataclasses generate."""
_STATIONS = {
    id(function.__code__)
    for function in (
        GenerationRequest.__init__,
        Tokenizer.encode,
        Scheduler.add,
        KvMemory.admit,
        CpuRunner.submit,
        Sequence.take,
        ByteDetokenizer.push,
        TokenEvent.__init__,
        EventStream.put,
        CompletionStreamRenderer.feed,
        FrameWriter.send,
        FrameWriter.push,
    )
}
"""Where a request, and then its tokens, pass from one hand to the next."""


class Walk(NamedTuple):
    """Classes in the order in which they are met, and files. Of an object the class that it is of
    counts, and the one that has the method; enumerations don't, nor do protocols and abstract
    classes by themselves."""

    path: list[type]
    """Concepts: classes whose methods are under way while a station is called, and those of what
    their callers, back to the event loop, were given. What else runs brings nothing on the way."""
    classes: dict[type, list[str]]
    """All whose methods run, or of which objects are made, with these; C++'s don't count."""
    files: list[str]
    """Those of these methods, and of the functions that run between them."""


class _Calls:
    """A profile function that notes what runs, once for each class of a first argument."""

    def __init__(self) -> None:
        self.noted: dict[tuple[int, type | None], CodeType] = {}
        """By identity: functions that are generated can be equal."""
        self.under_way: dict[int, CodeType] = {}
        self.given: dict[type, None] = {}
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
            if id(code) in _STATIONS:
                self._note_path(frame)

    def _note_path(self, frame: FrameType | None) -> None:
        while frame is not None and (code := frame.f_code) is not _REQUEST:
            if code.co_filename == _GENERATED or _file_of(code.co_filename) is not None:
                self.under_way[id(code)] = code
                names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                self.given |= dict.fromkeys(_kinds_of(frame.f_locals.get(n) for n in names))
            frame = frame.f_back


def _kinds_of(values: Iterable[Any]) -> Iterator[type]:
    """Our classes among those of arguments, and of what lists of them have."""
    for value in values:
        several = value if isinstance(value, list | tuple) else ()
        for kind in {v if isinstance(v, type) else type(v) for v in (value, *several)}:
            if _is_ours(kind) and not issubclass(kind, enum.Enum):
                yield kind


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
    path = calls.given | dict.fromkeys(owners[n] for n in calls.under_way if n in owners)
    return Walk(list(path), {kind: list(names) for kind, names in classes.items()}, list(files))


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
    print(f"on the path: {', '.join(sorted(kind.__name__ for kind in walk.path))}")
    print(f"{len(walk.classes)} classes in {len(walk.files)} files, {len(walk.path)} on the path")


if __name__ == "__main__":
    main()
