"""A sampler of torch devices, and the native one, beside a table and logits that are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lmi_core import _native
from lmi_core.ops.device.sampling_inputs import SamplingInputs, SamplingResults
from lmi_core.ops.kernels import select
from tests.kernels.sampling_case import NEUTRAL

Logits = npt.NDArray[np.float32]
MAX_LOGPROBS = 8


class Sampler:
    """A table, and a step of one-token sequences whose logits are given."""

    implementation = "torch", "cpu"
    is_emulated = False

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.table = _native.SamplingTable(num_rows, vocab_size)
        self.tables = _native.BlockTables(num_rows, 4)
        self.step = _native.Step(
            max_tokens=num_rows,
            max_seqs=num_rows,
            max_logit_rows=num_rows,
            max_logprobs=MAX_LOGPROBS,
            max_copies=1,
            block_size=16,
            block_tables=self.tables,
            sampling=self.table,
        )
        for row in range(num_rows):
            self.tables.set(row, [0, 1, 2, 3])
            self.set(row)

    def set(self, row: int, **settings: Any) -> None:
        given = settings.pop("logit_bias", [])
        biases = _native.LogitBiases([i for i, _ in given], [bias for _, bias in given])
        self.table.set(row, biases=biases, **{**NEUTRAL, **settings})

    def add(self, table_row: int, sampling_row: int, target_id: int = -1) -> None:
        row = self.step.add([0], table_row % 64, table_row, sampling_row, "last")
        if target_id >= 0:
            self.step.set_target(row, target_id)

    def run(self, logits: Logits) -> SamplingResults:
        inputs = SamplingInputs.of(self.step, self.table, MAX_LOGPROBS)
        name, device = self.implementation
        sample = select.function("sample", name)
        result: SamplingResults = sample(torch.from_numpy(logits).to(device), inputs).wait()
        return result


def sample_rows(
    logits: Logits, rows: list[dict[str, Any]], masks: dict[int, Any] | None = None
) -> SamplingResults:
    sampler = Sampler(len(rows), logits.shape[1])
    for row, settings in enumerate(rows):
        sampler.set(row, **settings)
        sampler.add(row, row)
    for row, mask in (masks or {}).items():
        sampler.step.add_mask(row)[:] = mask
    sampler.step.set_masks_ready()
    return sampler.run(logits)


def native_rows(
    logits: Logits, rows: list[dict[str, Any]], masks: dict[int, Any] | None = None
) -> dict[str, Any]:
    count = len(rows)
    result: dict[str, Any] = _native.paged_kernels.Runner("scalar").sample(
        logits,
        _native.paged_kernels.SamplingRows(rows, logits.shape[1]),
        sampling_rows=np.arange(count),
        positions=np.arange(count) % 64 + 1,
        target_ids=np.full(count, -1),
        max_logprobs=MAX_LOGPROBS,
        masks=masks or {},
    )
    return result
