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
    if chosen["attention"] == select.NATIVE_TILES:
        _check_native_invariant(model, config, cache, device)
    return chosen


def _check_native_invariant(
    model: LoadedModel, config: EngineConfig, cache: DeviceCache, device: torch.device
) -> None:
    """Raise UserError for what the native kernels hand on to others."""
    from lmi_core.ops.kernels.cuda.attention import not_covered
    from lmi_core.ops.kernels.cuda.experts import routing_not_covered
    from lmi_core.ops.kernels.cuda.norm import most_columns

    spec, attention = model.spec, model.spec.attention
    missing = not_covered(
        DTYPES[model.dtype],
        KV_DTYPES[cache.dtype],
        attention.num_q_heads // attention.num_kv_heads,
        attention.head_dim,
        device,
        is_plain=not attention.slopes and not spec.names.sinks,
    )
    if attention.latent is not None:
        missing = "latent heads"
    if not spec.is_causal:
        missing = "tokens that see later ones"
    if missing:
        raise select.no_native_invariant("attention", missing)
    if spec.hidden_size > most_columns(spec.hidden_size):
        raise select.no_native_invariant("norm", f"rows of {spec.hidden_size} columns")
    if (experts := spec.experts) is not None:
        missing = routing_not_covered(experts.num_experts, experts.num_groups)
        if missing:
            raise select.no_native_invariant("route", missing)
    if config.lora is not None:
        raise select.no_native_invariant("lora_add")


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
