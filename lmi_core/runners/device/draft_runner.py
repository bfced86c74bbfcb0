"""What drafts on a torch device: chains of steps that the launcher of the model's computes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.device.eager import EagerGraph
from lmi_core.ops.device.kept_nodes import UNLIKELY
from lmi_core.ops.device.sampling_inputs import SamplingInputs
from lmi_core.ops.device.step_arrays import StepArrays
from lmi_core.runners.draft_steps import DraftSteps, draft_rows, most_drafts
from lmi_core.runners.step_memory import StepMemory, StepSizes

if TYPE_CHECKING:
    from lmi_core import _native
    from lmi_core.runners.device.drafting import Drafting
    from lmi_core.weights.formats import FloatArray


class _DraftStep(NamedTuple):
    step: _native.Step
    arrays: StepArrays
    fd: int
    submitted_ns: int


class SubmittedChain(NamedTuple):
    """A submitted chain."""

    steps: list[_DraftStep]


class TorchDraftRunner(DraftSteps):
    """Implements ``DraftRunner``, of Medusa heads ``HeadRunner``, beside a ``TorchRunner``. Each
    step waits on the host for the tokens of the one before: what a step samples by hangs on them.
    """

    def __init__(
        self,
        drafting: Drafting,
        graphs: list[EagerGraph],
        sizes: StepSizes,
        shared: StepMemory,
        put: Callable[[SubmittedChain], None],
    ) -> None:
        """``sizes``, ``shared``: of the steps of the model that it drafts for; ``put``: hands a
        chain to the thread that ``run``s it."""
        config, spec = drafting.config, drafting.model.spec
        rows, depth = draft_rows(config), most_drafts(config)
        self.num_heads = drafting.num_heads
        self.states: FloatArray | None = None
        if self.num_heads:
            rows, depth = config.max_num_seqs, self.num_heads
        super().__init__(config, sizes, shared, max_num_tokens=rows, num_steps=depth)
        self._num_sampled_from = sizes.vocab_size
        self.shift = drafting.shift
        if not drafting.shift and not self.num_heads:
            self.vocab_size = spec.vocab_size
            self.max_model_len = min(spec.max_positions, sizes.max_model_len)
        self._graphs = graphs
        self._shared = shared
        self._put = put

    def submit(self, steps: Sequence[_native.Step]) -> None:
        # Copies, as of steps that aren't drafts'.
        now_ns, tables = time.monotonic_ns(), self._shared.block_tables
        fds = self._watched_fds(steps)
        self._put(
            SubmittedChain(
                [
                    _DraftStep(step, StepArrays.of(step, tables), fd, now_ns)
                    for step, fd in zip(steps, fds, strict=True)
                ]
            )
        )

    def run(self, chain: SubmittedChain) -> None:
        """Compute a chain, in the launcher's thread. A step that fails samples nothing."""
        for step_id, (step, arrays, fd, submitted_ns) in enumerate(chain.steps):
            started_ns = time.monotonic_ns()
            try:
                self._run_one(step, arrays, step_id)
            except Exception as error:
                step.error = f"{type(error).__name__}: {error}"
                for row in range(step.num_logit_rows):
                    step.set_result(row, -1, 0.0)
            step.set_times(
                submitted_ns=submitted_ns,
                started_ns=started_ns,
                finished_ns=time.monotonic_ns(),
            )
            if fd >= 0:
                os.eventfd_write(fd, 1)

    def _run_one(self, step: _native.Step, arrays: StepArrays, step_id: int) -> None:
        graph = self._graphs[step_id if self.num_heads else 0]
        device, block_size = graph.device, self._config.block_size
        if self.num_heads:
            # The state behind which the text's last token was sampled.
            rows = np.arange(len(arrays.positions), dtype=np.int32)
            arrays.slots[:] = arrays.slots_at(rows, arrays.positions - 1 - step_id, block_size)
        else:
            take_tokens(step, arrays)
        sampling = SamplingInputs.of(step, self._shared.sampling, 0)
        inputs = DeviceStep.upload(arrays, block_size=block_size, device=device)
        logits = self._fitted(graph.forward(inputs))
        graph.choose(logits, sampling).wait().write(step)

    def _fitted(self, logits: Tensor) -> Tensor:
        """Of the tokens that are sampled from: of one family, but for padding."""
        num_more = self._num_sampled_from - logits.shape[1]
        if num_more <= 0:
            return logits[:, : self._num_sampled_from]
        return torch.nn.functional.pad(logits, (0, num_more), value=UNLIKELY)


def take_tokens(step: _native.Step, arrays: StepArrays) -> None:
    """Put what a chain has sampled into a step behind it, and its ``arrays``."""
    step.take_tokens()
    arrays.token_ids[:] = step.view("token_ids")
