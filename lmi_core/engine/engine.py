"""The public engine: text or token ids in, token events out, inside any asyncio program or none."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from lmi_core.engine.completion import Completing
from lmi_core.engine.core import EngineCore
from lmi_core.engine.handover import Handover
from lmi_core.engine.loop_thread import LoopThread, subscribe_across
from lmi_core.engine.lora_slots import LoraSlots
from lmi_core.engine.make_request import Prompt, make_request
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.parts import EngineParts, checked_config, load_in_thread, load_parts
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.stats import EngineInfo, EngineObserver, EngineStats, LifeState, NullObserver
from lmi_core.engine.stream import EventStream, batches
from lmi_core.errors import EngineError, UserError
from lmi_core.runners.runner import Runner
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.structured.compiler import GrammarCompiler
from lmi_core.text.tokenizer import Tokenizer
from lmi_core.weights.hf_config import check_directory

if TYPE_CHECKING:
    from lmi_core.models.found_model import FoundModel

T = TypeVar("T")

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine(Completing):
    """Runs a model on the lmi engine.

    ``async with Engine(path) as engine`` runs its loop inside the caller's event loop;
    ``Engine(path, own_loop=True)`` runs it in a thread of its own, can be used from any thread or
    event loop, and also as ``with``.
    """

    def __init__(
        self,
        config: EngineConfig | FoundModel | Path | str,
        *,
        runner: Runner | None = None,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        own_loop: bool = False,
        observer: EngineObserver | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        check_integrity: bool = False,
        has_fingerprint: bool = True,
    ) -> None:
        """``config``: a configuration, what was found for one, or a directory or GGUF file for the
        defaults. ``runner``, with its ``tokenizer`` and ``eos_token_ids``, replaces the one that
        would be loaded. ``progress`` is called with what is loading, how much is done and of how
        much, in the loading thread. ``check_integrity`` accounts for every KV block after every
        step (tests). ``has_fingerprint``: False where somebody else gives it out."""
        config = checked_config(config)
        self.config = config if isinstance(config, EngineConfig) else config.asked
        if (runner is None) != (tokenizer is None):
            raise UserError("give both runner and tokenizer, or neither")
        if runner is None:
            check_directory(self.config.model)
        self._parts = None
        if runner is not None and tokenizer is not None:
            self._parts = EngineParts(runner, tokenizer, tuple(eos_token_ids))
        self._observer = observer or NullObserver()
        self._load_parts = partial(load_parts, config, progress, has_fingerprint=has_fingerprint)
        self._check_integrity = check_integrity
        self._core: EngineCore | None = None
        self._state = LifeState.CREATED
        self._is_starting = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: LoopThread | None = None
        self._own_loop = own_loop
        self._request_numbers = itertools.count()
        self._is_forked = False
        _engines.add(self)

    def __repr__(self) -> str:
        facts = f"{self.config.served_model_name!r} from {self.config.model}, {self.state}"
        if self._core is not None:
            info, stats = self._core.info, self._core.stats()
            formats = " and ".join(filter(None, (info.runner.dtype, info.runner.quantize)))
            facts += f": {formats} on {info.runner.device}, {info.max_total_tokens} tokens, "
            facts += f"{stats.num_running} running, {stats.num_waiting} waiting"
        return f"<Engine {facts}>"

    async def start(self) -> None:
        """Load the model, in a thread, and begin to take requests. EngineError where it is stopped
        meanwhile."""
        if self._state is not LifeState.CREATED:
            raise EngineError(f"the engine is {self.state}; it can be started once")
        self._state = LifeState.LOADING
        self._is_starting = True
        try:
            if self._own_loop:
                self._thread = LoopThread("lmi-engine")
                await asyncio.wrap_future(self._thread.submit(self._load()))
            else:
                await self._load()
            if self._state is LifeState.STOPPED:
                raise EngineError("the engine was stopped while it was loading")
        except BaseException:
            self._state = LifeState.STOPPED
            await self._on_loop(self._unload())
            await asyncio.to_thread(self._close_thread)  # may wait for what it loads
            raise
        finally:
            self._is_starting = False

    async def stop(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Finish open requests (or abort them: at once without ``drain``, else after
        ``timeout_s``), wait for the step in flight, release everything. Idempotent."""
        if self._is_starting:
            self._state = LifeState.STOPPED  # which ends the start, once the model is loaded
            return
        if self._core is not None and self.state is not LifeState.STOPPED:
            await self._on_loop(self._core.stop(drain=drain, timeout_s=timeout_s))
        self._state = LifeState.STOPPED
        self._close_thread()
        if self._parts is not None:
            await asyncio.to_thread(self._parts.close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop(drain=kind is None)

    def __enter__(self) -> Self:
        if not self._own_loop:
            raise UserError("synchronous use needs Engine(..., own_loop=True)", field="own_loop")
        with suppress(RuntimeError):  # where no loop runs
            asyncio.get_running_loop()
            raise UserError("an event loop runs here: write 'async with'")
        asyncio.run(self.start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        asyncio.run(self.stop(drain=kind is None))

    async def generate(
        self,
        prompt: Prompt | GenerationRequest,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> AsyncGenerator[TokenEvent, None]:
        """Token events of a prompt (text or ids) with ``params``, or of a whole request.

        ``options`` are fields of SamplingParams and GenerationRequest. Closing the iterator or
        cancelling its task aborts the request. Raises UserError or CapacityError before the first
        event, EngineError at any time.
        """
        request = self._request(prompt, params, options)
        async with aclosing(self.generate_batches(request)) as batches:
            async for events in batches:
                for event in events:
                    yield event

    def generate_batches(
        self, request: GenerationRequest
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """As ``generate``, in lists of all events that are ready: at most one list per step."""
        return batches(self, request)

    async def subscribe(
        self, request: GenerationRequest, notify: Callable[[], None]
    ) -> EventStream:
        """As ``generate_batches``, for readers who needn't be woken: ``notify`` is called in the
        caller's event loop when there are events to take, from within the engine's loop if that is
        the same. Closing the stream aborts the request."""
        core = self._usable_core()
        if asyncio.get_running_loop() is not self._loop:
            return await subscribe_across(self._need_thread(), core, request, notify)
        stream = EventStream(notify)
        await core.open(request, stream)
        return stream

    async def open(
        self, request: GenerationRequest, stream: EventStream, handover: Handover | None = None
    ) -> None:
        """As ``subscribe``, in the engine's own event loop with a stream of the caller's; with what
        another process has prepared for the request or generated."""
        await self._usable_core().open(request, stream, handover)

    def generate_sync(
        self,
        prompt: Prompt | GenerationRequest,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Generator[TokenEvent, None, None]:
        """As ``generate``, for threads without an event loop (``own_loop`` only)."""
        core, thread = self._usable_core(), self._need_thread()
        request = self._request(prompt, params, options)
        ready: queue.SimpleQueue[None] = queue.SimpleQueue()
        stream = EventStream(lambda: ready.put(None))
        try:
            thread.submit(core.open(request, stream)).result()
            is_finished = False
            while not is_finished:
                ready.get()
                events, is_finished = stream.take()
                yield from events
        finally:
            thread.call(core.abort, request.request_id, stream)

    def abort(self, request_id: str) -> None:
        """End a request at any moment, from any thread; its reader gets a last event. Does nothing
        when there is no such request."""
        self._call(self._usable_core().abort, request_id)

    def unpin(self, session: str) -> None:
        """Keep a session's blocks no longer than others', from any thread. Idempotent."""
        self._call(self._usable_core().unpin, session)

    def hold(self, *, is_held: bool) -> None:
        """Begin no more steps, or go on, in the engine's own event loop."""
        self._usable_core().hold(is_held=is_held)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, as a request's prompt would have them."""
        core = self._usable_core()
        return await self._on_loop(
            core.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids; UserError for an id outside the model's vocabulary."""
        core = self._usable_core()
        core.check_token_ids(token_ids)
        return core.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def load_adapter(self, name: str, path: Path | str) -> None:
        """Register the LoRA adapter in a PEFT directory under a name that requests then give.

        Raises UserError for an empty or taken name and where LoRA is off, ModelError for files that
        can't be served.
        """
        await self._on_loop(self._usable_core().load_adapter(name, Path(path)))

    async def unload_adapter(self, name: str) -> None:
        """Refuse an adapter to new requests at once, wait for its running ones and free its memory.
        Raises UserError for a name that isn't registered."""
        await self._on_loop(self._usable_core().unload_adapter(name))

    @property
    def adapters(self) -> dict[str, Path]:
        """A snapshot of the registered adapters, in order of registration."""
        return self._usable_core().adapters.paths

    @property
    def fingerprint(self) -> str | None:
        """Digests of the weights, the build, the instruction set and the formats: two engines with
        the same give a request the same tokens. None: a large model's isn't known yet."""
        fingerprint = None if self._parts is None else self._parts.fingerprint
        return None if fingerprint is None else fingerprint.text

    def adapter_digest(self, name: str) -> str:
        """Of the files of the adapter that a request of this name is computed with; "" for the base
        model. UserError for a name that isn't registered."""
        slot = self._usable_core().adapters.find(name)
        return "" if slot is None else slot.digest

    @property
    def state(self) -> LifeState:
        if self._is_forked:
            return LifeState.STOPPED
        return self._core.state if self._core is not None else self._state

    @property
    def healthy(self) -> bool:
        """Whether it takes requests and its steps succeed."""
        core = self._core
        return core is not None and core.healthy and self.state is LifeState.READY

    @property
    def info(self) -> EngineInfo:
        """What was decided at load."""
        return self._usable_core().info

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and its output together."""
        return self.info.max_total_tokens

    @property
    def tokenizer(self) -> Tokenizer:
        return self._usable_core().tokenizer

    def stats(self) -> EngineStats:
        """A snapshot of queues, blocks and totals; approximate when read from another thread."""
        return self._usable_core().stats()

    async def _load(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._parts is None:
            self._parts = await load_in_thread(self._load_parts)
        parts, lora = self._parts, self.config.lora
        default, outlast = "" if lora is None else lora.default, parts.disk is not None
        adapters = LoraSlots(parts.runner, default, outlast=outlast)
        for name, path in () if lora is None else lora.adapters:
            await adapters.load(name, path)
        grammars = GrammarCompiler(parts.load_grammars)
        if parts.texts is not None:  # None: somebody gave us the runner
            await asyncio.to_thread(grammars.prepare)
        self._core = EngineCore(
            self.config,
            parts,
            self._observer,
            adapters,
            grammars,
            check_integrity=self._check_integrity,
        )

    async def _unload(self) -> None:
        """Give up what was loaded, in the engine's loop."""
        if self._core is not None:
            await self._core.stop(drain=False)
        elif self._parts is not None:
            self._parts.runner.close()
        if self._parts is not None:
            await asyncio.to_thread(self._parts.close)

    def _call(self, function: Callable[[str], None], name: str) -> None:
        if self._thread is not None:
            self._thread.call(function, name)
        else:
            function(name)

    async def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine of the engine's loop from whichever loop is running."""
        if asyncio.get_running_loop() is self._loop:
            return await coroutine
        if self._thread is None:
            coroutine.close()
            self._need_thread()
        return await asyncio.wrap_future(self._need_thread().submit(coroutine))

    def _request(
        self,
        prompt: Prompt | GenerationRequest,
        params: SamplingParams | None,
        options: dict[str, Any],
    ) -> GenerationRequest:
        return make_request(prompt, params, options, f"request-{next(self._request_numbers)}")

    def _usable_core(self) -> EngineCore:
        if self._is_forked:
            raise EngineError("the engine was started before a fork; start it in the child")
        if self._core is None:
            how = "start it with 'with' or" if self._own_loop else "start it with"
            is_new = self._state is LifeState.CREATED
            what = f"{how} 'async with'" if is_new else "it can be started once"
            raise EngineError(f"the engine is {self._state}; {what}")
        return self._core

    def _need_thread(self) -> LoopThread:
        if self._thread is None:
            raise EngineError(
                "the engine runs in another event loop; to use it from here, make it with "
                "own_loop=True"
            )
        return self._thread

    def _close_thread(self) -> None:
        if self._thread is not None and not self._is_forked:
            self._thread.close()


def _mark_all_forked() -> None:
    for engine in _engines:
        engine._is_forked |= engine._state is not LifeState.CREATED


os.register_at_fork(after_in_child=_mark_all_forked)
