"""The runner of a model that Transformers computes: our engine's steps as padded batches."""

from __future__ import annotations

import os
import queue
import threading
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lmi_core import _native
from lmi_core.ops.device.sampling_inputs import SamplingInputs
from lmi_core.ops.kernels.torch_ops.sampling import sample
from lmi_core.runners.runner import RunnerInfo
from lmi_core.runners.step_memory import StepMemory, StepSizes, size_kv_cache
from lmi_core.runners.transformers.causal_model import CausalModel
from lmi_core.runners.transformers.encoder_decoder import (
    EncoderDecoderCaches,
    EncoderDecoderModel,
)
from lmi_core.runners.transformers.load_causal_model import load_causal_model
from lmi_core.runners.transformers.padded_caches import Chunk, PaddedCaches, SingleCaches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmi_core.settings.transformers_config import TransformersConfig

_BATCHED_TOKENS = 4096


class _Submitted(NamedTuple):
    step: _native.Step
    chunks: list[Chunk]
    dropped: list[int]
    adapter_names: dict[int, str]
    submitted_ns: int


class TransformersRunner:
    """Implements ``Runner`` from a thread of its own.

    Blocks are only counted: they bound the tokens that are held, while the caches are the model's
    own, one per row of the block tables. So nothing is shared between sequences.
    """

    def __init__(self, config: TransformersConfig, model: CausalModel) -> None:
        max_model_len = model.max_model_len(config.max_model_len)
        sizes = StepSizes.of(
            config,
            vocab_size=model.vocab_size,
            max_positions=max_model_len,
            max_num_tokens=max(_BATCHED_TOKENS, config.max_num_seqs),
        )
        self._model = model
        self.adapters = model.adapters
        self._caches = _caches(model, config)
        token_bytes = _warm_up(model)
        memory = size_kv_cache(
            config,
            block_bytes=token_bytes * config.block_size,
            max_model_len=max_model_len,
            spare=_spare_memory(model.device, config.gpu_memory_utilization),
        )
        shared = StepMemory.of(config, sizes, memory.num_blocks)
        self.pool, self.block_tables = shared.pool, shared.block_tables
        self.sampling, self.steps = shared.sampling, shared.steps
        self.info = RunnerInfo(
            vocab_size=sizes.vocab_size,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_tokens,
            max_logit_rows=sizes.max_logit_rows,
            max_logprobs=sizes.max_logprobs,
            num_blocks=memory.num_blocks,
            block_size=config.block_size,
            weight_bytes=model.num_bytes,
            kv_cache_bytes=memory.num_bytes,
            num_threads=config.num_threads or torch.get_num_threads(),
            dtype=model.dtype,
            quantize=model.quantize,
            kv_dtype=model.dtype,
            device=str(model.device),
            kernels="Transformers",
            shares_blocks=False,
            has_adapters=model.adapters is not None,
            continues_prompts=not isinstance(model, EncoderDecoderModel),
            first_ids=tuple(model.first_ids) if isinstance(model, EncoderDecoderModel) else (),
            forced_end_ids=model.forced_end_ids,
            pads_batches=True,
        )
        self.final_lengths = [0] * config.max_num_seqs
        self.begin_ids: list[int | None] = [None] * config.max_num_seqs
        self._num_threads = config.num_threads
        self._held: set[int] = set()
        """Rows that the caches know, as the loop's thread sees it."""
        self.completion_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._queue: queue.SimpleQueue[_Submitted | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = threading.Thread(
            target=self._main, name="lmi-transformers-worker", daemon=True
        )
        self._thread.start()

    @property
    def groups(self) -> list[list[int]]:
        """The rows of each padded batch of the last step."""
        return self._caches.groups

    def submit(self, step: _native.Step) -> None:
        assert self._thread is not None, "submit after close"
        chunks = _chunks(step, self.final_lengths, self.begin_ids)
        ended = {row for row in self._held if not self.block_tables.row(row)}
        begun = {chunk.row for chunk in chunks if chunk.start == 0}
        self._held = (self._held - ended) | begun
        names = {} if self.adapters is None else self.adapters.names_of(step)
        dropped = sorted(ended | begun)
        self._queue.put(_Submitted(step, chunks, dropped, names, time.monotonic_ns()))

    def close(self) -> None:
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join()
        self._thread = None
        os.close(self.completion_fd)
        device = self._model.device
        del self._model, self._caches, self.adapters
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def _main(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        while (submitted := self._queue.get()) is not None:
            step = submitted.step
            started_ns = time.monotonic_ns()
            try:
                with nullcontext() if self.adapters is None else self.adapters.lock:
                    self._execute(submitted)
            except Exception as error:
                step.error = f"{type(error).__name__}: {error}"
            step.set_times(
                submitted_ns=submitted.submitted_ns,
                started_ns=started_ns,
                finished_ns=time.monotonic_ns(),
            )
            os.eventfd_write(self.completion_fd, 1)

    @torch.inference_mode()
    def _execute(self, submitted: _Submitted) -> None:
        step = submitted.step
        for row in submitted.dropped:
            self._caches.drop(row)
        if self.adapters is not None:
            self.adapters.remove_unused()
        self._model.adapter_names = submitted.adapter_names
        logits = self._caches.run(submitted.chunks)
        inputs = SamplingInputs.of(step, self.sampling, self.info.max_logprobs)
        if not len(inputs.is_sampled):
            return
        rows = torch.cat([logits[chunk.row] for chunk in submitted.chunks])
        sample(rows[:, : self.info.vocab_size].float(), inputs).wait().write(step)


def load_transformers_runner(
    config: TransformersConfig, progress: Callable[[str, int, int], None] | None = None
) -> tuple[TransformersRunner, CausalModel]:
    """Load the model and build its runner.

    Raises ModelError for files that can't be served, UserError for a device that isn't there or
    sizes that don't fit, MissingExtraError without the library.
    """
    model = load_causal_model(config)
    if progress is not None:
        progress("weights", model.num_bytes, model.num_bytes)
    return TransformersRunner(config, model), model


def _chunks(
    step: _native.Step, final_lengths: Sequence[int], begin_ids: Sequence[int | None]
) -> list[Chunk]:
    """What a step computes, sequence by sequence; the logits wanted are always its last ones."""
    token_ids = step.view("token_ids").tolist()
    starts = step.view("positions")
    first_rows = step.view("first_rows").astype(np.int64)
    ends = first_rows + step.view("num_rows").astype(np.int64)
    logit_rows = step.view("logit_token_rows")
    num_logits = np.searchsorted(logit_rows, ends) - np.searchsorted(logit_rows, first_rows)
    return [
        Chunk(
            int(row),
            token_ids[first:end],
            int(starts[first]),
            int(count),
            final_lengths[row],
            begin_ids[row],
        )
        for row, first, end, count in zip(
            step.view("table_rows"), first_rows, ends, num_logits, strict=True
        )
    ]


def _caches(model: CausalModel, config: TransformersConfig) -> PaddedCaches | SingleCaches:
    if isinstance(model, EncoderDecoderModel):
        return EncoderDecoderCaches(model, config.max_sparsity, config.max_splits)
    if model.is_mergeable:
        return PaddedCaches(model, config.max_sparsity, config.max_splits)
    return SingleCaches(model)


@torch.inference_mode()
def _warm_up(model: CausalModel) -> int:
    """Run one token, and return the bytes that the cache holds for it."""
    return max(1, model.token_bytes())


def _spare_memory(device: torch.device, usable_share: float) -> tuple[int, str] | None:
    """GPU memory for caches: half of what is usable after the weights, as they are copied when
    batches are regrouped."""
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    usable = max(0, free_bytes - round(total_bytes * (1 - usable_share)))
    return usable // 2, f"half of the {usable / 2**30:.1f} GiB usable on the GPU after the weights"
