"""The step buffer: what filling it writes, and what it refuses."""

import pytest

from lmi_core import _native
from tests.kernels.sampling_case import NEUTRAL

BLOCK = 16
PENALISED = {**NEUTRAL, "presence_penalty": 0.5}


@pytest.fixture
def tables():
    tables = _native.BlockTables(4, 8)
    tables.set(0, [5, 2, 7])
    tables.set(1, [1])
    return tables


@pytest.fixture
def step(tables):
    return make_step(tables)


def make_step(tables, sampling=None, **sizes):
    defaults = {
        "max_tokens": 64,
        "max_seqs": 4,
        "max_logit_rows": 8,
        "max_logprobs": 3,
        "max_copies": 2,
        "block_size": BLOCK,
    }
    return _native.Step(
        **{**defaults, **sizes},
        block_tables=tables,
        sampling=_native.SamplingTable(4, 100) if sampling is None else sampling,
    )


def test_a_prefill_chunk_and_a_decode_row_share_a_step(step):
    assert step.add([10, 11, 12], 15, 0, -1, "none") == -1
    assert step.add([13], 3, 1, 2, "last") == 0
    assert step.view("token_ids").tolist() == [10, 11, 12, 13]
    assert step.view("positions").tolist() == [15, 16, 17, 3]
    # position 15 is the end of block 5, 16 and 17 the start of block 2
    assert step.view("slots").tolist() == [5 * BLOCK + 15, 2 * BLOCK, 2 * BLOCK + 1, BLOCK + 3]
    assert step.view("first_rows").tolist() == [0, 3]
    assert step.view("num_rows").tolist() == [3, 1]
    assert step.view("kv_lengths").tolist() == [18, 4]
    assert step.view("table_rows").tolist() == [0, 1]
    assert step.view("logit_token_rows").tolist() == [3]
    assert step.view("sampling_rows").tolist() == [2]
    assert step.view("sample_positions").tolist() == [4]


def test_rows_of_tokens_to_come_are_those_of_one_call_each(tables, step):
    alone = make_step(tables)
    for each in (step, alone):
        each.add([10, 11], 0, 0, 1, "last")
    rows = [
        alone.add([0], start, row, row, "last", slot)
        for start, row, slot in [(40, 0, 3), (6, 1, -1)]
    ]
    assert step.add_following([40, 6], [0, 1], [3, -1]) == rows[0]
    assert rows == [1, 2]
    for name in (
        "token_ids",
        "positions",
        "slots",
        "kv_lengths",
        "table_rows",
        "sampling_rows",
        "sample_positions",
        "adapter_slots",
        "adapter_first_rows",
    ):
        assert step.view(name).tolist() == alone.view(name).tolist()
    with pytest.raises(_native.NativeError, match="2 starts, 1 rows, 2 adapters"):
        step.add_following([1, 2], [0], [-1, -1])
    with pytest.raises(_native.NativeError, match="need more blocks than the 1 of table row 1"):
        step.add_following([BLOCK], [1], [-1])


def test_all_logits_target_the_next_token_and_sample_the_last(step):
    assert step.add([10, 11, 12], 0, 0, 3, "all") == 0
    assert step.view("logit_token_rows").tolist() == [0, 1, 2]
    assert step.view("target_ids").tolist() == [11, 12, -1]
    assert step.view("sampling_rows").tolist() == [3, 3, 3]
    step.set_target(2, 42)
    assert step.view("target_ids").tolist() == [11, 12, 42]


def test_the_end_of_a_text_may_be_drafts(step):
    step.add([10, 11, 12], 4, 0, 3, "last", num_drafts=2)
    assert step.view("num_drafts").tolist() == [2]
    assert step.view("sample_positions").tolist() == [7]
    with pytest.raises(_native.NativeError, match="4 drafts of 3 tokens"):
        step.add([10, 11, 12], 7, 0, 3, "last", num_drafts=4)


def test_tokens_are_taken_from_rows_that_there_are(tables, step):
    source = make_step(tables)
    source.add([7], 0, 1, 0, "last")
    step.add([0, 0], 0, 0, 0, "last")
    step.take_token(1, source, 0)
    for arguments, message in [
        ((2, source, 0), "token row 2 of 2"),
        ((0, source, 1), "logit row 1 of 1"),
        ((0, step, 0), "can't follow itself"),
    ]:
        with pytest.raises(_native.NativeError, match=message):
            step.take_token(*arguments)


def test_what_is_taken_is_counted(tables):
    sampling = _native.SamplingTable(4, 100)
    for row in (1, 2):
        sampling.set(row, **PENALISED)
    source, step = make_step(tables, sampling), make_step(tables, sampling)
    source.add([7], 0, 1, 1, "last")
    source.set_result(0, 42, 0.0, [])
    step.add([3], 0, 1, 2, "last")
    row = step.add_following([0], [1], [-1])
    step.count_token(row)
    assert step.counted_rows == [row]
    step.take_tokens()
    assert not len(sampling.gather([1, 2])["seen"][0]), "the token isn't known yet"
    step.follow(source, [-1, 0])
    step.take_tokens()
    rows, ids, _ = sampling.gather([1, 2])["seen"]
    assert (rows.tolist(), ids.tolist()) == ([0], [42])
    with pytest.raises(_native.NativeError, match="logit row 2"):
        step.count_token(2)
    step.clear()
    assert step.counted_rows == []


def test_clear_empties_everything(step):
    step.add([1, 2], 0, 0, 0, "all")
    step.add_copy(1, 2)
    step.error = "broken"
    step.clear()
    assert (step.num_tokens, step.num_seqs, step.num_logit_rows) == (0, 0, 0)
    assert step.view("copy_src").size == 0
    assert step.error == ""


def test_results_come_back_by_logit_row(step):
    step.add([1], 0, 0, 0, "last")
    step.add([1], 0, 1, 1, "last")
    step.set_result(1, 7, -0.5, [(7, -0.5), (3, -1.5), (4, -2.0), (9, -9.0)])
    assert step.sampled() == [-1, 7]
    assert step.logprobs() == [0.0, -0.5]
    assert step.top(1) == [(7, -0.5), (3, -1.5), (4, -2.0)]  # no more than max_logprobs
    assert step.top(0) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 0, 0, 0, "last"), "at least one token"),
        (([1], 16, 1, 0, "last"), "need more blocks than the 1 of table row 1"),
        (([1], 0, 9, 0, "last"), "block table row 9"),
        (([1], 0, 0, 4, "last"), "sampling row 4"),
        (([1], -1, 0, 0, "last"), "tokens -1"),
        (([100], 0, 0, 0, "last"), "token id 100 of 100"),
        (([-1], 0, 0, 0, "last"), "token id -1"),
        (([1] * 9, 0, 0, 0, "all"), "logit rows"),
        (([1] * 65, 0, 0, 0, "none"), "64 tokens"),
        (([1], 0, 0, 0, "some"), "known are none, first, last, all, drafts"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(step, arguments, message):
    with pytest.raises(_native.NativeError, match=message):
        step.add(*arguments)


def test_the_number_of_sequences_and_copies_is_bounded(tables):
    step = make_step(tables, max_seqs=1, max_copies=1)
    step.add([1], 0, 0, 0, "last")
    with pytest.raises(_native.NativeError, match="1 sequences"):
        step.add([1], 0, 1, 0, "last")
    step.add_copy(0, 1)
    with pytest.raises(_native.NativeError, match="1 block copies"):
        step.add_copy(1, 2)


def test_masks_are_filled_after_the_step_and_cleared_with_it(step):
    step.add([1], 0, 0, 0, "last")
    step.add([2], 0, 1, 1, "last")
    mask = step.add_mask(1)
    assert mask.shape == (4,)  # 100 ids
    assert not mask.any()
    mask[:] = [1, 2, 3, 4]
    step.set_mask_ready(1)
    rows, masks = step.wait_for_masks()
    assert rows.tolist() == [1]
    assert masks.tolist() == [[1, 2, 3, 4]]
    step.clear()
    assert step.wait_for_masks()[0].size == 0
    step.add([1], 0, 0, 0, "last")
    step.add([2], 0, 1, 1, "last")
    assert not step.add_mask(1).any()
    with pytest.raises(_native.NativeError, match="logit row 2"):
        step.add_mask(2)
