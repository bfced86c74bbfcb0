"""Steps over a paged cache, with values in float64, for tests of ops on torch devices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.device.step_arrays import StepArrays

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PagedCase:
    """Sequences of (cached tokens, new tokens) in scattered blocks; unwritten slots hold NaN."""

    sequences: tuple[tuple[int, int], ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(new for _, new in self.sequences)

    @property
    def max_length(self) -> int:
        return max(cached + new for cached, new in self.sequences)

    def arrays(self) -> StepArrays:
        num_columns = -(-self.max_length // self.block_size)
        rng = np.random.default_rng(self.seed)
        num_blocks = len(self.sequences) * num_columns
        tables = rng.permutation(num_blocks).reshape(-1, num_columns).astype(np.int32)
        positions = [np.arange(c, c + n) for c, n in self.sequences]
        slots = [
            tables[seq, at // self.block_size] * self.block_size + at % self.block_size
            for seq, at in enumerate(positions)
        ]
        news = np.array([new for _, new in self.sequences], np.int32)
        empty = np.zeros(0, np.int32)
        return StepArrays(
            token_ids=np.zeros(self.num_tokens, np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            slots=np.concatenate(slots).astype(np.int32),
            first_rows=(np.cumsum(news) - news).astype(np.int32),
            num_rows=news,
            kv_lengths=np.array([sum(lengths) for lengths in self.sequences], np.int32),
            table_rows=np.arange(len(self.sequences), dtype=np.int32),
            block_tables=tables,
            logit_token_rows=empty,
            sampling_rows=empty,
            target_ids=empty,
            copy_src=empty,
            copy_dst=empty,
        )

    def step(self, device: torch.device) -> DeviceStep:
        return DeviceStep.upload(self.arrays(), block_size=self.block_size, device=device)

    def cache(
        self, device: torch.device, dtype: torch.dtype, *, is_filled: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's keys and values; filled: at the positions that the step's rows see. int8:
        codes everywhere."""
        arrays = self.arrays()
        shape = (arrays.block_tables.size * self.block_size, self.num_kv_heads, self.head_dim)
        generator = torch.Generator().manual_seed(self.seed)
        stores = [torch.randn(shape, generator=generator) for _ in range(2)]
        if dtype == torch.int8:
            stores = [(40 * store).clamp(-127, 127) for store in stores]
        is_written = torch.zeros(shape[0], dtype=torch.bool)
        if is_filled:
            for seq in range(len(self.sequences)):
                is_written[self.slots_of(arrays, seq)] = True
        for store in stores:
            if dtype != torch.int8:
                store[~is_written] = torch.nan
        return stores[0].to(device, dtype), stores[1].to(device, dtype)

    def slots_of(self, arrays: StepArrays, seq: int) -> torch.Tensor:
        at = np.arange(arrays.kv_lengths[seq])
        blocks = arrays.block_tables[seq, at // self.block_size].astype(np.int64)
        return torch.from_numpy(blocks * self.block_size + at % self.block_size)

    def expected_attention(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        window: int,
        soft_cap: float,
        slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        sees_later: bool = False,
        relative: torch.Tensor | None = None,
    ) -> Float64Array:
        """In float64, one row and head after the other."""
        arrays, group = self.arrays(), self.num_q_heads // self.num_kv_heads
        queries = q.double().cpu().view(-1, self.num_q_heads, self.head_dim).numpy()
        y = np.zeros_like(queries)
        for seq, (cached, new) in enumerate(self.sequences):
            slots = self.slots_of(arrays, seq)
            k, v = (store.cpu()[slots].double().numpy() for store in (keys, values))
            for i in range(new):
                row, end = arrays.first_rows[seq] + i, cached + i + 1
                start = max(0, end - window) if window else 0
                if sees_later:
                    length = cached + new
                    end = min(length, cached + i + window) if window else length
                for head in range(self.num_q_heads):
                    scores = k[start:end, head // group] @ queries[row, head] * scale
                    if soft_cap:
                        scores = soft_cap * np.tanh(scores / soft_cap)
                    if slopes is not None:
                        scores -= slopes[head].item() * np.arange(end - start - 1, -1, -1)
                    if relative is not None:
                        middle = relative.shape[1] // 2 - cached - i
                        scores += relative[head, middle + start : middle + end].double().numpy()
                    highest = (
                        scores.max() if sinks is None else max(scores.max(), sinks[head].item())
                    )
                    weights = np.exp(scores - highest)
                    mass = weights.sum()
                    if sinks is not None:
                        mass += np.exp(sinks[head].item() - highest)
                    y[row, head] = weights / mass @ v[start:end, head // group]
        result: Float64Array = y.reshape(len(y), -1)
        return result


ATTENTION_CASES = {
    "one token": PagedCase(((0, 1),), 1, 1, 16),
    "decode": PagedCase(((0, 1), (15, 1), (16, 1), (70, 1)), 4, 2, 32),
    "decode, one block over": PagedCase(((31, 1), (32, 1), (33, 1)), 8, 1, 16, block_size=32),
    "prefill": PagedCase(((0, 37),), 4, 4, 16),
    "chunks": PagedCase(((19, 18), (0, 2), (33, 16)), 6, 2, 24),
    "mixed": PagedCase(((40, 1), (0, 17), (3, 1), (16, 33)), 3, 1, 80),
}

NATIVE_CASES = {
    "splits": PagedCase(((699, 1), (0, 1), (299, 1)), 4, 1, 64),
    "wide heads": PagedCase(((300, 1), (5, 40)), 4, 2, 256),
    "odd heads": PagedCase(((70, 1), (13, 70)), 7, 1, 80),
    "large group": PagedCase(((290, 1), (30, 3)), 20, 1, 128, block_size=32),
    "largest group": PagedCase(((290, 1), (30, 3)), 71, 1, 64),
    "no groups": PagedCase(((64, 130), (63, 1)), 2, 2, 128),
}
