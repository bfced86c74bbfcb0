"""What drafts for a model on a torch device: another model, an EAGLE head, or Medusa heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lmi_core import ops
from lmi_core.models.decoder import KeptStates
from lmi_core.models.eagle_decoder import EagleDecoder, kept_states, pack_eagle
from lmi_core.models.medusa_heads import MedusaHeads, record_head
from lmi_core.models.slices import WHOLE
from lmi_core.ops.device.eager import EagerGraph
from lmi_core.ops.device.kept_table import KeptTable
from lmi_core.ops.device.paged_cache import PagedCache
from lmi_core.ops.device.torch_weights import DTYPES, DeviceWeights
from lmi_core.ops.graph import Graph
from lmi_core.ops.kernels import select
from lmi_core.ops.operands import LinearWeight
from lmi_core.runners.device.device_cache import DeviceCache
from lmi_core.runners.device.recorded import chosen_for, record_eager

if TYPE_CHECKING:
    from lmi_core.models.eagle_head import EagleHead
    from lmi_core.models.loader import LoadedModel
    from lmi_core.runners.runner import RunnerInfo
    from lmi_core.settings.engine_config import EngineConfig
    from lmi_core.weights.formats import FloatArray


class Drafting:
    """A draft model, loaded with ``config``."""

    kept: KeptStates | None = None
    """What the model's steps keep for it."""
    table: KeptTable | None = None
    """Where."""
    shift = 0
    """As of ``DraftRunner``."""
    num_heads = 0
    """That draw a token each from one state, as of ``HeadRunner``; 0: it goes on from tokens."""
    cache: DeviceCache | None

    def __init__(
        self, name: str, config: EngineConfig, model: LoadedModel, device: torch.device
    ) -> None:
        self.name = name
        self.config = config
        self.model = model
        self.device = device
        self.cache = DeviceCache(config, model, device)
        self.num_bytes = model.weights.num_bytes

    @property
    def stores(self) -> list[PagedCache | KeptTable]:
        """What has as many blocks as the cache of the model that it drafts for."""
        stores: list[PagedCache | KeptTable] = [] if self.cache is None else [self.cache.store]
        return stores if self.table is None else [*stores, self.table]

    def added_to(self, info: RunnerInfo) -> RunnerInfo:
        """``info``, of the runner that it drafts for, with what it has."""
        return replace(
            info,
            weight_bytes=info.weight_bytes + self.num_bytes,
            draft_model=self.name,
            has_draft_heads=self.num_heads > 0,
        )

    def graphs(self, chosen: Mapping[str, str]) -> list[EagerGraph]:
        """What computes the steps of a chain by their number, or all of them; ``chosen``: the
        implementation of every op."""
        assert self.cache is not None
        return [record_eager(self.model, self._chosen(chosen), self.cache, self.device)]

    def _chosen(self, chosen: Mapping[str, str]) -> dict[str, str]:
        assert self.cache is not None
        return chosen_for(self.model, self.config, self.cache, self.device, chosen)


class EagleDrafting(Drafting):
    """An EAGLE head of ``model``, which was loaded with ``config``."""

    shift = 1

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        model: LoadedModel,
        head: EagleHead,
        device: torch.device,
    ) -> None:
        layer = replace(model, spec=head.spec, kv_scales=(), slicing=WHOLE)
        super().__init__(name, config, layer, device)
        packer, dtype = DeviceWeights(device), DTYPES[model.dtype]
        self.table = KeptTable(head.spec.hidden_size, dtype, device, config.block_size)
        self.kept = kept_states(head, model.dtype, self.table, packer)
        self._head = head
        self._weights = pack_eagle(head, model, packer)
        self.num_bytes = self._weights.num_bytes
        self.num_bytes += sum(linear.num_bytes for linear in self.kept.linears)

    def graphs(self, chosen: Mapping[str, str]) -> list[EagerGraph]:
        assert self.table is not None
        assert self.cache is not None
        store, max_model_len = self.cache.store, self.cache.sizes.max_model_len
        recorded = Graph(self.model.dtype)
        EagleDecoder(self._head, self._weights, self.table, store, max_model_len).record(recorded)
        return [EagerGraph(recorded, select.load(self._chosen(chosen)), self.device)]


class MedusaDrafting(Drafting):
    """Medusa heads of ``model``, which was loaded with ``config``. They read its last states, which
    its steps keep by slot. Weights are int8, as on the CPU."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        model: LoadedModel,
        heads: MedusaHeads,
        device: torch.device,
    ) -> None:
        self.name, self.config, self.model, self.device = name, config, model, device
        self.cache = None
        self.num_heads = heads.num_heads
        hidden, dtype = model.spec.hidden_size, DTYPES[model.dtype]
        self.table = KeptTable(hidden, dtype, device, config.block_size)
        self.kept = KeptStates(self.table, (), ())
        self.num_bytes = 0
        self._recorded = [self._record(heads, head) for head in range(heads.num_heads)]

    def _record(self, heads: MedusaHeads, head: int) -> Graph:
        assert self.table is not None
        recorded, packer = Graph("fp32"), DeviceWeights(self.device)

        def pack(matrix: FloatArray) -> LinearWeight:
            packed = packer.pack([matrix], format="int8", gated=False)
            self.num_bytes += packed.num_bytes
            return packed

        x = ops.gather_logit_rows(ops.kept_rows(recorded, self.table))
        record_head(x, heads, head, pack)
        return recorded

    def graphs(self, chosen: Mapping[str, str]) -> list[EagerGraph]:
        kernels = select.load(select.launched_from_python(chosen))
        return [EagerGraph(recorded, kernels, self.device) for recorded in self._recorded]
