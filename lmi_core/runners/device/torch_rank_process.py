"""The process of a rank other than 0 on a torch device: a slice of the weights, and the steps that
rank 0 hands out."""

from __future__ import annotations

import logging
import signal
import socket
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.device.torch_weights import DeviceWeights
from lmi_core.ops.kernels import select
from lmi_core.runners.cpu.ranks import MAX_MESSAGE_BYTES
from lmi_core.runners.cpu.sizes import num_rank_threads
from lmi_core.runners.device.device_cache import DeviceCache
from lmi_core.runners.device.rank_group import GlooGroup
from lmi_core.runners.device.torch_runner import only_torch_attends, record_eager
from lmi_core.sandbox import message

if TYPE_CHECKING:
    from lmi_core.models.smoothing import Smoothing
    from lmi_core.ops.device.eager import EagerGraph
    from lmi_core.settings.engine_config import EngineConfig

_DEVICE = torch.device("cpu")


def main(descriptor: int) -> int:
    """Serve the rank whose socket this is. Signals are rank 0's business: ranks end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    config, smoothing, rank, place, level = _receive(connection)
    logging.basicConfig(level=level or logging.WARNING, format=f"rank {rank}: %(message)s")
    torch.set_num_threads(num_rank_threads(config))
    try:
        graph = _load(connection, config, smoothing, rank, Path(place))
    except (EOFError, ConnectionError):
        return 1  # rank 0 is gone, or has given up
    except Exception as error:
        with suppress(OSError):
            message.send(connection, message.encode(("failed", message.portable(error))))
        return 1
    message.send(connection, message.encode(("ready",)))
    with suppress(EOFError, OSError):
        while True:
            arrays = _receive(connection)
            step = DeviceStep.upload(arrays, block_size=config.block_size, device=_DEVICE)
            graph.forward(step)
    return 0


def _load(
    connection: socket.socket,
    config: EngineConfig,
    smoothing: Smoothing | None,
    rank: int,
    place: Path,
) -> EagerGraph:
    from lmi_core.models.loader import find_model, load_weights

    found = find_model(config)
    found = replace(found, slicing=replace(found.slicing, rank=rank))
    weights = DeviceWeights(_DEVICE, config.activations)
    model = load_weights(found, weights, smoothing=smoothing)
    cache = DeviceCache(config, model, _DEVICE)
    message.send(connection, message.encode(("loaded",)))
    group = GlooGroup(place, rank, config.tensor_parallel_degree)
    chosen = select.select_for(_DEVICE.type, is_deterministic=config.deterministic)
    chosen = select.launched_from_python(chosen)
    if reason := only_torch_attends(model, is_invariant=config.deterministic):
        chosen = select.with_torch_attention(chosen, reason)
    graph = record_eager(model, chosen, cache, _DEVICE, None, group)
    cache.store.resize(_receive(connection) + 1)
    return graph


def _receive(connection: socket.socket) -> Any:
    return message.decode(message.receive(connection, MAX_MESSAGE_BYTES))
