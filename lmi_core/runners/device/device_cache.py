"""The KV cache of a runner on a torch device: a block until memory was measured, then its share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lmi_core.ops.device.kept_table import KeptTable
from lmi_core.ops.device.paged_cache import FixedScales, PagedCache
from lmi_core.ops.kernels import select
from lmi_core.runners.runner import RunnerInfo
from lmi_core.runners.step_memory import KvCacheSize, StepSizes, size_kv_cache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lmi_core.models.loader import LoadedModel
    from lmi_core.runners.device.device_memory import MeasuredMemory
    from lmi_core.settings.engine_config import EngineConfig


class DeviceCache:
    """``store`` and what is decided with it: the sizes of steps, the number of blocks."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        device: torch.device,
        beside: Sequence[PagedCache | KeptTable] = (),
    ) -> None:
        """``beside``: what has as many blocks, of what drafts for ``model``."""
        spec, attention = model.spec, model.spec.attention
        self._config, self._model = config, model
        self.dtype = model.dtype if config.kv_dtype == "auto" else config.kv_dtype
        self.sizes = StepSizes.of_model(config, spec, device.type)
        self.store = PagedCache(
            num_layers=spec.num_cache_layers,
            num_blocks=1,
            block_size=config.block_size,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            dtype=self.dtype,
            device=device,
            is_latent=attention.latent is not None,
            fixed_scales=[FixedScales(*scales) for scales in model.kv_scales],
        )
        self._num_ranks = model.slicing.num_ranks
        # Ranks on the CPU divide its memory; on GPUs each has its own.
        is_divided = device.type == "cpu"
        self._num_caches = 1 if is_divided else self._num_ranks
        self._block_bytes = self.store.num_bytes * (self._num_ranks if is_divided else 1)
        self._beside = beside
        self._block_bytes += sum(each.num_bytes for each in beside)

    def grow(
        self, measured: MeasuredMemory | None, agree: Callable[[int], int] | None = None
    ) -> KvCacheSize:
        """Take what ``measured`` leaves, or what the configuration says, and a block more: the
        last one, of rows that stand for none. ``agree``: gives the number of blocks that all ranks
        have, of how many this one could have.

        Raises InsufficientMemoryError, with values that would work, where it doesn't fit."""
        config, sizes = self._config, self.sizes
        spare = None
        if measured is not None:
            measured.check(config, max_model_len=sizes.max_model_len, block_bytes=self._block_bytes)
            spare = measured.spare_bytes - self._block_bytes, measured.reason
        memory = size_kv_cache(
            config,
            block_bytes=self._block_bytes,
            max_model_len=sizes.max_model_len,
            spare=spare,
        )
        if agree is not None:
            memory = replace(memory, num_blocks=agree(memory.num_blocks))
        if measured is not None:
            measured.report(memory)
        try:
            self.store.resize(memory.num_blocks + 1)
            for each in self._beside:
                each.resize(memory.num_blocks + 1)
        except torch.OutOfMemoryError as error:
            if measured is None:
                raise
            raise measured.no_room(memory.num_bytes) from error
        return memory

    def info(
        self,
        memory: KvCacheSize,
        measured: MeasuredMemory | None,
        chosen: Mapping[str, str],
        *,
        runs_ahead: bool,
    ) -> RunnerInfo:
        config, sizes, model = self._config, self.sizes, self._model
        return RunnerInfo(
            vocab_size=sizes.vocab_size,
            max_model_len=sizes.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_tokens,
            max_logit_rows=sizes.max_logit_rows,
            max_logprobs=sizes.max_logprobs,
            num_blocks=memory.num_blocks,
            block_size=config.block_size,
            weight_bytes=self._num_ranks * model.weights.num_bytes,
            kv_cache_bytes=self._num_caches * memory.num_bytes,
            arena_bytes=0 if measured is None else measured.workspace_bytes,
            dtype=model.dtype,
            quantize=model.quantize or "",
            kv_dtype=self.dtype,
            device=config.device,
            kernels=select.describe(chosen),
            runs_ahead=model.pooling is None and runs_ahead,
            verifies_drafts=model.pooling is None,
            pooling=model.pooling,
            num_ranks=self._num_ranks,
        )
