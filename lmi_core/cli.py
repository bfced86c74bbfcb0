"""The command line: ``lmi serve | generate | doctor | explain``.

Imports are inside the commands, so that each pays only for what it uses.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lmi_core.errors import ConfigError, LmiError, UserError
from lmi_core.version import __version__

if TYPE_CHECKING:
    from lmi_core.settings.engine_config import EngineConfig

DEMO_MODEL = Path(__file__).parent / "demo" / "model"

_INTERRUPTED = 130
_INTERNAL_ERROR = 70
_IO_ERROR = 74
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_BYTES = re.compile(r"(?P<number>\d+)(?P<unit>[kKmMgG]?)(i?[bB])?")
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors become one line on stderr.

    With ``LMI_DEBUG=1`` in the environment the traceback is shown instead.
    """
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        _check_instruction_set(os.environ.get("LMI_INSTRUCTION_SET", ""), "LMI_INSTRUCTION_SET=")
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


def _discard_output() -> None:
    """Keep the interpreter's exit from complaining about what stdout didn't take."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: Exception, text: str, exit_code: int) -> int:
    if os.environ.get("LMI_DEBUG") == "1":
        raise error
    print(f"lmi: {' '.join(text.split())}", file=sys.stderr)
    return exit_code


def _run(argv: list[str]) -> int:
    # These two take the configuration's own arguments.
    if argv[:1] == ["explain"]:
        return _explain(argv[1:])
    if argv[:1] == ["serve"]:
        return _serve(argv[1:])
    args = build_parser().parse_args(argv)
    match args.command:
        case "generate":
            return _generate(args)
        case _:
            return _doctor(args)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lmi", description="Serve large language models.")
    parser.add_argument("--version", action="version", version=f"lmi {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("serve", help="serve a model over HTTP")
    _add_generate(commands)
    doctor = commands.add_parser("doctor", help="say what this machine offers and what is used")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    commands.add_parser("explain", help="say what becomes of every configuration key")
    return parser


def _add_generate(commands: argparse._SubParsersAction[_Parser]) -> None:
    generate = commands.add_parser("generate", help="stream a completion to the terminal")
    generate.add_argument("prompt", help="the text; - reads standard input")
    generate.add_argument("--model", type=Path, help="model directory (the demo model)")
    form = generate.add_mutually_exclusive_group()
    form.add_argument(
        "--chat", action="store_true", help="put the prompt through the model's chat template"
    )
    form.add_argument("--raw", action="store_true", help="continue the prompt as it is")
    generate.add_argument("--system", help="system message of the chat")
    generate.add_argument("--max-new-tokens", type=int, default=256)
    generate.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--min-p", type=float, default=0.0)
    generate.add_argument("--typical-p", type=float, default=1.0)
    generate.add_argument("--repetition-penalty", type=float, default=1.0)
    generate.add_argument("--stop", action="append", default=[], help="may be given repeatedly")
    generate.add_argument("--stats", action="store_true", help="print counts and speed on stderr")
    _add_model_options(generate)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and engine")
    group.add_argument("--served-model-name", metavar="NAME", help="default: the directory's name")
    group.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda needs torch")
    group.add_argument("--dtype", choices=("auto", "bf16", "fp32"), default="auto")
    group.add_argument(
        "--quantize",
        choices=("int8", "int4", "fp8"),
        help="quantise the weights at load; fp8 with --device cuda only",
    )
    group.add_argument(
        "--kv-dtype",
        choices=("auto", "bf16", "fp32", "int8", "fp8_e4m3fn", "fp8_e5m2"),
        default="auto",
        help="KV cache; fp8 with --device cuda only",
    )
    group.add_argument("--threads", type=_positive, metavar="N", help="default: physical cores")
    group.add_argument("--max-model-len", type=_positive, metavar="TOKENS")
    group.add_argument("--max-num-seqs", type=_positive, default=32, metavar="N")
    group.add_argument("--max-num-batched-tokens", type=_positive, metavar="TOKENS")
    group.add_argument("--max-queue-size", type=_positive, default=1000, metavar="N")
    group.add_argument("--block-size", type=_positive, default=32, metavar="TOKENS")
    group.add_argument("--kv-cache-bytes", type=_num_bytes, metavar="BYTES", help="such as 512M")
    group.add_argument("--no-prefix-caching", action="store_true")
    group.add_argument("--guaranteed-no-evict", action="store_true")
    group.add_argument("--no-overlap", action="store_true", help="the plain step loop")
    group.add_argument("--seed", type=int, default=0, help="base of requests' seeds, or the seed")
    group.add_argument("--instruction-set", default="", help="kernel level (the best there is)")


def build_engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's configuration from parsed arguments."""
    from lmi_core.settings.engine_config import EngineConfig

    _check_instruction_set(args.instruction_set, "--instruction-set ")
    model: Path = args.model or DEMO_MODEL
    name = model.resolve().name
    return EngineConfig(
        model=model,
        served_model_name=args.served_model_name
        or (name if re.fullmatch(r"[\w.-]+", name) else "model"),
        device=args.device,
        dtype=args.dtype,
        quantize=args.quantize,
        kv_dtype=args.kv_dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_queue_size=args.max_queue_size,
        block_size=args.block_size,
        kv_cache_bytes=args.kv_cache_bytes,
        enable_prefix_caching=not args.no_prefix_caching,
        guaranteed_no_evict=args.guaranteed_no_evict,
        num_threads=args.threads,
        overlap=not args.no_overlap,
        seed=args.seed,
        instruction_set=args.instruction_set,
    )


def _check_instruction_set(name: str, given_as: str) -> None:
    if not name:
        return
    from lmi_core._native import instruction_sets

    if name not in instruction_sets():
        allowed = ", ".join(instruction_sets())
        raise UserError(
            f"{given_as}{name} is not available here; this machine runs {allowed}",
            field="instruction_set",
        )


def _serve(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        from lmi_core.config.reference import command_help

        sys.stdout.write(command_help("serve"))
        return 0
    from lmi_server.command import serve

    return serve(argv, DEMO_MODEL)


def _generate(args: argparse.Namespace) -> int:
    from lmi_core.generate import generate

    return generate(args, build_engine_config(args))


def _doctor(args: argparse.Namespace) -> int:
    from lmi_core.doctor import main as doctor

    return doctor(as_json=args.json)


def _explain(argv: list[str]) -> int:
    from lmi_core.config.explain import main as explain

    return explain(argv, default_model=DEMO_MODEL)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _num_bytes(text: str) -> int:
    match = _BYTES.fullmatch(text)
    if match is None or int(match["number"]) < 1:
        raise argparse.ArgumentTypeError(f"must be bytes such as 1048576, 64M or 2G, got {text}")
    return int(match["number"]) << _UNITS[match["unit"].lower()]
