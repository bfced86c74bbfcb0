"""The runner of a torch device: loads the weights, and chooses who launches the steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch

from lmi_core.errors import InsufficientMemoryError, UserError
from lmi_core.models.eagle_head import EagleHead
from lmi_core.ops.device.product_lowering import NotNativeError
from lmi_core.ops.device.torch_weights import DeviceWeights
from lmi_core.ops.kernels import select
from lmi_core.runners.cpu.cpu_runner import Progress
from lmi_core.runners.device.cuda_runner import CudaRunner
from lmi_core.runners.device.device_memory import memory_of
from lmi_core.runners.device.drafting import Drafting, EagleDrafting, MedusaDrafting
from lmi_core.runners.device.torch_runner import TorchRunner
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.version import torch_too_old
from lmi_core.weights.quantized.checkpoint import can_be_quantized

if TYPE_CHECKING:
    from lmi_core.models.found_model import FoundModel
    from lmi_core.models.loader import LoadedModel
    from lmi_core.models.smoothing import Smoothing
    from lmi_core.runners.device.device_ranks import DeviceRanks
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
    from lmi_core.models.found_model import find_model
    from lmi_core.models.loader import load_weights

    config = asked if isinstance(asked, EngineConfig) else asked.asked
    device = find_device(config)
    chosen = select.select_for(device.type, is_deterministic=config.deterministic)
    _log.info("ops on %s: %s%s", device, select.describe(chosen), _unused(chosen, device))
    memory = memory_of(device)
    found = find_model(asked) if isinstance(asked, EngineConfig) else asked
    others_bytes = 0 if memory is None else memory.allocated_bytes()
    models = (found, *found.drafts)
    smoothings = [smoothing_for(each, progress) for each in models]
    with ExitStack() as failed:
        ranks = _start_ranks(config, smoothings[0], chosen)
        if ranks is not None:
            failed.callback(ranks.close)
        try:
            on_weights = None if progress is None else partial(progress, "weights")
            model, *drafts = (
                load_weights(each, DeviceWeights(device, config.activations), on_weights, smoothing)
                for each, smoothing in zip(models, smoothings, strict=True)
            )
        except torch.OutOfMemoryError as error:
            raise _no_room_for_weights(config, found.checkpoint, device) from error
        drafting: Drafting | None = None
        name = found.drafted_by
        if found.drafts:
            drafting = Drafting(name, found.drafts[0].asked, drafts[0], device)
        elif isinstance(found.heads, EagleHead):
            drafting = EagleDrafting(name, config, model, found.heads, device)
        elif found.heads is not None:
            drafting = MedusaDrafting(name, config, model, found.heads, device)
        runner = make_runner(config, model, device, chosen, others_bytes, ranks, drafting)
        failed.pop_all()
    return runner, model


def _start_ranks(
    config: EngineConfig, smoothing: Smoothing | None, chosen: Mapping[str, str]
) -> DeviceRanks | None:
    """The others of those that compute the model; None: this process does it alone."""
    if config.tensor_parallel_degree == 1:
        return None
    from lmi_core.runners.device.device_ranks import DeviceRanks

    if config.device == "cuda":
        _check_num_gpus(config.tensor_parallel_degree)
        _log.warning("ranks on GPUs meet by NCCL, which hasn't run on hardware in this version")
    if chosen.get(select.LAUNCH) == "native":
        from lmi_core.ops.kernels.cuda.nccl import open_nccl

        open_nccl()  # it fails before anybody reads weights
    return DeviceRanks(config, smoothing)


def _check_num_gpus(degree: int) -> None:
    num_gpus = torch.cuda.device_count()
    if num_gpus < degree:
        raise UserError(
            f"tensor_parallel_degree={degree}, but torch finds {num_gpus} GPUs: write at most "
            "that, or show the process more by CUDA_VISIBLE_DEVICES",
            field="tensor_parallel_degree",
        )


def _unused(chosen: Mapping[str, str], device: torch.device) -> str:
    """Why the CUDA kernels don't run, where they might."""
    if "native" in chosen.values():
        return ""
    reason = select.why_not_native(device.type)
    return f"; CUDA kernels where {select.VARIABLE}=native asks: {reason}" if reason else ""


def make_runner(
    config: EngineConfig,
    model: LoadedModel,
    device: torch.device,
    chosen: Mapping[str, str],
    others_bytes: int = 0,
    ranks: DeviceRanks | None = None,
    drafting: Drafting | None = None,
) -> TorchRunner | CudaRunner:
    """C++ launches the steps where that was chosen and every op of the model has a native kernel,
    no model drafts for it, and nobody wants its hidden states; else Python does, and the log says
    why. ``others_bytes`` were allocated before the weights."""
    if chosen.get(select.LAUNCH) == "native":
        try:
            if config.gives_states:
                raise NotNativeError("sample", "contrastive search reads hidden states")
            if not select.asks_cpp():
                _refuse_unseen(config, ranks)
            if drafting is not None:
                raise NotNativeError("take_tokens", "chains of drafts are launched there")
            return CudaRunner(config, model, device, chosen, others_bytes, ranks)
        except NotNativeError as error:
            _log.warning("steps are launched from Python, op by op, because of %s", error)
    return TorchRunner(config, model, device, chosen, others_bytes, ranks, drafting)


def _refuse_unseen(config: EngineConfig, ranks: DeviceRanks | None) -> None:
    """Raise NotNativeError for what has run by such steps in an emulator alone."""
    asks = f"its kernels haven't been seen on hardware: {select.VARIABLE}=native asks for them"
    if ranks is not None:
        raise NotNativeError("all_reduce", asks)
    if config.lora is not None:
        raise NotNativeError("lora_add", asks)


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
