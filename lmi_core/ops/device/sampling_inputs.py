"""What a sampler needs of a step, beside the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lmi_core.ops.device import philox

MIN_TEMPERATURE = 1e-5
"""Temperatures below are greedy."""

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
Edits = tuple[IntArray, IntArray, FloatArray]
"""Logit rows, token ids and values."""
Scales = tuple[IntArray, IntArray, FloatArray, FloatArray]
"""Logit rows, token ids, and factors of logits above 0 and of others."""
Masks = tuple[IntArray, npt.NDArray[np.uint32]]
"""Logit rows, and per row a bit per token id, lowest first: those that may be sampled."""


class _Step(Protocol):
    def view(self, name: str) -> npt.NDArray[np.generic]: ...

    def wait_for_masks(self) -> Masks: ...


class _Results(Protocol):
    def set_result(
        self,
        row: int,
        token_id: int,
        logprob: float,
        top: list[tuple[int, float]],
        target_rank: int,
        /,
    ) -> None: ...


class _SamplingTable(Protocol):
    def gather(
        self, rows: list[int], drafts: list[list[int]], previous_ids: list[int], /
    ) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInputs:
    """Per logit row, on the host. Rows that sample nothing have neutral parameters."""

    is_sampled: npt.NDArray[np.bool_]
    target_ids: IntArray
    """>= 0: report this token's log-probability instead of sampling."""
    num_top: IntArray
    temperature: FloatArray
    """0: greedy."""
    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray
    typical_p: FloatArray
    epsilon_cutoff: FloatArray
    eta_cutoff: FloatArray
    repetition_penalty: FloatArray
    presence_penalty: FloatArray
    frequency_penalty: FloatArray
    seed: npt.NDArray[np.uint64]
    choice: IntArray
    position: IntArray
    uniform: npt.NDArray[np.float64]
    """The random number in [0, 1) that decides the draw, of (seed, choice, position)."""
    biases: Edits
    seen: Edits
    """Values: how often the token was generated; 0: only in the prompt."""
    scales: Scales
    """Of logits that penalties have changed."""
    bans: Edits
    masks: Callable[[], Masks]
    """Waits until they are filled, which happens while the step runs."""

    @classmethod
    def of(cls, step: _Step, table: _SamplingTable, max_logprobs: int) -> SamplingInputs:
        """A copy of what ``step`` asks for and of its rows of ``table``."""
        sampling_rows = np.array(step.view("sampling_rows"), np.int32)
        target_ids = np.array(step.view("target_ids"), np.int32)
        positions = np.array(step.view("sample_positions"), np.int32)
        has_row = np.flatnonzero(sampling_rows >= 0)
        previous_ids = step.view("token_ids")[step.view("logit_token_rows")[has_row]].tolist()
        drafts = _drafts(step, has_row)
        rows = table.gather(sampling_rows[has_row].tolist(), drafts, previous_ids)

        def spread(name: str, neutral: float) -> npt.NDArray[Any]:
            values = np.full(len(sampling_rows), neutral, rows[name].dtype)
            values[has_row] = rows[name]
            return values

        def edits(name: str) -> Any:
            indices, *values = rows[name]
            if len(has_row) < len(sampling_rows):
                indices = has_row[indices].astype(np.int32)
            return (indices, *values)

        is_target = target_ids >= 0
        num_top = np.clip(spread("num_logprobs", 0), 0, max_logprobs)
        num_top[(sampling_rows < 0) & is_target] = max_logprobs
        temperature = spread("temperature", 0.0)
        temperature[is_target | (temperature < MIN_TEMPERATURE)] = 0.0
        seed, choice = spread("seed", 0), spread("choice", 0)
        return cls(
            is_sampled=(sampling_rows >= 0) & ~is_target,
            target_ids=target_ids,
            num_top=num_top.astype(np.int32),
            temperature=temperature,
            seed=seed,
            choice=choice,
            position=positions,
            uniform=philox.uniform(seed, choice, positions),
            biases=edits("biases"),
            seen=edits("seen"),
            scales=edits("scales"),
            bans=edits("bans"),
            masks=step.wait_for_masks,
            **{
                name: spread(name, neutral)
                for name, neutral in (
                    ("top_k", 0),
                    ("top_p", 1.0),
                    ("min_p", 0.0),
                    ("typical_p", 1.0),
                    ("epsilon_cutoff", 0.0),
                    ("eta_cutoff", 0.0),
                    ("repetition_penalty", 1.0),
                    ("presence_penalty", 0.0),
                    ("frequency_penalty", 0.0),
                )
            },
        )

    def of_rows(self, rows: npt.NDArray[np.intp]) -> SamplingInputs:
        """What the logit rows ``rows``, ascending, ask for."""
        places = np.full(len(self.target_ids), -1, np.int32)
        places[rows] = np.arange(len(rows), dtype=np.int32)

        def part(whole: tuple[npt.NDArray[Any], ...]) -> Any:
            own = places[whole[0]]
            return own[own >= 0], *(values[own >= 0] for values in whole[1:])

        chosen: dict[str, Any] = {"masks": lambda: part(self.masks())}
        for name in (field.name for field in fields(self) if field.name != "masks"):
            value = getattr(self, name)
            chosen[name] = part(value) if isinstance(value, tuple) else value[rows]
        return SamplingInputs(**chosen)


def _drafts(step: _Step, logit_rows: npt.NDArray[np.intp]) -> list[list[int]]:
    """What each row counts as generated; empty if no row has drafts."""
    counts = step.view("num_drafts")[logit_rows].tolist()
    if not any(counts):
        return []
    token_ids = step.view("token_ids")
    ends = step.view("logit_token_rows")[logit_rows].tolist()
    return [
        token_ids[end + 1 - count : end + 1].tolist()
        for end, count in zip(ends, counts, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingResults:
    """Per logit row, on the host."""

    token_ids: IntArray
    """Sampled ids, -1 where nothing was sampled."""
    logprobs: FloatArray
    """Of the sampled or target token, under the unmodified distribution."""
    top_ids: IntArray
    """[L, most asked], best first, lower id first among equals."""
    top_logprobs: FloatArray
    num_top: IntArray
    """How many of them each row reports."""
    target_ranks: IntArray
    """The target's place among all tokens, the likeliest being 1; 0: there is none."""

    def replaced(self, rows: npt.NDArray[np.intp], others: SamplingResults) -> SamplingResults:
        """These, but for ``rows``, which ``others`` are."""
        num_most = max(self.top_ids.shape[1], others.top_ids.shape[1])

        def merged(name: str) -> Any:
            own, other = getattr(self, name), getattr(others, name)
            result = np.zeros((len(own), num_most)[: own.ndim], own.dtype)
            for values, at in ((own, slice(None)), (other, rows)):
                if own.ndim == 1:
                    result[at] = values
                else:
                    result[at, : values.shape[1]] = values
            return result

        return SamplingResults(**{field.name: merged(field.name) for field in fields(self)})

    def write(self, step: _Results) -> None:
        """Into a step buffer."""
        token_ids, logprobs = self.token_ids.tolist(), self.logprobs.tolist()
        ranks = self.target_ranks.tolist()
        for row, num_top in enumerate(self.num_top.tolist()):
            top_ids = self.top_ids[row, :num_top].tolist()
            top_logprobs = self.top_logprobs[row, :num_top].tolist()
            top = list(zip(top_ids, top_logprobs, strict=True))
            step.set_result(row, token_ids[row], logprobs[row], top, ranks[row])
