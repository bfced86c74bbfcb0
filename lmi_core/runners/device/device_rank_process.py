"""The process of a rank other than 0 by torch or CUDA: a slice of the weights, and the steps that
rank 0 hands out."""

from __future__ import annotations

import logging
import os
import select as select_module
import signal
import socket
import sys
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lmi_core import _native
from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.device.torch_weights import DeviceWeights
from lmi_core.ops.kernels import select
from lmi_core.runners.cpu.core_groups import num_rank_threads
from lmi_core.runners.cpu.rank_orders import AdapterOrders
from lmi_core.runners.cpu.ranks import MAX_MESSAGE_BYTES
from lmi_core.runners.device.device_cache import DeviceCache
from lmi_core.runners.device.device_memory import MeasuredMemory, measure, memory_of
from lmi_core.runners.device.device_ranks import receive_group
from lmi_core.runners.device.rank_group import TorchGroup
from lmi_core.runners.device.recorded import adapter_store, record_eager
from lmi_core.sandbox import message

if TYPE_CHECKING:
    from lmi_core.adapters.store import LoraStore
    from lmi_core.models.loader import LoadedModel
    from lmi_core.models.smoothing import Smoothing
    from lmi_core.ops.device.eager import EagerGraph
    from lmi_core.settings.engine_config import EngineConfig

log = logging.getLogger(__name__)

_LEAVE_S = 2.0
"""In which a rank ends by itself."""


def main(descriptor: int) -> NoReturn:
    """Serve the rank whose socket this is, and end the process: at once, for whatever is closed in
    order waits for the device, and that for other ranks. Signals are rank 0's business: ranks end
    with it."""
    status = _serve(descriptor)
    sys.stderr.flush()
    os._exit(status)


def _serve(descriptor: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    config, smoothing, rank, level = _receive(connection)
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    logging.basicConfig(level=level or logging.WARNING, format=f"rank {rank}: %(message)s")
    try:
        device = _device(config, rank)
        served = _Rank(connection, config, rank, device, _load(config, smoothing, rank, device))
        _send(connection, "loaded")
        how, given = _receive(connection)
        return served.by_nccl(given) if how == "nccl" else served.by_torch(*given)
    except (EOFError, ConnectionError):
        return 1  # rank 0 is gone, or has given up
    except Exception as error:
        with suppress(OSError):
            message.send(connection, message.encode(("failed", message.portable(error))))
        return 1


@dataclass(frozen=True, slots=True)
class _Rank:
    connection: socket.socket
    config: EngineConfig
    rank: int
    device: torch.device
    model: LoadedModel

    def by_nccl(self, group_id: bytes) -> int:
        """C++ launches a step list."""
        from lmi_core.ops.kernels.cuda.nccl import NcclRanks, open_nccl
        from lmi_core.runners.device.cuda_model import CudaModel

        open_nccl()
        _send(self.connection, "opened")
        ranks = NcclRanks(group_id, self.rank, self.config.tensor_parallel_degree, self.device)
        chosen = select.select_for(self.device.type, is_deterministic=False)
        model = CudaModel(self.config, self.model, self.device, chosen)
        model.start(0, ranks.address, self._agree)
        group = receive_group(self.connection, self.config, model.sizes, self.rank)
        _send(self.connection, "ready")
        steps = model.steps.list
        _native.serve_device_rank(group, str(steps.library.path), steps.address)
        return 0

    def by_torch(self, place: str, chosen: dict[str, str]) -> int:
        """``chosen``: rank 0's implementations of ops."""
        config, device = self.config, self.device
        cache = DeviceCache(config, self.model, device)
        group = TorchGroup(Path(place), self.rank, config.tensor_parallel_degree, device)
        store = adapter_store(config, self.model, device)
        table = None if store is None else store.table
        graph = record_eager(self.model, chosen, cache, device, table, group)
        orders = _Orders(self.connection, store, device)
        cache.grow(self._measured(graph, orders, cache.sizes.max_num_tokens), self._agree)
        _send(self.connection, "ready")
        try:
            self._follow(graph, orders)
        except (EOFError, ConnectionError):
            return 0
        except Exception as error:  # rank 0 hears of the process's end
            log.error("%s: %s", type(error).__name__, error)
        return 1

    def _follow(self, graph: EagerGraph, orders: AdapterOrders) -> None:
        """Compute steps, and do what is said between them, until there is a single word."""
        while not isinstance(given := _receive(self.connection), str):
            if isinstance(given, tuple):
                orders.take(*given)
                continue
            graph.forward(
                DeviceStep.upload(given, block_size=self.config.block_size, device=self.device)
            )

    def _measured(
        self, graph: EagerGraph, orders: AdapterOrders, num_tokens: int
    ) -> MeasuredMemory | None:
        """Of this rank's device, while it computes the steps that rank 0 measures."""
        memory = memory_of(self.device)
        if memory is None:
            self._follow(graph, orders)
            return None
        return measure(
            memory,
            others_bytes=0,
            num_tokens=num_tokens,
            usable_share=self.config.gpu_memory_utilization,
            run_step=lambda _: self._follow(graph, orders),
            measure_graphs=lambda: 0,
            can_try_less=False,
        )

    def _agree(self, num_blocks: int) -> int:
        _send(self.connection, "blocks", num_blocks)
        return int(_receive(self.connection))


class _Orders(AdapterOrders):
    """Of adapters on a device."""

    def __init__(
        self, connection: socket.socket, store: LoraStore | None, device: torch.device
    ) -> None:
        super().__init__(connection, store)
        self._device = device

    def _answer(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        # In a thread of its own, whose device is the first one before.
        is_gpu = self._device.type == "cuda"
        with torch.cuda.device(self._device) if is_gpu else nullcontext():
            super()._answer(number, name, arguments)


def _end_with(connection: socket.socket) -> None:
    """End a while after rank 0, for which this one may wait on its device."""
    gone = select_module.poll()
    gone.register(connection, select_module.POLLRDHUP)
    gone.poll()
    time.sleep(_LEAVE_S)
    os._exit(1)


def _device(config: EngineConfig, rank: int) -> torch.device:
    torch.set_num_threads(num_rank_threads(config))
    if config.device != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def _load(
    config: EngineConfig, smoothing: Smoothing | None, rank: int, device: torch.device
) -> LoadedModel:
    from lmi_core.models.found_model import find_model
    from lmi_core.models.loader import load_weights

    found = find_model(config)
    found = replace(found, slicing=replace(found.slicing, rank=rank))
    return load_weights(found, DeviceWeights(device, config.activations), smoothing=smoothing)


def _send(connection: socket.socket, *words: object) -> None:
    message.send(connection, message.encode(words))


def _receive(connection: socket.socket) -> Any:
    return message.decode(message.receive(connection, MAX_MESSAGE_BYTES))
