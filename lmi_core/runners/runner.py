"""The seam between the engine's loop and whatever executes steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lmi_core.errors import ConfigError
from lmi_core.models.pooling import PoolingSpec

if TYPE_CHECKING:
    from lmi_core._native import BlockPool, BlockTables, BlockWriter, SamplingTable, Step
    from lmi_core.adapters.store import PackedLora
    from lmi_core.models.pooling_head import PoolingHead
    from lmi_core.weights.formats import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerInfo:
    """What was decided when the model was loaded; all sizes are final."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logit_rows: int
    max_logprobs: int
    num_blocks: int
    block_size: int
    weight_bytes: int = 0
    kv_cache_bytes: int = 0
    arena_bytes: int = 0
    num_threads: int = 1
    instruction_set: str = ""
    dtype: str = ""
    quantize: str = ""
    """int8, int4 or fp8 if the weights are, from the checkpoint or at load."""
    kv_dtype: str = ""
    device: str = "cpu"
    kernels: str = ""
    """Which implementation runs which op; empty: the CPU engine's own run all."""
    shares_blocks: bool = True
    """Whether sequences can have blocks in common; False: each computes its whole prompt."""
    continues_prompts: bool = True
    """Whether outputs go on in the prompt's place; False: an encoder reads it. Then its tokens have
    no log-probabilities, and what was generated can't be computed again as part of it."""
    first_ids: tuple[int, ...] = ()
    """What outputs begin with then, which nobody is shown: a start, and a token that is forced."""
    forced_end_ids: tuple[int, ...] = ()
    """Of which one ends a text that is as long as it may be; empty: any token may."""
    num_saturating_tokens: int | None = None
    """From how many rows on the cost of a step is proportional to them, so that prompts could as
    well have a step each; None: there is no such number."""
    runs_ahead: bool = False
    """Whether the runner is an ``AheadRunner``."""
    counts_ahead: bool = False
    """Whether its worker does what ``Step.count_token`` says, and waits for the masks of steps that
    were submitted ahead."""
    verifies_drafts: bool = False
    """Whether several rows of a sequence can be sampled in one step, and all but some leading ones
    be forgotten."""
    draft_model: str = ""
    """The name of the draft model of a ``DraftingRunner``; empty: it has none."""
    has_draft_heads: bool = False
    """Whether that is a ``HeadRunner``, of a ``HeadsRunner``."""
    pooling: PoolingSpec | None = None
    """What prompts are pooled to, by a ``PoolingRunner``; None: the model generates."""
    num_state_columns: int = 0
    """Of the hidden states that it gives, as a ``StatesRunner``; 0: it gives none."""
    has_adapters: bool = False
    """Whether it is a ``LoraRunner``, with LoRA on."""
    has_scales_and_cutoffs: bool = True
    """Whether its sampler has those of the sampling table."""
    pads_batches: bool = False
    """Whether it is a ``PaddedRunner``."""
    num_ranks: int = 1
    """Processes that compute each step together; more than one: it is a ``RankedRunner``."""

    @property
    def caches_prefixes(self) -> bool:
        """Whether prompts may begin with what was computed before. Other rows than the last aren't
        in blocks: who pools them computes the whole prompt."""
        pooling = self.pooling
        has_enough = pooling is None or (pooling.rows == "last" and pooling.is_causal)
        return self.shares_blocks and has_enough

    def before_outputs(
        self, prompt_ids: Sequence[int], begin_id: int | None = None
    ) -> Sequence[int]:
        """What an output's tokens come behind, for penalties, biases and n-grams. ``begin_id``: a
        token that a request forces in the place of the model's."""
        if self.continues_prompts:
            return prompt_ids
        if begin_id is None or len(self.first_ids) < 2:
            return self.first_ids
        return (*self.first_ids[:-1], begin_id)

    def check_capacities(self) -> None:
        """Raise ConfigError for steps without a row for every sequence, and for no cache."""
        for name, value in (
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_logit_rows", self.max_logit_rows),
        ):
            if value < self.max_num_seqs:
                raise ConfigError(
                    f"{name} is {value}, but must be at least max_num_seqs ({self.max_num_seqs}): "
                    "raise it, or lower max_num_seqs",
                    field=name,
                )
        if self.num_blocks * self.block_size < 2:
            raise ConfigError("the KV cache holds less than two tokens", field="kv_cache_bytes")


class Runner(Protocol):
    """Executes filled steps one after the other.

    ``steps`` are its buffers (two on CPU); ``completion_fd`` is an eventfd that counts finished
    steps. ``submit`` returns at once. All calls come from the engine's loop thread.
    """

    info: RunnerInfo
    pool: BlockPool
    block_tables: BlockTables
    sampling: SamplingTable
    steps: tuple[Step, ...]
    completion_fd: int

    def submit(self, step: Step) -> None: ...

    def close(self) -> None:
        """Wait for what was submitted, release threads and memory. Idempotent."""
        ...


class RankedRunner(Runner, Protocol):
    """Whose steps other processes compute with it."""

    @property
    def is_lost(self) -> bool:
        """Whether one of them ended, so that all steps fail from now on."""
        ...


class PaddedRunner(Runner, Protocol):
    """Puts sequences that end with about the same length into the same batches."""

    final_lengths: list[int]
    """Of each row's sequence what it may have in the end, prompt and output; 0: not known. Written
    when it gets the row."""
    begin_ids: list[int | None]
    """The same of what its output begins with in the place of what the model forces, if it does."""


class PoolingRunner(Runner, Protocol):
    """Computes what prompts are pooled from, instead of tokens."""

    head: PoolingHead

    def pooled_rows(self, step: Step) -> FloatArray:
        """The last hidden states of a completed step's logit rows, fp32 [L, hidden]; until the next
        step is submitted."""
        ...


class StatesRunner(Runner, Protocol):
    """Gives tokens' hidden states beside what is sampled."""

    def submit_with_states(self, step: Step) -> None:
        """As ``submit``, of a step whose ``states`` will be read."""
        ...

    def states(self, step: Step) -> FloatArray:
        """The hidden states of a completed step's token rows, fp32 [T, num_state_columns]; until
        the next step is submitted."""
        ...


class AheadRunner(Runner, Protocol):
    """Takes a step before the last one's tokens are known: three ``steps``, two of them in flight.
    Completions come in the order of submission."""

    def submit_ahead(self, step: Step, logit_rows: list[int]) -> None:
        """As ``submit``, of a step whose token ids are what these rows of the last step sampled, or
        any where that step failed or a row sampled none; -1: the id in the step."""
        ...


class DraftRunner(Protocol):
    """Computes steps of a draft model, in chains: a step takes the tokens that those before it
    sample. It reads and writes KV of its own in the runner's blocks, by the same block tables, and
    samples by the same rows of the sampling table."""

    vocab_size: int
    max_model_len: int
    max_num_tokens: int
    """Of a step."""
    shift: int
    """By how much the position of a row's token is above the row's: 1 of heads that read a token
    beside the hidden state of the one before it, which is in that one's slot; else 0."""

    def next_steps(self) -> tuple[Step, ...]:
        """Buffers for a chain, none of them of the last one, which may be in flight."""
        ...

    def completion_fd(self, step: Step) -> int:
        """Of a buffer that isn't submitted: what is readable from when it is done, until this is
        asked again."""
        ...

    def submit(self, steps: Sequence[Step]) -> None:
        """Execute a chain, before any step that is submitted later. Returns at once."""
        ...


class HeadRunner(DraftRunner, Protocol):
    """Draws drafts from hidden states: heads, whose steps don't follow each other."""

    num_heads: int
    states: FloatArray | None
    """fp32 [max_num_seqs, hidden]: token ids of its steps are rows of it. None: it finds them where
    the model's steps have left them."""


class HeadsRunner(Runner, Protocol):
    """Has heads as its ``drafter``, and gives the states that they go on from."""

    def head_rows(self, step: Step) -> FloatArray | None:
        """The last hidden states of a completed step's logit rows, fp32 [L, hidden]; until the next
        step is submitted. None: the heads have them."""
        ...


class DraftingRunner(Runner, Protocol):
    """Has a draft model, whose tokens steps take (``Step.take_token``)."""

    drafter: DraftRunner


class BlockMemory(Protocol):
    """The memory of all KV blocks."""

    @property
    def bytes_per_block(self) -> int:
        """In all layers."""
        ...

    def write_out(self, writer: BlockWriter, name: str, block_id: int) -> None:
        """Have what a full block holds in all layers written to a file, unless the pool evicts it
        before. Does not wait."""
        ...

    def copy_in(self, block_id: int, content: bytearray) -> None:
        """Make a block what a file has. No step in flight may refer to it."""
        ...


class BlockRunner(Runner, Protocol):
    """Keeps KV blocks where they can be copied from and to."""

    cache: BlockMemory


class AdapterStore(Protocol):
    """The LoRA adapters of a runner by slot."""

    def pack(self, path: Path) -> PackedLora:
        """Read and pack the adapter in a PEFT directory, in any thread. Raises ModelError."""
        ...

    def set(self, slot: int, adapter: PackedLora | None) -> None:
        """What steps submitted from now on find in a slot to which none that was submitted
        refers."""
        ...


class LoraRunner(Runner, Protocol):
    """Computes sequences with the adapters whose slots ``Step.add`` was given."""

    adapters: AdapterStore
