"""Recording and replaying step graphs on the worker."""

import os
import select

import numpy as np
import pytest

from lmi_core import _native

VOCAB, HIDDEN, BLOCK = 50, 32, 16


class Tiny:
    """Embedding, one gated MLP with residual, head: everything but attention."""

    def __init__(self, act_dtype="fp32", max_tokens=64, seed=0):
        rng = np.random.default_rng(seed)

        def normal(*shape):
            return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

        self.table = rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
        self.norm = (1 + 0.1 * rng.normal(size=HIDDEN)).astype(np.float32)
        self.gate, self.up = normal(48, HIDDEN), normal(48, HIDDEN)
        self.down, self.head = normal(HIDDEN, 48), normal(VOCAB, HIDDEN)
        self.tables = _native.BlockTables(4, 8)
        for row in range(4):
            self.tables.set(row, [2 * row, 2 * row + 1])
        self.sampling = _native.SamplingTable(4, VOCAB)
        self.graph = _native.Graph(
            max_tokens=max_tokens,
            max_seqs=4,
            max_logit_rows=8,
            max_blocks_per_seq=8,
            block_size=BLOCK,
            act_dtype=act_dtype,
        )
        self.step = _native.Step(
            max_tokens=max_tokens,
            max_seqs=4,
            max_logit_rows=8,
            max_logprobs=2,
            max_copies=1,
            block_size=BLOCK,
            block_tables=self.tables,
            sampling=self.sampling,
        )

        def pack(*parts, gated=False):
            return _native.LinearWeight.pack(parts, format=act_dtype, gated=gated)

        graph = self.graph
        self.hidden = graph.embed(self.table)
        normed = graph.rms_norm(self.hidden, self.norm, 1e-5)
        gated = graph.linear(normed, pack(self.gate, self.up, gated=True), activation="silu")
        self.hidden = graph.linear(gated, pack(self.down), residual=self.hidden)
        last = graph.rms_norm(graph.gather_logit_rows(self.hidden), self.norm, 1e-5)
        self.logits = graph.linear(last, pack(self.head))
        graph.sample(self.logits)
        graph.output(self.logits)
        graph.finish()

    def expected_logits(self, token_ids):
        def norm(x):
            return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * self.norm

        x = self.table[token_ids].astype(np.float64)
        gate, up = norm(x) @ self.gate.T, norm(x) @ self.up.T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ self.down.T
        return norm(x) @ self.head.T


def test_replay_computes_what_was_recorded(worker):
    tiny = Tiny()
    tiny.step.add([3, 1, 4], 0, 0, 0, "last")
    tiny.step.add([7], 5, 1, 1, "last")
    worker.run(tiny.graph, tiny.step)
    logits = tiny.graph.read(tiny.logits, 2)
    expected = tiny.expected_logits([4, 7])
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    assert tiny.step.sampled() == expected.argmax(-1).tolist()
    logprobs = expected.max(-1) - np.log(np.exp(expected).sum(-1))
    np.testing.assert_allclose(tiny.step.logprobs(), logprobs, atol=2e-5)
    assert tiny.step.native_ns > 0


def test_sampling_waits_for_masks_and_for_nothing_else(worker):
    tiny = Tiny()
    tiny.step.add([3, 1, 4], 0, 0, 0, "last")
    tiny.step.add([7], 5, 1, 1, "last")
    mask = tiny.step.add_mask(0)
    done = os.eventfd(0)
    worker.submit(tiny.graph, tiny.step, done)
    assert not select.select([done], [], [], 0.05)[0]
    best = tiny.expected_logits([4, 7]).argsort(-1)
    second = int(best[0, -2])
    mask[second // 32] = 1 << second % 32
    tiny.step.set_mask_ready(0)
    assert select.select([done], [], [], 10)[0]
    os.close(done)
    assert tiny.step.sampled() == [second, int(best[1, -1])]


def test_a_step_takes_its_tokens_from_the_one_before(worker):
    tiny, other = Tiny(), Tiny()
    tiny.step.add([3, 1, 4], 0, 0, 0, "last")
    tiny.step.add([7], 5, 1, 1, "last")
    following = other.step
    following.add([0], 6, 1, 1, "last")
    following.add([0], 3, 0, 0, "last")
    following.follow(tiny.step, [1, 0])
    done = os.eventfd(0)
    worker.submit(tiny.graph, tiny.step, done)
    worker.submit(other.graph, following, done)
    worker.drain()
    os.close(done)
    first = tiny.expected_logits([4, 7]).argmax(-1)
    assert tiny.step.sampled() == first.tolist()
    assert following.sampled() == tiny.expected_logits(first[::-1]).argmax(-1).tolist()


def test_a_step_follows_rows_that_are_there(worker):
    tiny, other = Tiny(), Tiny()
    tiny.step.add([3], 0, 0, 0, "last")
    other.step.add([0], 1, 0, 0, "last")
    with pytest.raises(_native.NativeError, match="2 logit rows for 1 tokens"):
        other.step.follow(tiny.step, [0, 0])
    with pytest.raises(_native.NativeError, match="logit row 1 of 1"):
        other.step.follow(tiny.step, [1])
    with pytest.raises(_native.NativeError, match="follow itself"):
        other.step.follow(other.step, [0])


def test_one_recording_serves_every_batch(worker):
    tiny = Tiny()
    for token_ids in ([1], list(range(40)), [5, 6], [9] * 64):
        tiny.step.clear()
        tiny.tables.set(0, [0, 1, 2, 3])
        tiny.step.add(token_ids, 0, 0, 0, "last")
        worker.run(tiny.graph, tiny.step)
        logits = tiny.graph.read(tiny.logits, 1)
        np.testing.assert_allclose(logits, tiny.expected_logits(token_ids[-1:]), atol=2e-5)


def test_thread_count_does_not_change_a_bit():
    results = []
    for num_threads in (1, 2, 3, 11):
        worker = _native.Worker(num_threads)
        tiny = Tiny("bf16")
        tiny.tables.set(0, [0, 1, 2, 3])
        tiny.step.add(list(range(50)), 0, 0, 0, "last")
        worker.run(tiny.graph, tiny.step)
        results.append(tiny.graph.read(tiny.logits, 1).tobytes())
        worker.close()
    assert len(set(results)) == 1


def test_only_steps_of_the_wanted_size_are_measured(worker):
    tiny = Tiny()
    tiny.graph.measure_nodes(3)
    for num_tokens in (3, 5, 3):
        tiny.step.clear()
        tiny.step.add(list(range(num_tokens)), 0, 0, 0, "last")
        worker.run(tiny.graph, tiny.step)
    times = tiny.graph.node_times()
    assert len(times) == len(tiny.graph.describe())
    for num_steps, wall_ns, cpu_ns, num_chunks in times:
        assert num_steps == 2
        assert wall_ns > 0
        assert cpu_ns > 0
        assert num_chunks >= 2


def test_measured_steps_are_cut_as_for_so_many_threads():
    worker = _native.Worker(1)
    logits, chunks = set(), []
    for as_threads in (0, 8):
        tiny = Tiny("bf16")
        tiny.tables.set(0, [0, 1, 2, 3])
        tiny.graph.measure_nodes(50, as_threads)
        tiny.step.add(list(range(50)), 0, 0, 0, "last")
        worker.run(tiny.graph, tiny.step)
        logits.add(tiny.graph.read(tiny.logits, 1).tobytes())
        chunks.append(sum(node[3] for node in tiny.graph.node_times()))
    worker.close()
    assert len(logits) == 1
    assert chunks[1] > chunks[0]


def test_values_that_are_dead_share_memory():
    tiny = Tiny(max_tokens=1024)
    # alive at once at most: hidden (fp32), norm and gated output, plus logit rows
    assert tiny.graph.arena_bytes < 1024 * 4 * (HIDDEN + HIDDEN + 48) + 65536


def test_describe_names_every_node():
    ops = [line.split()[0] for line in Tiny().graph.describe()]
    assert ops == [
        "embed",
        "norm",
        "linear",
        "linear",
        "gather_rows",
        "norm",
        "linear",
        "sample",
    ]


def test_a_handle_has_no_truth_value():
    with pytest.raises(TypeError, match="no truth value"):
        bool(Tiny().hidden)


def test_recording_checks_operands():
    graph = Tiny().graph
    with pytest.raises(_native.NativeError, match="finished"):
        graph.embed(np.zeros((4, 4), np.float32))
    graph = _native.Graph(
        max_tokens=8,
        max_seqs=2,
        max_logit_rows=2,
        max_blocks_per_seq=2,
        block_size=16,
        act_dtype="fp32",
    )
    hidden = graph.embed(np.zeros((10, 32), np.float32))
    with pytest.raises(_native.NativeError, match="has 16 elements, not 32"):
        graph.rms_norm(hidden, np.ones(16, np.float32), 1e-5)
    weight = _native.LinearWeight.pack([np.zeros((4, 16), np.float32)], format="fp32")
    with pytest.raises(_native.NativeError, match="takes 16 columns"):
        graph.linear(hidden, weight)
    with pytest.raises(_native.NativeError, match="takes logit rows"):
        graph.sample(hidden)
    with pytest.raises(_native.NativeError, match="dtype float64"):
        graph.embed(np.zeros((10, 32)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("gated", [False, True])
def test_packing_keeps_every_weight(dtype, gated):
    rng = np.random.default_rng(3)
    parts = [rng.normal(size=(32, 33)).astype(np.float32) for _ in range(2)]
    weight = _native.LinearWeight.pack(parts, format=dtype, gated=gated, num_threads=2)
    assert (weight.num_outputs, weight.num_inputs, weight.format) == (64, 33, dtype)
    expected = np.concatenate(parts)
    if dtype == "bf16":
        np.testing.assert_allclose(weight.unpack(), expected, rtol=2**-8)
    else:
        np.testing.assert_array_equal(weight.unpack(), expected)


def test_rows_are_kept_by_slot_and_copied_with_their_blocks(worker):
    tiny, rng = Tiny(), np.random.default_rng(1)
    kept = rng.normal(size=(8 * BLOCK, HIDDEN)).astype(np.float32)
    before, columns = kept.copy(), np.array([1, 7, 40], np.int32)
    graph = _native.Graph(
        max_tokens=64,
        max_seqs=4,
        max_logit_rows=8,
        max_blocks_per_seq=8,
        block_size=BLOCK,
        act_dtype="fp32",
    )
    x = graph.embed(tiny.table)
    read = graph.kept_rows(kept)
    graph.output(read)
    graph.keep_rows(x, kept)
    last = graph.gather_logit_rows(x)
    graph.keep_rows(last, kept)
    narrow = _native.LinearWeight.pack([tiny.head[:3]], format="fp32", gated=False)
    spread = graph.spread_columns(graph.linear(last, narrow), columns, VOCAB)
    graph.output(spread)
    graph.sample(spread)
    graph.finish()
    tiny.step.add_copy(1, 3)
    tiny.step.add([5, 6, 8], BLOCK - 3, 0, 0, "last")  # the next position is the next block's
    tiny.step.add([9], 2, 3, 3, "none")
    worker.run(graph, tiny.step)
    slots = [BLOCK - 3, BLOCK - 2, BLOCK - 1, 6 * BLOCK + 2]
    np.testing.assert_array_equal(graph.read(read, 4), before[slots])
    expected = before.copy()
    expected[3 * BLOCK : 4 * BLOCK] = before[BLOCK : 2 * BLOCK]
    expected[slots] = tiny.table[[5, 6, 8, 9]]
    expected[BLOCK] = tiny.table[8]
    np.testing.assert_array_equal(kept, expected)
    logits = graph.read(spread, 1)[0]
    np.testing.assert_allclose(logits[columns], tiny.table[8] @ tiny.head[:3].T, atol=1e-5)
    assert (np.delete(logits, columns) < -1e29).all()
    assert tiny.step.sampled() == [columns[(tiny.table[8] @ tiny.head[:3].T).argmax()]]


@pytest.mark.parametrize("level", _native.instruction_sets())
def test_all_heads_of_a_row_are_normed_together(worker, level):
    tiny, rng, size = Tiny(), np.random.default_rng(2), 20
    table = rng.normal(size=(VOCAB, 5 * size)).astype(np.float32)
    weights = [(1 + 0.1 * rng.normal(size=n * size)).astype(np.float32) for n in (3, 1)]
    graph = _native.Graph(
        max_tokens=64,
        max_seqs=4,
        max_logit_rows=8,
        max_blocks_per_seq=8,
        block_size=BLOCK,
        act_dtype="fp32",
        instruction_set=level,
    )
    qkv = graph.norm_all_heads(graph.embed(table), *weights, 1e-5, head_dim=size)
    graph.output(qkv)
    graph.finish()
    token_ids = [3, 1, 4, 1, 5]
    tiny.step.add(token_ids, 0, 0, 0, "none")
    worker.run(graph, tiny.step)
    expected = table[token_ids]
    for first, weight in zip((0, 3 * size), weights, strict=True):
        columns = slice(first, first + len(weight))
        x = expected[:, columns].astype(np.float64)
        expected[:, columns] = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(graph.read(qkv, 5), expected, rtol=1e-5)
