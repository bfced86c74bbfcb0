"""A model's steps as torch calls, and which implementations of its ops they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from lmi_core.adapters.store import LoraStore
from lmi_core.ops import LoraTable
from lmi_core.ops.device.adapter_table import RANK_MULTIPLE, AdapterTable
from lmi_core.ops.device.eager import EagerGraph
from lmi_core.ops.device.paged_cache import KV_DTYPES
from lmi_core.ops.device.ranked_graph import RankedGraph, Ranks
from lmi_core.ops.device.torch_weights import DTYPES, DeviceWeights
from lmi_core.ops.graph import Graph
from lmi_core.ops.kernels import select
from lmi_core.ops.kernels.flash_choice import AttentionShape, prefer_flash
from lmi_core.runners.device.device_cache import DeviceCache

if TYPE_CHECKING:
    from lmi_core.models.decoder import KeptStates
    from lmi_core.models.loader import LoadedModel
    from lmi_core.settings.engine_config import EngineConfig, StatesOf


def chosen_for(
    model: LoadedModel,
    config: EngineConfig,
    cache: DeviceCache,
    device: torch.device,
    chosen: Mapping[str, str],
) -> dict[str, str]:
    """Of ``chosen`` implementations those that do for ``model``, where Python launches its ops."""
    chosen = select.launched_from_python(chosen)
    if config.flash_attention and not config.deterministic and model.spec.is_causal:
        attention = model.spec.attention
        shape = AttentionShape(
            num_q_heads=attention.num_q_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            block_size=config.block_size,
            dtype=DTYPES[model.dtype],
            cache_dtype=KV_DTYPES[cache.dtype],
        )
        prefer_flash(chosen, device, shape)
    if model.spec.attention.latent is not None and chosen["attention"] == "invariant":
        return select.by_row("latent attention")
    return chosen


def adapter_store(
    config: EngineConfig, model: LoadedModel, device: torch.device
) -> LoraStore | None:
    """Of what this process has of ``model``; None: no adapters were asked for."""
    if config.lora is None:
        return None
    max_rank = config.lora.max_rank
    table = AdapterTable(-(-max_rank // RANK_MULTIPLE) * RANK_MULTIPLE)
    return LoraStore(
        model, DeviceWeights(device), table, max_rank=max_rank, rank_multiple=RANK_MULTIPLE
    )


def record_eager(
    model: LoadedModel,
    chosen: dict[str, str],
    cache: DeviceCache,
    device: torch.device,
    adapters: LoraTable | None = None,
    group: Ranks | None = None,
    kept: KeptStates | None = None,
    states: StatesOf | None = None,
) -> EagerGraph:
    """What computes the steps of ``model``, or with ``group`` of a rank's part of it; ``kept``: of
    its states; ``states``: which are outputs, too."""
    from lmi_core.models.decoder import record

    graph = Graph(model.dtype)
    record(model, graph, cache.store, cache.sizes.max_model_len, adapters, kept, states)
    kernels = select.load(chosen)
    if group is None:
        return EagerGraph(graph, kernels, device)
    return RankedGraph(graph, kernels, device, group)
