"""The terminal's side of a conversation: reading, showing answers as they come, commands."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lmi_core.chat.answer import AnswerSource, LocalSource, RemoteSource
from lmi_core.chat.conversation import Conversation, check, run_command
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import LmiError, UserError
from lmi_core.files import user_cache
from lmi_core.http_url import HttpUrl, model_beside_url
from lmi_core.local_model import open_local_model
from lmi_core.progress import TerminalProgress

_QUOTES = '"""'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="talk to this server instead of loading a model")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--max-new-tokens", "--max-tokens", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--load", type=Path, metavar="FILE", help="go on with a saved conversation")


def open_source(args: argparse.Namespace, model: list[str], default_model: Path) -> AnswerSource:
    """The server of ``--url``, or the model that the arguments of ``lmi serve`` configure."""
    if args.url is not None:
        return RemoteSource(HttpUrl.parse(args.url), model_beside_url(model))
    opened = open_local_model(model, default_model)
    if opened.template is None:
        raise UserError(f"{opened.config.model} has no chat template; lmi generate --raw goes on")
    progress = TerminalProgress()
    engine = Engine(opened.asked, own_loop=True, progress=progress)
    return LocalSource(engine, opened.template, progress)


def chat(args: argparse.Namespace, source: AnswerSource) -> int:
    """Talk until the input ends; the exit code."""
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    check(params)
    conversation = Conversation(params, args.system)
    if args.load is not None:
        conversation.load(args.load)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with source, _line_history() if is_terminal else contextlib.nullcontext():
        if is_terminal:
            print(f"{source.name}: /help says what there is besides talking, Ctrl-D ends")
        return _talk(conversation, source, is_terminal=is_terminal)


def _talk(conversation: Conversation, source: AnswerSource, *, is_terminal: bool) -> int:
    """A failure ends a conversation that nobody watches; else it is told."""
    for text, is_quoted in _inputs(lambda prompt: input(prompt if is_terminal else "")):
        try:
            if text.startswith("/") and not is_quoted:
                if not run_command(text, conversation, print):
                    break
            else:
                _answer(conversation, source, text, shows_speed=is_terminal)
        except LmiError as error:
            if not is_terminal:
                raise
            print(f"! {error}", file=sys.stderr)
    else:
        if is_terminal:
            print()  # Ctrl-D leaves the prompt's line open
    return 0


def _inputs(read: Callable[[str], str]) -> Iterator[tuple[str, bool]]:
    """What is typed, lines between triple quotes as one, and whether it was; Ctrl-C forgets a
    line."""
    while True:
        try:
            text = read("> ")
            if is_quoted := text.startswith(_QUOTES):
                text = text.removeprefix(_QUOTES)
                while not text.endswith(_QUOTES):
                    text += "\n" + read(". ")
                text = text.removesuffix(_QUOTES)
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            continue
        if text.strip():
            yield text.strip(), is_quoted


def _answer(
    conversation: Conversation, source: AnswerSource, text: str, *, shows_speed: bool
) -> None:
    """Show an answer as it comes and keep it, also where it was cut short by Ctrl-C."""
    conversation.add("user", text)
    shown: list[str] = []
    started = first = time.perf_counter()
    num_tokens, is_cut_off = 0, False
    answer = source.answer(conversation.prompt, conversation.params)
    try:
        for piece in answer:
            if not num_tokens and piece.num_tokens:
                first = time.perf_counter()
            num_tokens = piece.num_tokens
            is_cut_off |= piece.is_cut_off
            shown.append(piece.text)
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        answer.close()
    except LmiError:
        conversation.undo()
        if shown:
            print()
        raise
    conversation.add("assistant", "".join(shown))
    print()
    if shows_speed and num_tokens:
        end = ""
        if is_cut_off:
            is_short = num_tokens >= (conversation.params.max_new_tokens or num_tokens)
            end = f"; cut off by {'max_new_tokens' if is_short else 'the length of the context'}"
        print(_speed(num_tokens, first - started, time.perf_counter() - first, end))


def _speed(num_tokens: int, first_s: float, rest_s: float, end: str) -> str:
    rate = f", {(num_tokens - 1) / rest_s:.1f} tokens/s" if num_tokens > 1 and rest_s > 0 else ""
    text = f"[{num_tokens} tokens, the first after {first_s:.2f} s{rate}{end}]"
    return text if "NO_COLOR" in os.environ else f"\033[2m{text}\033[0m"


@contextlib.contextmanager
def _line_history() -> Iterator[None]:
    """Lines of earlier conversations at the arrow keys, where the interpreter has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = user_cache(os.environ) / "lmi" / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            readline.write_history_file(path)
            path.chmod(0o600)
