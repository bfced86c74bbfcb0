"""The process of a rank other than 0: a slice of the weights, and threads that replay steps."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lmi_core import _native
from lmi_core.runners.cpu.ranks import MAX_MESSAGE_BYTES
from lmi_core.runners.cpu.recorded_model import RecordedModel, open_group
from lmi_core.runners.cpu.sizes import cache_dtype, num_rank_threads, step_sizes
from lmi_core.sandbox import message
from lmi_core.settings.engine_config import EngineConfig


def main(descriptor: int) -> int:
    """Serve the rank whose socket this is. Signals are rank 0's business: ranks end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    _, config, rank, level = _receive(connection)
    logging.basicConfig(level=level or logging.WARNING, format=f"rank {rank}: %(message)s")
    try:
        recorded, group = _join(connection, config, rank)
    except (EOFError, ConnectionError):
        return 1  # rank 0 is gone, or has given up
    except Exception as error:
        with suppress(OSError):
            message.send(connection, message.encode(("failed", message.portable(error))))
        return 1
    message.send(connection, message.encode(("ready",)))
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        group.serve(recorded.graph, num_rank_threads(config))
    except _native.NativeError as error:
        logging.getLogger(__name__).error("%s", error)
        return 1
    return 0


def _join(
    connection: socket.socket, config: EngineConfig, rank: int
) -> tuple[RecordedModel, _native.RankGroup]:
    from lmi_core.models.loader import find_model, load_weights
    from lmi_core.ops.cpu import NativeWeights
    from lmi_core.runners.cpu.memory_needs import memory_errors
    from lmi_core.weights.packed_model import open_packed_model

    found = find_model(config)
    found = replace(found, slicing=replace(found.slicing, rank=rank))
    num_threads = num_rank_threads(config)
    with memory_errors():
        packed = open_packed_model(config, found.checkpoint, num_threads, rank=rank)
        weights = NativeWeights(config.instruction_set, num_threads, packed, config.activations)
        model = load_weights(found, weights)
        message.send(connection, message.encode(("loaded",)))
        _, num_blocks = _receive(connection)
        _, [descriptor], _, _ = socket.recv_fds(connection, 1, 1)
        sizes = step_sizes(config, model.spec)
        group = open_group(config, model.spec, sizes, rank, descriptor)
        os.close(descriptor)
        recorded = RecordedModel(
            config,
            model,
            sizes,
            num_blocks=num_blocks,
            kv_dtype=cache_dtype(config, model.dtype),
            group=group,
        )
    if packed is not None:
        packed.save()
    return recorded, group


def _receive(connection: socket.socket) -> Any:
    return message.decode(message.receive(connection, MAX_MESSAGE_BYTES))


def _end_with(connection: socket.socket) -> None:
    """Rank 0 says nothing more: when its end of the socket is closed, it is gone or will be."""
    while connection.recv(1):
        pass
    os._exit(0)
