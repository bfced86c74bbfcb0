"""``lmi replay``: whether recorded requests are answered as they were."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from lmi_core.chat.answer import RemoteSource
from lmi_core.engine.engine import Engine
from lmi_core.errors import LmiError, UserError
from lmi_core.http_url import HttpUrl, model_beside_url
from lmi_core.local_model import open_local_model
from lmi_core.receipts.receipt import Receipt, read_receipts
from lmi_core.receipts.replay import LocalEngine, RemoteServer, Source, first_difference

_MAX_SHOWN = 20
Located = tuple[str, Receipt]


class Refusal(str):
    """Why a receipt can't be asked again, in the place of a difference."""

    __slots__ = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="receipts, or the directory of serve --record")
    parser.add_argument("--url", help="ask this server instead of loading a model")
    parser.add_argument("--parallel", type=int, default=8, help="requests at once (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which they are asked")


def replay(args: argparse.Namespace, model: Sequence[str], default_model: Path) -> int:
    """Ask again and print what differs; 0: nothing does."""
    if args.parallel < 1:
        raise UserError("--parallel must be at least 1", field="--parallel")
    receipts, notes = _replayable(args.file)
    results = asyncio.run(_replay(args, model, default_model, receipts)) if receipts else []
    differences = [f"{where}: {result}" for where, result in results if result is not None]
    for line in [*notes, *differences][:_MAX_SHOWN]:
        print(line)
    num_refused = sum(isinstance(result, Refusal) for _, result in results)
    num_equal, num_unequal = len(results) - len(differences), len(differences) - num_refused
    num_left_out = len(notes) + num_refused
    print(f"{num_equal} equal, {num_unequal} not, {num_left_out} can't be replayed")
    return 0 if num_equal and not differences else 1


def _replayable(path: Path) -> tuple[list[Located], list[str]]:
    """The receipts that can be asked again, and what is to be said of others."""
    receipts, notes = [], []
    for where, receipt in read_receipts(path):
        if receipt is None:
            notes.append(f"{where}: the line is cut off")
        elif receipt.is_redacted:
            notes.append(f"{where}: redacted")
        elif not receipt.num_tokens:
            notes.append(f"{where}: cut off before its first token")
        else:
            receipts.append((where, receipt))
    return receipts, notes


async def _replay(
    args: argparse.Namespace, model: Sequence[str], default_model: Path, receipts: list[Located]
) -> list[tuple[str, str | None]]:
    async with AsyncExitStack() as stack:
        source = await _source(args.url, model, default_model, stack)
        return await replay_all(source, receipts, parallel=args.parallel, seed=args.seed)


async def _source(
    url: str | None, model: Sequence[str], default_model: Path, stack: AsyncExitStack
) -> Source:
    if url is None:
        opened = await asyncio.to_thread(open_local_model, model, default_model)
        return LocalEngine(await stack.enter_async_context(Engine(opened.asked)))
    server = RemoteSource(HttpUrl.parse(url), model_beside_url(model))
    return RemoteServer(await asyncio.to_thread(server.__enter__))


async def replay_all(
    source: Source, receipts: Sequence[Located], *, parallel: int, seed: int
) -> list[tuple[str, str | None]]:
    """Where each receipt is and what differs, None for nothing, in their order; they are asked in
    another one, which ``seed`` decides, ``parallel`` at once."""
    results: dict[int, str | None] = {}
    order = list(range(len(receipts)))
    random.Random(seed).shuffle(order)

    async def ask_next() -> None:
        while order:
            index = order.pop()
            _, receipt = receipts[index]
            try:
                results[index] = first_difference(receipt, await source.ask(receipt, index))
            except (LmiError, msgspec.ValidationError) as error:
                results[index] = Refusal(f"it can't be asked again: {error}")

    await asyncio.gather(*(ask_next() for _ in range(parallel)))
    return [(where, results[index]) for index, (where, _) in enumerate(receipts)]
