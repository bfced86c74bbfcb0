"""The runner of a torch device: loads the weights, and chooses who launches the steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch

from lmi_core.errors import InsufficientMemoryError, UserError
from lmi_core.ops.device.product_lowering import NotNativeError
from lmi_core.ops.device.torch_weights import DeviceWeights
from lmi_core.ops.kernels import select
from lmi_core.runners.cpu.cpu_runner import Progress
from lmi_core.runners.device.cuda_runner import CudaRunner
from lmi_core.runners.device.device_memory import memory_of
from lmi_core.runners.device.torch_runner import TorchRunner
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.version import torch_too_old
from lmi_core.weights.quantized.checkpoint import can_be_quantized

if TYPE_CHECKING:
    from lmi_core.models.loader import FoundModel, LoadedModel
    from lmi_core.models.smoothing import Smoothing
    from lmi_core.runners.device.torch_ranks import TorchRanks
    from lmi_core.weights.checkpoint import Checkpoint

_log = logging.getLogger(__name__)


def load_device_runner(
    asked: EngineConfig | FoundModel, progress: Progress | None = None
) -> tuple[TorchRunner | CudaRunner, LoadedModel]:
    """Load the model's weights to the configured device and build its runner.

    Raises ModelError for files that can't be served, UserError for a device that isn't there, for
    ``LMI_OPS`` that can't be had and for sizes that don't fit.
    """
    from lmi_core.calibration.peaks import smoothing_for
    from lmi_core.models.loader import find_model, load_weights

    config = asked if isinstance(asked, EngineConfig) else asked.asked
    device = find_device(config)
    chosen = select.select_for(device.type, is_deterministic=config.deterministic)
    _log.info("ops on %s: %s%s", device, select.describe(chosen), _unused(chosen))
    memory = memory_of(device)
    found = find_model(asked) if isinstance(asked, EngineConfig) else asked
    others_bytes = 0 if memory is None else memory.allocated_bytes()
    smoothing = smoothing_for(found, progress)
    with ExitStack() as failed:
        ranks = _start_ranks(config, smoothing)
        if ranks is not None:
            failed.callback(ranks.close)
        try:
            model = load_weights(
                found,
                DeviceWeights(device, config.activations),
                None if progress is None else partial(progress, "weights"),
                smoothing,
            )
        except torch.OutOfMemoryError as error:
            raise _no_room_for_weights(config, found.checkpoint, device) from error
        runner = make_runner(config, model, device, chosen, others_bytes, ranks)
        failed.pop_all()
    return runner, model


def _start_ranks(config: EngineConfig, smoothing: Smoothing | None) -> TorchRanks | None:
    """The others of those that compute the model; None: this process does it alone."""
    if config.tensor_parallel_degree == 1:
        return None
    if config.lora is not None:
        raise UserError(
            f"tensor_parallel_degree={config.tensor_parallel_degree} on device={config.device} "
            "doesn't go with LoRA adapters in this version: write 1, or device=cpu",
            field="tensor_parallel_degree",
        )
    from lmi_core.runners.device.torch_ranks import TorchRanks

    return TorchRanks(config, smoothing)


def _unused(chosen: Mapping[str, str]) -> str:
    if "native" in chosen.values():
        return ""
    return f"; CUDA kernels where {select.VARIABLE}=native asks: they have not run on hardware yet"


def make_runner(
    config: EngineConfig,
    model: LoadedModel,
    device: torch.device,
    chosen: Mapping[str, str],
    others_bytes: int = 0,
    ranks: TorchRanks | None = None,
) -> TorchRunner | CudaRunner:
    """C++ launches the steps where that was chosen and every op of the model has a native kernel;
    else Python does, and the log names the op. ``others_bytes`` were allocated before the
    weights."""
    if chosen.get(select.LAUNCH) == "native":
        try:
            return CudaRunner(config, model, device, chosen, others_bytes)
        except NotNativeError as error:
            _log.warning("steps are launched from Python, op by op, because of %s", error)
    return TorchRunner(config, model, device, chosen, others_bytes, ranks)


def find_device(config: EngineConfig) -> torch.device:
    """The torch device of ``config.device``; UserError if this process has none, or a torch that
    is too old."""
    if objection := torch_too_old(torch.__version__):
        raise UserError(f"device={config.device}, but {objection}", field="device")
    if config.device != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        build = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
        raise UserError(
            f"device=cuda, but torch {torch.__version__} (built {build}) finds no GPU: "
            "set device=cpu, or install a torch that matches the driver (see nvidia-smi)",
            field="device",
        )
    return torch.device("cuda", torch.cuda.current_device())


def _no_room_for_weights(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device
) -> InsufficientMemoryError:
    _, total_bytes = torch.cuda.mem_get_info(device)
    gib = 2**30
    stored, total = checkpoint.stored_bytes / gib, total_bytes / gib
    is_smallest = config.quantize == "int4" or not can_be_quantized(checkpoint)
    advice = "unload other models" if is_smallest else "set quantize=int4"
    return InsufficientMemoryError(
        f"the weights in {config.model}, {stored:.1f} GiB as stored, don't fit into what is free "
        f"of the GPU's {total:.1f} GiB: {advice}, or use a larger GPU",
        field="quantize",
    )
