"""The process of a rank other than 0: a slice of the weights, and threads that replay steps."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from lmi_core import _native
from lmi_core.adapters.store import LoraStore
from lmi_core.models.smoothing import Smoothing
from lmi_core.runners.cpu.core_groups import num_rank_threads
from lmi_core.runners.cpu.cpu_model import RecordedModel, open_group, open_weights
from lmi_core.runners.cpu.rank_orders import RankOrders
from lmi_core.runners.cpu.ranked_adapters import lora_store
from lmi_core.runners.cpu.ranks import MAX_MESSAGE_BYTES
from lmi_core.sandbox import message
from lmi_core.settings.engine_config import EngineConfig


def main(descriptor: int) -> int:
    """Serve the rank whose socket this is. Signals are rank 0's business: ranks end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    _, config, smoothing, rank, level = _receive(connection)
    if config.bound_cpus:
        os.sched_setaffinity(0, config.bound_cpus[rank])
    logging.basicConfig(level=level or logging.WARNING, format=f"rank {rank}: %(message)s")
    try:
        joined = _join(connection, config, smoothing, rank)
    except (EOFError, ConnectionError):
        return 1  # rank 0 is gone, or has given up
    except Exception as error:
        with suppress(OSError):
            message.send(connection, message.encode(("failed", message.portable(error))))
        return 1
    message.send(connection, message.encode(("ready",)))
    orders = RankOrders(connection, joined.group, joined.recorded, joined.store)
    threading.Thread(target=orders.run, name="orders", daemon=True).start()
    try:
        joined.group.serve(joined.recorded.graph, num_rank_threads(config))
    except _native.NativeError as error:
        logging.getLogger(__name__).error("%s", error)
        return 1
    return 0


def main_hosted(descriptor: int) -> int:
    """As ``main``; ends with stdin, which is its host's."""
    threading.Thread(target=_end_with_stdin, name="host", daemon=True).start()
    return main(descriptor)


def _end_with_stdin() -> None:
    with suppress(OSError):
        os.read(sys.stdin.fileno(), 1)
    os._exit(1)


class _Joined(NamedTuple):
    recorded: RecordedModel
    group: _native.RankGroup
    store: LoraStore | None


def _join(
    connection: socket.socket, config: EngineConfig, smoothing: Smoothing | None, rank: int
) -> _Joined:
    from lmi_core.models.found_model import find_model
    from lmi_core.models.loader import load_weights
    from lmi_core.runners.cpu.memory_needs import memory_errors
    from lmi_core.runners.step_memory import StepSizes

    found = find_model(config)
    found = replace(found, slicing=replace(found.slicing, rank=rank))
    with memory_errors():
        weights = open_weights(found)
        model = load_weights(found, weights, smoothing=smoothing)
        message.send(connection, message.encode(("loaded",)))
        _, num_blocks = _receive(connection)
        _, [descriptor], _, _ = socket.recv_fds(connection, 1, 1)
        sizes = StepSizes.of_model(config, model.spec)
        group = open_group(config, sizes, model.spec, rank, descriptor)
        os.close(descriptor)
        store = None if config.lora is None else lora_store(config, config.lora, model)
        recorded = RecordedModel(
            config,
            model,
            sizes,
            num_blocks=num_blocks,
            adapters=None if store is None else store.table,
            group=group,
        )
    if weights.packed is not None:
        weights.packed.save()
    return _Joined(recorded, group, store)


def _receive(connection: socket.socket) -> Any:
    return message.decode(message.receive(connection, MAX_MESSAGE_BYTES))
