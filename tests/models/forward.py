"""Runs a recorded decoder on batches of sequences, with the torch reference or the native graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lmi_core.models.decoder import record
from lmi_core.models.loader import LoadedModel
from lmi_core.ops import Graph, LoraTable
from lmi_core.ops.device.step_arrays import StepArrays

BLOCK_SIZE = 16
MAX_TOKENS = 512
MAX_SEQS = 16
SEQUENCES = [list(range(5, 60)), [7, 300, 12, 9, 14] * 6, [3]]
"""Of some lengths, what ``logits_of`` runs."""


@dataclass(frozen=True)
class Rows:
    """Tokens of one sequence in a step, from position ``start`` on."""

    seq_id: int
    token_ids: list[int]
    start: int
    adapter: int = -1


class Forward(Protocol):
    def step(self, batch: Sequence[Rows]) -> npt.NDArray[Any]:
        """Logits of every token, in order: [tokens, vocab]."""
        ...


def shuffled_block_table(max_model_len: int) -> npt.NDArray[np.int32]:
    """Blocks for MAX_SEQS sequences, scattered over the pool."""
    num_columns = -(-max_model_len // BLOCK_SIZE)
    blocks = np.random.default_rng(1).permutation(MAX_SEQS * num_columns)
    return blocks.reshape(MAX_SEQS, num_columns).astype(np.int32)


class TorchForward:
    """The oracle: ``dtype`` fp32, bf16 or fp64."""

    def __init__(
        self,
        model: LoadedModel,
        max_model_len: int,
        dtype: str,
        kv_dtype: str | None = None,
        adapters: LoraTable | None = None,
    ) -> None:
        from tests.ops.torch_reference import TorchGraph
        from tests.ops.torch_store import TorchKvCache

        attention = model.spec.attention
        self.table = shuffled_block_table(max_model_len)
        cache = TorchKvCache(
            num_layers=model.spec.num_layers,
            num_blocks=self.table.size,
            block_size=BLOCK_SIZE,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            dtype=kv_dtype or dtype,
        )
        graph = Graph(dtype)  # type: ignore[arg-type]
        record(model, graph, cache, max_model_len, adapters)
        self.graph = TorchGraph(graph)

    def step(self, batch: Sequence[Rows]) -> npt.NDArray[Any]:
        return self.graph.run(step_arrays(batch, self.table)).logits


class EagerForward:
    """What a torch device runs, on the CPU: ``dtype`` fp32 or bf16."""

    def __init__(self, model: LoadedModel, max_model_len: int, dtype: str) -> None:
        import torch

        from lmi_core.ops.device.eager import EagerGraph
        from lmi_core.ops.device.paged_cache import PagedCache
        from lmi_core.ops.kernels.select import load, select

        attention = model.spec.attention
        self.table = shuffled_block_table(max_model_len)
        self.device = torch.device("cpu")
        cache = PagedCache(
            num_layers=model.spec.num_layers,
            num_blocks=self.table.size,
            block_size=BLOCK_SIZE,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            dtype=dtype,
            device=self.device,
            is_latent=attention.latent is not None,
        )
        graph = Graph(dtype)  # type: ignore[arg-type]
        record(model, graph, cache, max_model_len)
        self.graph = EagerGraph(graph, load(select("cpu", "torch")), self.device)

    def step(self, batch: Sequence[Rows]) -> npt.NDArray[Any]:
        from lmi_core.ops.device.device_step import DeviceStep

        arrays = step_arrays(batch, self.table)
        arrays = replace(arrays, block_tables=self.table[arrays.table_rows])
        step = DeviceStep.upload(arrays, block_size=BLOCK_SIZE, device=self.device)
        return self.graph.forward(step).numpy()


class NativeForward:
    """The native step graph: ``dtype`` fp32 or bf16."""

    def __init__(
        self,
        model: LoadedModel,
        max_model_len: int,
        dtype: str,
        num_threads: int = 2,
        kv_dtype: str | None = None,
        adapters: LoraTable | None = None,
    ) -> None:
        from lmi_core import _native
        from lmi_core.ops.cpu import lower

        attention, table = model.spec.attention, shuffled_block_table(max_model_len)
        self.cache = _native.KvCache(
            num_layers=model.spec.num_layers,
            num_blocks=table.size,
            block_size=BLOCK_SIZE,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            dtype=kv_dtype or dtype,
            is_latent=attention.latent is not None,
        )
        capacity = {"max_tokens": MAX_TOKENS, "max_seqs": MAX_SEQS, "max_logit_rows": MAX_TOKENS}
        self.graph = _native.Graph(
            **capacity,
            max_blocks_per_seq=table.shape[1],
            block_size=BLOCK_SIZE,
            act_dtype=dtype,
        )
        graph = Graph(dtype)  # type: ignore[arg-type]
        logits = record(model, graph, self.cache, max_model_len, adapters)
        self.logits = lower(graph, self.graph)[logits]
        self.graph.output(self.logits)
        self.graph.finish()
        tables = _native.BlockTables(MAX_SEQS, table.shape[1])
        for row, block_ids in enumerate(table.tolist()):
            tables.set(row, block_ids)
        self.buffer = _native.Step(
            **capacity,
            max_logprobs=0,
            max_copies=0,
            block_size=BLOCK_SIZE,
            block_tables=tables,
            sampling=_native.SamplingTable(MAX_SEQS, model.spec.vocab_size),
        )
        self.worker = _native.Worker(num_threads)

    def step(self, batch: Sequence[Rows]) -> npt.NDArray[Any]:
        self.buffer.clear()
        for rows in batch:
            self.buffer.add(rows.token_ids, rows.start, rows.seq_id, -1, "all", rows.adapter)
        self.worker.run(self.graph, self.buffer)
        assert self.buffer.error == ""
        return np.array(self.graph.read(self.logits, self.buffer.num_logit_rows))


def step_arrays(batch: Sequence[Rows], table: npt.NDArray[np.int32]) -> StepArrays:
    """A step that wants the logits of every token, as ``Step.add`` with "all" makes it."""
    counts = [len(rows.token_ids) for rows in batch]
    positions = [rows.start + i for rows in batch for i in range(len(rows.token_ids))]
    seq_of_row = np.repeat([rows.seq_id for rows in batch], counts)
    blocks = table[seq_of_row, np.array(positions) // BLOCK_SIZE]
    num_tokens = len(positions)
    adapted = [i for i, rows in enumerate(batch) if rows.adapter >= 0]
    first_rows = np.cumsum([0, *counts[:-1]])
    following = [token_id for rows in batch for token_id in (*rows.token_ids[1:], -1)]
    arrays = {
        "token_ids": [token_id for rows in batch for token_id in rows.token_ids],
        "positions": positions,
        "slots": blocks * BLOCK_SIZE + np.array(positions) % BLOCK_SIZE,
        "first_rows": first_rows,
        "num_rows": counts,
        "kv_lengths": [rows.start + len(rows.token_ids) for rows in batch],
        "table_rows": [rows.seq_id for rows in batch],
        "block_tables": table,
        "logit_token_rows": np.arange(num_tokens),
        "sampling_rows": np.full(num_tokens, -1),
        "target_ids": following,
        "copy_src": [],
        "copy_dst": [],
        "adapter_first_rows": first_rows[adapted],
        "adapter_num_rows": [counts[i] for i in adapted],
        "adapter_slots": [batch[i].adapter for i in adapted],
    }
    return StepArrays(**{name: np.array(values, dtype=np.int32) for name, values in arrays.items()})


def all_logits(
    forward: Forward,
    sequences: Sequence[list[int]],
    max_chunk: int,
    seed: int = 0,
    adapters: Sequence[int] = (),
) -> list[npt.NDArray[Any]]:
    """Logits of every position of every sequence, run as one mixed batch in random chunks.
    ``adapters``: each sequence's slot."""
    parts: list[list[npt.NDArray[Any]]] = [[] for _ in sequences]
    for batch in mixed_batches(sequences, max_chunk, seed):
        if adapters:
            batch = [replace(rows, adapter=adapters[rows.seq_id]) for rows in batch]
        logits = forward.step(batch)
        ends = np.cumsum([len(rows.token_ids) for rows in batch])
        for rows, part in zip(batch, np.split(logits, ends[:-1]), strict=True):
            parts[rows.seq_id].append(part)
    return [np.concatenate(part) for part in parts]


def mixed_batches(
    sequences: Sequence[list[int]], max_chunk: int, seed: int
) -> Iterator[list[Rows]]:
    """Steps in which some sequences decode, some prefill a chunk and some wait, in random order."""
    random = np.random.default_rng(seed)
    done = [0] * len(sequences)
    while any(count < len(ids) for count, ids in zip(done, sequences, strict=True)):
        batch, budget = [], MAX_TOKENS
        for seq_id in random.permutation(len(sequences)).tolist():
            left = len(sequences[seq_id]) - done[seq_id]
            count = min(left, budget, int(random.choice([0, 1, random.integers(1, max_chunk + 1)])))
            if count:
                ids = sequences[seq_id][done[seq_id] : done[seq_id] + count]
                batch.append(Rows(seq_id, ids, done[seq_id]))
                done[seq_id] += count
                budget -= count
        if batch:
            yield batch


def logits_of(model: LoadedModel) -> npt.NDArray[Any]:
    """Of ``SEQUENCES``, by the native step graph: [tokens, vocab]."""
    return np.concatenate(all_logits(NativeForward(model, 128, model.dtype), SEQUENCES, 16))
