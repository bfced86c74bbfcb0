"""Handles, and the torch reference's own bookkeeping."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from lmi_core import _native, ops
from lmi_core.models.loader import LoadedModel
from lmi_core.ops.device.step_arrays import StepArrays
from tests.checkpoints import cached_checkpoint
from tests.loading import load_model
from tests.models.forward import (
    BLOCK_SIZE,
    MAX_SEQS,
    MAX_TOKENS,
    Rows,
    TorchForward,
    shuffled_block_table,
    step_arrays,
)

torch_reference = pytest.importorskip("tests.ops.torch_reference", exc_type=ImportError)
torch_store = pytest.importorskip("tests.ops.torch_store", exc_type=ImportError)

PROMPT = [5, 100, 7, 300, 42]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(cached_checkpoint("llama2"), packer=torch_store.TorchWeights())


def test_a_handle_has_no_truth_value() -> None:
    graph = ops.Graph("fp32")
    x = ops.embed(graph, np.zeros((4, 8), np.float32))
    assert (x.columns, x.rows, x.dtype) == (8, "T", "fp32")
    with pytest.raises(TypeError, match="don't branch on it"):
        bool(x)


def test_shapes_are_checked_while_recording() -> None:
    graph = ops.Graph("fp32")
    x = ops.embed(graph, np.zeros((4, 8), np.float32))
    with pytest.raises(ValueError, match=r"rms_norm of 8 columns got a weight of shape \(9,\)"):
        ops.rms_norm(x, np.ones(9, np.float32), 1e-6)
    weight = torch_store.TorchWeights().pack(
        [np.zeros((6, 8), np.float32)], format="fp32", gated=False
    )
    with pytest.raises(ValueError, match=r"linear to 6 outputs got a bias of \(5,\)"):
        ops.linear(x, weight, bias=np.zeros(5, np.float32))
    h = ops.linear(x, weight)
    with pytest.raises(ValueError, match="linear over 8 inputs got linear1, 6 wide"):
        ops.linear(h, weight)


def test_a_native_step_reads_as_the_same_arrays() -> None:
    table = shuffled_block_table(128)
    tables = _native.BlockTables(MAX_SEQS, table.shape[1])
    for row, block_ids in enumerate(table.tolist()):
        tables.set(row, block_ids)
    step = _native.Step(
        max_tokens=MAX_TOKENS,
        max_seqs=MAX_SEQS,
        max_logit_rows=MAX_TOKENS,
        max_logprobs=0,
        max_copies=2,
        block_size=BLOCK_SIZE,
        block_tables=tables,
        sampling=_native.SamplingTable(MAX_SEQS, 384),
    )
    batch = [Rows(3, list(range(40)), 0), Rows(1, [7], 90), Rows(0, [8, 9], 15)]
    for rows in batch:
        step.add(rows.token_ids, rows.start, rows.seq_id, -1, "all")
    step.add_copy(2, 9)
    native, plain = StepArrays.of(step, tables), step_arrays(batch, table)
    assert (native.copy_src.tolist(), native.copy_dst.tolist()) == ([2], [9])
    np.testing.assert_array_equal(native.block_tables, table[[3, 1, 0]])
    assert native.table_rows.tolist() == [0, 1, 2]
    assert native.token_types.tolist() == [0] * 43
    for name in {field.name for field in fields(StepArrays)} - {
        "copy_src", "copy_dst", "block_tables", "table_rows", "token_types"
    }:  # fmt: skip
        np.testing.assert_array_equal(getattr(native, name), getattr(plain, name), err_msg=name)


def test_reading_what_was_never_written_shows(model: LoadedModel) -> None:
    forward = TorchForward(model, 64, "fp32")
    assert np.isnan(forward.step([Rows(0, PROMPT, 3)])).all()


def test_copied_blocks_continue_alike(model: LoadedModel) -> None:
    """A sequence whose block is a copy gets the logits of the original."""
    forward = TorchForward(model, 64, "fp32")
    forward.step([Rows(0, PROMPT, 0)])
    original = forward.step([Rows(0, [9], len(PROMPT))])
    step = step_arrays([Rows(1, [9], len(PROMPT))], forward.table)
    copies = {
        "copy_src": forward.table[0, :1].astype(np.int32),
        "copy_dst": forward.table[1, :1].astype(np.int32),
    }
    np.testing.assert_array_equal(forward.graph.run(replace(step, **copies)).logits, original)


def test_sampling_is_greedy_and_targets_are_scored(model: LoadedModel) -> None:
    forward = TorchForward(model, 64, "fp64")
    step = step_arrays([Rows(0, PROMPT, 0)], forward.table)
    wanted = {
        "sampling_rows": np.array([-1, -1, -1, 2, -1], np.int32),
        "target_ids": np.array([PROMPT[1], -1, PROMPT[3], -1, -1], np.int32),
    }
    result = forward.graph.run(replace(step, **wanted))
    expected = torch_reference.torch.tensor(result.logits).log_softmax(-1).numpy()
    best = int(result.logits[3].argmax())
    assert result.sampled_ids.tolist() == [-1, -1, -1, best, -1]
    np.testing.assert_allclose(
        result.logprobs[[0, 2, 3]],
        [expected[0, PROMPT[1]], expected[2, PROMPT[3]], expected[3, best]],
    )


def test_a_graph_without_sampling_has_no_result() -> None:
    graph = ops.Graph("fp32")
    ops.embed(graph, np.zeros((384, 8), np.float32))
    with pytest.raises(ValueError, match="no sample op"):
        torch_reference.TorchGraph(graph).run(
            step_arrays([Rows(0, PROMPT, 0)], shuffled_block_table(64))
        )


def test_recording_leaves_the_weights_alone(model: LoadedModel) -> None:
    """Two graphs of one model give the same logits."""
    logits = []
    for _ in range(2):
        forward = TorchForward(model, 64, "fp32")
        logits.append(forward.step([Rows(0, PROMPT, 0)]))
    np.testing.assert_array_equal(*logits)
