"""``lmi generate``: one prompt, its completion streamed to the terminal."""

from __future__ import annotations

import argparse
import asyncio
import io
import sys
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.progress import TerminalProgress
from lmi_core.text.prompt_errors import not_unicode

if TYPE_CHECKING:
    from lmi_core.engine.engine import Engine
    from lmi_core.local_model import LocalModel


def generate(args: argparse.Namespace, model: LocalModel) -> int:
    """Load the model, write the completion to stdout as it is made, return the exit code."""
    text = _read_standard_input() if args.prompt == "-" else args.prompt
    return asyncio.run(_generate(args, model, text))


def _read_standard_input() -> str:
    """As UTF-8, whatever the locale says, with line ends as ``open`` gives them."""
    data = sys.stdin.buffer.read()
    try:
        return io.StringIO(data.decode(), newline=None).read()
    except UnicodeDecodeError as error:
        raise UserError(
            f"standard input isn't UTF-8: byte {error.start} is 0x{data[error.start]:02x} "
            f"({error.reason})",
            field="prompt",
        ) from None


async def _generate(args: argparse.Namespace, model: LocalModel, text: str) -> int:
    from lmi_core.engine.engine import Engine

    progress = TerminalProgress()
    request = build_request(args, model, text)
    engine = Engine(model.asked, progress=progress)
    async with engine:
        progress.finish()
        await _stream(engine, request, show_stats=args.stats)
    return 0


async def _stream(engine: Engine, request: GenerationRequest, *, show_stats: bool) -> None:
    started = time.perf_counter()
    first = started
    num_tokens = num_prompt_tokens = 0
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            if not num_tokens:
                first = time.perf_counter()
                num_prompt_tokens = event.num_prompt_tokens
            num_tokens = event.num_generated_tokens
            sys.stdout.write(event.text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if show_stats:
        seconds = time.perf_counter() - first
        speed = f", {(num_tokens - 1) / seconds:.1f} tokens/s" if num_tokens > 1 else ""
        print(
            f"{num_prompt_tokens} prompt tokens, first token after {first - started:.3f} s; "
            f"{num_tokens} tokens{speed}",
            file=sys.stderr,
        )


def build_request(args: argparse.Namespace, model: LocalModel, text: str) -> GenerationRequest:
    """The request: through the chat template when there is one, unless ``--raw`` is given."""
    try:
        text.encode()
    except UnicodeEncodeError:  # an argument of bytes that aren't UTF-8
        raise UserError(not_unicode(text), field="prompt") from None
    template = None if args.raw else model.template
    if args.chat and template is None:
        raise UserError(f"{model.config.model} has no chat template; use --raw", field="--chat")
    if args.system is not None and template is None:
        raise UserError("--system needs a chat template; leave it out", field="--system")
    if template is not None:
        messages = [{"role": "user", "content": text}]
        if args.system is not None:
            messages.insert(0, {"role": "system", "content": args.system})
        text = template.render(messages)
    return GenerationRequest(
        request_id="generate",
        prompt=text,
        # A template writes the special tokens itself.
        add_special_tokens=template is None,
        params=SamplingParams(
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            typical_p=args.typical_p,
            repetition_penalty=args.repetition_penalty,
            stop=tuple(args.stop),
            seed=args.seed,
        ),
    )
