"""The command line: ``lmi serve | chat | generate | bench | top | replay | quantize | explain |
doctor``.

Imports are inside the commands, so that each pays only for what it uses.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from lmi_core.errors import ConfigError, LmiError, UserError
from lmi_core.version import __version__

DEMO_MODEL = Path(__file__).parent / "demo" / "model"

_UNKNOWN_COMMAND = re.compile(r".*invalid choice: '(\w+)' \(choose from (.*)\)")
_FLAG = re.compile(r"-(?!h$|-help$|-version$)")
_INTERRUPTED = 130
_INTERNAL_ERROR = 70
_IO_ERROR = 74
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors become one line on stderr.

    With ``LMI_DEBUG=1`` in the environment the traceback is shown instead.
    """
    _open_streams()
    try:
        if name := os.environ.get("LMI_INSTRUCTION_SET"):
            from lmi_core.runners.cpu.cpu_model import check_instruction_set

            check_instruction_set(name, f"LMI_INSTRUCTION_SET={name}")
        code = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()  # here a failure can still be told
        return code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left.
        _discard_output()
        return 0
    except ConfigError as error:
        return _fail(error, "; ".join(error.problems) or str(error), error.exit_code)
    except LmiError as error:
        return _fail(error, str(error), error.exit_code)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            _discard_output()
            return _fail(error, f"the output can't be written: {error.strerror}", _IO_ERROR)
        text = f"internal error: {type(error).__name__}: {error} (LMI_DEBUG=1 shows where)"
        return _fail(error, text, _INTERNAL_ERROR)


def _open_streams() -> None:
    """Whatever we were started with: closed ones, and an output whose encoding lacks characters."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # Python's stderr does so


def _discard_output() -> None:
    """Keep the interpreter's exit from complaining about what stdout didn't take."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: Exception, text: str, exit_code: int) -> int:
    if os.environ.get("LMI_DEBUG") == "1":
        raise error
    print(f"lmi: {' '.join(text.split())}", file=sys.stderr)
    return exit_code


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends what runs in order, so that nothing unfinished is left."""

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def launcher() -> int:
    """``text-generation-launcher``: TGI's flags and protocol."""
    return main(["text-generation-launcher", *sys.argv[1:]])


def _run(argv: list[str]) -> int:
    if argv[:1] == ["text-generation-launcher"]:
        return _launch(argv[1:])
    if argv[:1] == ["djl-serving"] or (argv and _FLAG.match(argv[0])):
        # As images are called: docker run IMAGE --model-id MODEL
        argv = ["serve", *(argv[1:] if argv[0] == "djl-serving" else argv)]
    if not argv or argv[0] not in _COMMANDS:
        build_parser().parse_args(argv)  # help, the version, or what is wrong
    command, _ = _COMMANDS[argv[0]]
    names = {argument.partition("=")[0] for argument in argv}
    if argv[0] not in _WITH_MODEL or names & {"--url", "--help", "-h"}:
        return command(argv[1:])
    from lmi_core.runners.cpu.rank_hosts import run_in_job

    return run_in_job(partial(command, argv[1:]))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        wrong = _UNKNOWN_COMMAND.match(message)
        near = difflib.get_close_matches(wrong[1], wrong[2].split("'"), n=1) if wrong else []
        hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
        raise UserError(f"{message}; {hint}")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lmi", description="Serve large language models.")
    parser.add_argument("--version", action="version", version=f"lmi {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {name: commands.add_parser(name, help=text) for name, (_, text) in _COMMANDS.items()}
    parsers["doctor"].add_argument("--json", action="store_true", help="print JSON")
    return parser


def _generate_parser() -> argparse.ArgumentParser:
    generate = _Parser(
        prog="lmi generate",
        usage="lmi generate PROMPT [--model MODEL] [flags] [flags of lmi serve]",
        description="Streams the completion of one prompt to the terminal.",
    )
    generate.add_argument("prompt", help="the text; - reads standard input")
    form = generate.add_mutually_exclusive_group()
    form.add_argument(
        "--chat", action="store_true", help="put the prompt through the model's chat template"
    )
    form.add_argument("--raw", action="store_true", help="continue the prompt as it is")
    generate.add_argument("--system", help="system message of the chat")
    generate.add_argument("--max-new-tokens", "--max-tokens", type=int, default=256)
    generate.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--min-p", type=float, default=0.0)
    generate.add_argument("--typical-p", type=float, default=1.0)
    generate.add_argument("--repetition-penalty", type=float, default=1.0)
    generate.add_argument("--stop", action="append", default=[], help="may be given repeatedly")
    generate.add_argument("--stats", action="store_true", help="print counts and speed on stderr")
    generate.add_argument("--seed", type=int, default=0)
    return generate


def _chat_parser() -> argparse.ArgumentParser:
    from lmi_core.chat.command import add_arguments

    parser = _Parser(
        prog="lmi chat",
        usage="lmi chat [MODEL | --url URL] [flags] [flags of lmi serve]",
        description="Talks to a model; without one named, to the embedded demonstration model.",
    )
    add_arguments(parser)
    return parser


def _bench_parser() -> argparse.ArgumentParser:
    from lmi_core.bench.command import KINDS, add_arguments

    parser = _Parser(
        prog="lmi bench",
        usage="lmi bench {prefill,decode,serve} [MODEL | --url URL] [flags] [flags of lmi serve]",
        description="Measures the engine on this machine, or a server under load.",
    )
    kinds = f"{{{','.join(KINDS)}}}"  # a message has them in the place of a name
    text = "of serve, offline where there is no --url"
    parser.add_argument("kind", choices=KINDS, metavar=kinds, help=text)
    add_arguments(parser)
    return parser


def _replay_parser() -> argparse.ArgumentParser:
    from lmi_core.receipts.command import add_arguments

    parser = _Parser(
        prog="lmi replay",
        usage="lmi replay FILE [MODEL | --url URL] [flags] [flags of lmi serve]",
        description="Asks the requests that lmi serve --record kept again, and compares answers.",
    )
    add_arguments(parser)
    return parser


def _serve(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        from lmi_core.config.reference import command_help

        sys.stdout.write(command_help("serve"))
        return 0
    from lmi_server.command import serve

    # Before the server has handlers of its own, archives may be fetched, whose parts are to go; and
    # a container's first process hears of no signal that it doesn't handle.
    with _ended_by_sigterm():
        return serve(argv, DEMO_MODEL)


def _launch(argv: list[str]) -> int:
    from lmi_core.runners.cpu.rank_hosts import run_in_job

    names_model = os.environ.get("MODEL_ID") or any(
        argument.partition("=")[0] == "--model-id" for argument in argv
    )
    argv = argv if names_model else ["--model-id", str(DEMO_MODEL), *argv]
    return run_in_job(partial(_serve, argv))


def _generate(argv: list[str]) -> int:
    from lmi_core.generate import generate
    from lmi_core.local_model import open_local_model, parse_arguments

    args, model = parse_arguments(_generate_parser(), argv, num_words=1)
    return generate(args, open_local_model(model, DEMO_MODEL))


def _chat(argv: list[str]) -> int:
    from lmi_core.chat.command import chat, open_source
    from lmi_core.local_model import parse_arguments

    args, model = parse_arguments(_chat_parser(), argv, num_words=0)
    return chat(args, open_source(args, model, DEMO_MODEL))


def _bench(argv: list[str]) -> int:
    from lmi_core.bench.command import bench
    from lmi_core.local_model import parse_arguments

    args, model = parse_arguments(_bench_parser(), argv, num_words=1)
    return bench(args, model, DEMO_MODEL)


def _top(argv: list[str]) -> int:
    from lmi_core.top import add_arguments, top

    parser = _Parser(prog="lmi top", description="Shows what a running server does.")
    add_arguments(parser)
    return top(parser.parse_args(argv))


def _replay(argv: list[str]) -> int:
    from lmi_core.local_model import parse_arguments
    from lmi_core.receipts.command import replay

    args, model = parse_arguments(_replay_parser(), argv, num_words=1)
    return replay(args, model, DEMO_MODEL)


def _quantize(argv: list[str]) -> int:
    from lmi_core.local_model import parse_arguments
    from lmi_core.quantize.command import add_arguments, quantize

    parser = _Parser(
        prog="lmi quantize",
        usage="lmi quantize MODEL OUT --format FORMAT [--text FILE] [flags of lmi serve]",
        description="Writes a model directory in fewer bits.",
    )
    add_arguments(parser)
    args, flags = parse_arguments(parser, argv, num_words=2)
    with _ended_by_sigterm():
        return quantize(args, flags, DEMO_MODEL)


def _doctor(argv: list[str]) -> int:
    from lmi_core.doctor import main as doctor

    return doctor(as_json=build_parser().parse_args(["doctor", *argv]).json)


def _explain(argv: list[str]) -> int:
    from lmi_core.config.explain import main as explain

    return explain(argv, default_model=DEMO_MODEL)


_COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "serve": (_serve, "serve a model over HTTP"),
    "generate": (_generate, "stream a completion to the terminal"),
    "chat": (_chat, "talk to a model in the terminal"),
    "bench": (_bench, "measure a model, or a server"),
    "top": (_top, "watch what a running server does"),
    "replay": (_replay, "prove that recorded requests are answered as they were"),
    "quantize": (_quantize, "write a model in fewer bits, for any server"),
    "doctor": (_doctor, "say what this machine offers and what is used"),
    "explain": (_explain, "say what becomes of every configuration key"),
}
"""Each with its help. What they take is the configuration's arguments, and some of their own."""
_WITH_MODEL = frozenset({"serve", "generate", "chat", "bench", "replay"})
"""Those that may load one, which the processes of a job may compute together."""
