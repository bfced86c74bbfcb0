"""Greedy rows whose token the output head finds, against the same step with its logits kept."""

import numpy as np
import pytest

from lmi_core import _native
from tests.kernels.sampling_case import NEUTRAL

LEVELS = _native.instruction_sets()
HIDDEN, MAX_ROWS = 40, 120
GREEDY = NEUTRAL | {"seed": 7, "num_logprobs": -1}
OTHERS = [
    GREEDY,
    GREEDY | {"num_logprobs": 2},
    GREEDY | {"temperature": 1.0},
    GREEDY,
    GREEDY | {"biases": _native.LogitBiases([3], [9.0])},
    GREEDY | {"banned_ids": [1, 2, 5]},
    GREEDY | {"min_tokens": 4, "min_tokens_banned_ids": [0]},
    GREEDY | {"temperature": 0.7, "top_k": 5},
]


class Head:
    """Embedding, norm and output head; only where logits are kept does sample see those of
    greedy rows."""

    def __init__(self, table, head, dtype, level, *, keeps_logits):
        self.vocab = len(head)
        self.tables = _native.BlockTables(MAX_ROWS, 1)
        for row in range(MAX_ROWS):
            self.tables.set(row, [row])
        self.sampling = _native.SamplingTable(MAX_ROWS, self.vocab)
        limits = {"max_tokens": MAX_ROWS, "max_seqs": MAX_ROWS, "max_logit_rows": MAX_ROWS}
        self.graph = _native.Graph(
            **limits,
            max_blocks_per_seq=1,
            block_size=16,
            act_dtype="fp32" if dtype == "fp32" else "bf16",
            instruction_set=level,
        )
        self.step = _native.Step(
            **limits,
            max_logprobs=2,
            max_copies=1,
            block_size=16,
            block_tables=self.tables,
            sampling=self.sampling,
        )
        rows = self.graph.gather_logit_rows(self.graph.embed(table))
        normed = self.graph.rms_norm(rows, np.ones(table.shape[1], np.float32), 1e-5)
        logits = self.graph.linear(normed, _native.LinearWeight.pack((head,), format=dtype))
        self.graph.sample(logits)
        if keeps_logits:
            self.graph.output(logits)
        self.graph.finish()

    def run(self, worker, settings, *, target=None, mask=None):
        self.step.clear()
        for row, each in enumerate(settings):
            self.sampling.set(row, **each)
            self.step.add([row % self.vocab], 0, row, row, "last")
        if target is not None:
            self.step.set_target(*target)
        if mask is not None:
            row, token_id = mask
            self.step.add_mask(row)[token_id // 32] = 1 << token_id % 32
            self.step.set_mask_ready(row)
        worker.run(self.graph, self.step)
        return self.step.sampled(), self.step.logprobs()


@pytest.fixture(params=[1, 2])
def worker(request):
    worker = _native.Worker(request.param)
    yield worker
    worker.close()


def heads(dtype, level, vocab, hidden=HIDDEN, fault=None):
    rng = np.random.default_rng(vocab)
    table = rng.normal(size=(MAX_ROWS, hidden)).astype(np.float32)
    if fault is not None:
        table[5, 3] = fault
    head = rng.normal(size=(vocab, hidden)).astype(np.float32)
    head[vocab // 2] = head[vocab // 3]  # ties go to the lower id
    return [Head(table, head, dtype, level, keeps_logits=keeps) for keeps in (False, True)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("vocab", [5, 64, 333, 2048 + 16])
def test_greedy_tokens_are_those_of_the_logits(worker, level, dtype, vocab):
    fused, kept = heads(dtype, level, vocab)
    for num_rows in (1, 6, 13, MAX_ROWS):
        settings = [GREEDY] * num_rows
        assert fused.run(worker, settings) == kept.run(worker, settings)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_other_rows_of_the_step_get_their_logits(worker, level, dtype):
    fused, kept = heads(dtype, level, vocab=500)
    settings = OTHERS * 5
    for extra in ({}, {"target": (3, 17)}, {"mask": (8, 400)}):
        result = fused.run(worker, settings, **extra)
        assert result == kept.run(worker, settings, **extra)
        assert result[0][11] not in (1, 2, 5)
    assert result[0][8] == 400  # what the mask left


@pytest.mark.parametrize("level", LEVELS)
def test_longer_rows_than_a_block_of_inputs(worker, level):
    fused, kept = heads("bf16", level, vocab=100, hidden=1700)
    settings = OTHERS * 3
    assert fused.run(worker, settings) == kept.run(worker, settings)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_a_row_at_fault_samples_nothing(worker, level, fault):
    fused, kept = heads("fp32", level, vocab=70, fault=fault)
    tokens, _ = fused.run(worker, [GREEDY] * 8)
    assert tokens == kept.run(worker, [GREEDY] * 8)[0]
    assert [row for row, token in enumerate(tokens) if token == -1] == [5]
