"""Types of the native extension: the whole surface between Python and C++.

Everything here is called from the engine's event loop thread, holds the GIL for microseconds and
never blocks, except where a docstring says that the GIL is released.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt

from lmi_core.weights.formats import BlockFormat, PackFormat, RowRounding

DTypeName = Literal["fp32", "bf16", "fp16", "int8", "int4"]
RowSymbol = Literal["T", "L", "E"]
TokenIds = Sequence[int] | npt.NDArray[np.int32]
Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "clamped_swiglu"]

kernels: ModuleType  # one kernel at a time over numpy arrays, for tests and benches

class NativeError(RuntimeError):
    """A check in C++ failed; the message carries file, line and values."""

def instruction_sets() -> list[str]:
    """Names of the instruction-set levels compiled in that this CPU can run, best last."""

def unbuilt_instruction_sets() -> list[str]:
    """Names of the levels that this CPU can run and the build leaves out (`make run` does)."""

def default_instruction_set() -> str:
    """The best level, or the one that the environment variable LMI_INSTRUCTION_SET names."""

def num_physical_cores() -> int:
    """Physical cores within the affinity mask and the cgroup's CPU quota, at least 1."""

def cpu_info() -> dict[str, Any]:
    """What the machine is: model name, flags, cores, caches (bytes), memory limit (bytes)."""

# ---------------------------------------------------------------- kv

@final
class BlockPool:
    """Ref-counted KV blocks with a keyed chained-hash prefix index and an intrusive LRU.

    A block is free (no content), used (ref count > 0) or cached (ref count 0, content still
    hit-able). ``num_available`` = free + cached. Hashes are 16-byte strings, one per full block.
    """

    def __init__(self, num_blocks: int, block_size: int, secret: bytes) -> None:
        """``secret``: 16 bytes that key the hashes."""
    num_blocks: int
    block_size: int
    @property
    def num_free(self) -> int: ...
    @property
    def num_ever_used(self) -> int:
        """Blocks below this one are used or were: never used ones are handed out in order."""
    @property
    def num_used(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def num_available(self) -> int: ...
    def allocate(self, num_blocks: int) -> list[int] | None:
        """New blocks with ref count 1, evicting cached ones least recent first; None if too few."""
    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each; the list is a sequence's table in order, freed tail first."""
    def add_ref(self, block_ids: Sequence[int]) -> None:
        """Take one more reference of each used block (fork)."""
    def ref_count(self, block_id: int) -> int: ...
    def hash_blocks(
        self, token_ids: Sequence[int], parent: bytes = b"", extra: bytes = b""
    ) -> list[bytes]:
        """Chained hashes of the full blocks in ``token_ids``; ``extra`` (adapter, salt) seeds the chain
        when ``parent`` is empty."""
    def find(self, block_hash: bytes) -> int:
        """The block that is hit-able under a hash, or -1."""
    def acquire_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest indexed prefix of ``hashes``, each with one reference taken."""
    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Make a full, used block hit-able. A hash that is indexed already is left as it is."""
    def clear_cache(self) -> int:
        """Forget every cached block; returns how many."""
    def check_integrity(self) -> None:
        """Raise NativeError unless free + used + cached = total and every list and index agrees."""

@final
class BlockWriter:
    """A thread of low priority that writes KV blocks to files of ``directory``.

    Names are those of files. A block that the pool evicts before it was copied is given up.
    """

    def __init__(
        self, pool: BlockPool, memory: object, directory: str, key: bytes, block_bytes: int
    ) -> None:
        """``memory``: whose blocks are written; ``key``: 16 bytes that files are sealed with."""
    def write(self, name: str, content: bytes | bytearray) -> None:
        """Have a content written, in any thread; those of a ``KvCache``: ``KvCache.write_out``."""
    def remove(self, name: str) -> None:
        """Have a file removed, after what was asked for before."""
    def give_up(self, name: str) -> None:
        """Say of a block, in any thread, that its content can't be had."""
    def take_outcomes(self) -> list[tuple[str, int]]:
        """Names of what was to be written, and errno of each: 0 where the file is whole, ECANCELED
        where the block was given up. Each outcome is returned once."""
    def close(self, timeout_s: float) -> None:
        """Write what waits, give up what takes longer. Idempotent. Releases the GIL."""

def block_file_bytes(block_bytes: int) -> int:
    """Of the file of a block of so many bytes."""

def read_block_file(path: str, key: bytes, name: str, content: bytearray) -> bool:
    """Read a block as long as ``content``; False: it isn't what was written under that name.
    Raises OSError. Releases the GIL."""

# ---------------------------------------------------------------- step

@final
class LogitBiases:
    """What a request adds to logits, the same for all of its rows."""

    def __init__(
        self,
        token_ids: TokenIds,
        biases: Sequence[float] | npt.NDArray[np.float32],
        of_sequences: Sequence[tuple[Sequence[int], float]] = (),
    ) -> None:
        """Of tokens whatever comes before them, and of sequences' last tokens, where what was observed
        last are the others; sequences longer than the text so far have none. Several of a token are
        summed in fp32 in this order, those of sequences of one token before the others'."""
    @property
    def num_last(self) -> int:
        """How many of a text's last tokens matter to it; 0: none."""

@final
class SamplingTable:
    """Per-row sampling state that ``sample`` nodes read: parameters and the counts of seen tokens.

    One row per running sequence. Changed only while no submitted step refers to the row.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None: ...
    def set(
        self,
        row: int,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        typical_p: float,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
        seed: int,
        choice: int,
        num_logprobs: int,  # -1: not even the sampled token's
        banned_ids: TokenIds,
        min_tokens: int,
        min_tokens_banned_ids: TokenIds,
        watermark_gamma: float = 0.0,
        watermark_delta: float = 0.0,
        biases: LogitBiases | None = None,
        epsilon_cutoff: float = 0.0,
        eta_cutoff: float = 0.0,
        prompt_reward: float = 1.0,
        prompt_ids: TokenIds = (),
        length_start: int = 0,
        length_factor: float = 1.0,
        length_ids: TokenIds = (),
    ) -> None:
        """Set a row and clear its counts. temperature 0 = greedy; top_k 0, top_p 1, min_p 0,
        typical_p 1, repetition 1, presence 0, frequency 0 = off. ``min_tokens_banned_ids`` (eos,
        stop ids) are banned while fewer than ``min_tokens`` output tokens were observed. A share
        ``watermark_gamma`` of the vocabulary, chosen by the token before, gets ``watermark_delta``
        added; 0 = off. ``biases`` are shared with other rows; drafts aren't among the last tokens.
        Ids come fastest as arrays. Cutoffs: shares of the probability below which tokens are
        dropped; 0 = off. Logits of ``prompt_ids``, which differ, are
        ``prompt_reward`` times as great, or as many times less negative. Those of ``length_ids``
        grow, for each output token beyond ``length_start``, by their amount times
        ``length_factor`` to the power of these, less 1."""
    def observe_prompt(self, row: int, token_ids: Sequence[int]) -> None:
        """Count prompt tokens, for what they matter to: repetition penalty, sequences' biases."""
    def observe(self, row: int, token_id: int) -> None:
        """Count one output token."""
    def observe_many(self, row: int, token_ids: Sequence[int]) -> None:
        """Count output tokens again, after a preemption."""
    def gather(
        self,
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]] = (),
        previous_ids: Sequence[int] = (),
    ) -> dict[str, Any]:
        """For samplers written in Python: an array per parameter named as in ``set`` (temperature to
        num_logprobs), one entry per row given, and ``biases`` (id, bias), ``seen`` (id, times
        generated; only under a penalty) and ``bans`` (id, 0), each as arrays (indices into
        ``rows`` int32, ids int32, values float32), and ``scales``, with two values: the factors of
        logits above 0 and of others, once penalties are applied. ``drafts``: per row, tokens that it counts as
        generated; ``previous_ids``: its last token, behind which a watermark adds to ``biases``."""

def favoured_tokens(previous_id: int, gamma: float, vocab_size: int) -> npt.NDArray[np.int32]:
    """The tokens that a watermark favours behind one: the first ones of what PyTorch's
    ``randperm(vocab_size)`` gives on a CPU, seeded with 15485863 times ``previous_id``."""

@final
class BlockTables:
    """[max_seqs, max_blocks_per_seq] int32 block ids, a row per running sequence."""

    def __init__(self, max_seqs: int, max_blocks_per_seq: int) -> None: ...
    def set(self, row: int, block_ids: Sequence[int]) -> None: ...
    def append(self, row: int, block_ids: Sequence[int]) -> None: ...
    def clear(self, row: int) -> None: ...
    def row(self, row: int) -> list[int]: ...

@final
class Step:
    """One step buffer: the fixed-capacity struct of arrays of ``csrc/graph/step.h``.

    Filled by the loop, read and answered by the worker; between ``submit`` and completion nobody
    else touches it.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_seqs: int,
        max_logit_rows: int,
        max_logprobs: int,
        max_copies: int,
        block_size: int,
        block_tables: BlockTables,
        sampling: SamplingTable,
    ) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_seqs(self) -> int: ...
    @property
    def num_logit_rows(self) -> int: ...
    def clear(self) -> None:
        """Empty the step for the next plan."""
    def add(
        self,
        token_ids: Sequence[int],
        start: int,
        table_row: int,
        sampling_row: int,
        logits: Literal["none", "first", "last", "all", "drafts"],
        adapter: int = -1,
        num_first: int = -1,
        num_drafts: int = 0,
    ) -> int:
        """Append a sequence's tokens at positions start, start+1, ...; returns the index of its first
        logit row, or -1. Positions, slots and kv length follow from ``start`` and the block table.
        "last": the last token's row is sampled with ``sampling_row`` (the sampled token's position is
        start + len). "all": every row also reports the log-probability of the token that follows it in
        this call's ``token_ids``, see ``set_target``; only the last is sampled, and only if
        ``sampling_row`` >= 0. "drafts": every row is sampled, as if the sequence had generated all
        tokens up to it but the first, which it has (``num_drafts`` of them). ``adapter``: the slot of a LoRA adapter, or -1.
        ``num_first``: the tokens up to the second text of a pair, or -1. ``num_drafts``: of "last", tokens at the end
        that the row samples behind as if the sequence had generated them."""
    def add_following(self, starts: list[int], rows: list[int], adapters: list[int]) -> int:
        """Append a token for each of several sequences, which an earlier step will have sampled (``follow``)
        and behind which the next is sampled; returns the first one's logit row. ``starts``: its position;
        ``rows``: of the block and the sampling table."""
    def set_target(self, logit_row: int, token_id: int) -> None:
        """Report the log-probability (and top-n) of ``token_id`` for this row (prompt logprobs)."""
    def add_copy(self, src_block: int, dst_block: int) -> None:
        """Copy a KV block in every layer before the forward pass (copy on write)."""
    def follow(self, previous: Step, logit_rows: list[int]) -> None:
        """The token ids are what these logit rows sample of ``previous``, a step executed before this
        one, a row per token; 0 for a row that samples none, -1 for a token that is known. ``previous`` must live on, uncleared, until
        this step runs."""
    def take_token(self, token_row: int, source: Step, logit_row: int) -> None:
        """A token's id is what a logit row samples of ``source``, a step executed before this one; 0 for
        a row that samples none or an id beyond the vocabulary."""
    def take_tokens(self) -> None:
        """Write these ids, and those of the step that it follows, into ``token_ids``; both are
        executed. Workers of the CPU do so by themselves."""
    def count_token(self, logit_row: int) -> None:
        """``take_tokens`` behind ``follow`` also has the sampling row of a logit row observe the token
        before it."""
    @property
    def counted_rows(self) -> list[int]:
        """The logit rows of these."""
    def add_mask(self, logit_row: int) -> npt.NDArray[np.uint32]:
        """Restrict what a logit row samples: a writable mask of one bit per token id, lowest first, all
        clear. It may be written until ``set_mask_ready``, also while the step runs: ``sample`` waits."""
    def set_mask_ready(self, logit_row: int) -> None:
        """The row's mask is filled. A step with a mask ends only after this call."""
    def set_masks_ready(self) -> None:
        """``set_mask_ready`` of every masked row."""
    def wait_for_masks(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32]]:
        """The masked logit rows and a copy of their masks [rows, words], once all are filled (runners
        written in Python). Releases the GIL."""
    # results, valid once the step completed
    def sampled(self) -> list[int]:
        """Sampled id per logit row, -1 where nothing was sampled."""
    def logprob(self, logit_row: int) -> float:
        """Log-probability of the sampled (or target) token under the unmodified distribution."""
    def logprobs(self) -> list[float]:
        """``logprob`` of every logit row."""
    def top(self, logit_row: int) -> list[tuple[int, float]]:
        """The row's top-n (id, logprob), best first; n as asked, lower id first among equals."""
    def target_rank(self, logit_row: int) -> int:
        """The place of the row's target among all tokens, the likeliest being 1; 0: it has none."""
    @property
    def error(self) -> str:
        """Why the step failed, empty when it didn't. A failed step has no results. Set only by
        runners written in Python."""
    @error.setter
    def error(self, value: str) -> None: ...
    is_final: bool
    """Of an error: every later step of the model will fail too."""

    @property
    def native_ns(self) -> int:
        """Time from the worker taking the step to its completion."""
    @property
    def submitted_ns(self) -> int: ...
    @property
    def started_ns(self) -> int: ...
    @property
    def finished_ns(self) -> int:
        """CLOCK_MONOTONIC, as time.monotonic_ns()."""
    def set_times(self, *, submitted_ns: int, started_ns: int, finished_ns: int) -> None:
        """When a runner written in Python took and finished the step."""
    # views for tests and for runners written in Python (numpy arrays over the buffer, no copies)
    def view(self, name: str) -> npt.NDArray[np.generic]:
        """An array of the buffer by its name in step.h, cut to the present counts."""
    def set_result(
        self,
        logit_row: int,
        token_id: int,
        logprob: float,
        top: Sequence[tuple[int, float]] = (),
        target_rank: int = 0,
    ) -> None:
        """Write a result (runners written in Python)."""

# ---------------------------------------------------------------- weights

@final
class MappedFile:
    """A read-only memory mapping of a file; ``huge_pages`` where its pages in memory are that large."""

    def __init__(self, path: str, huge_pages: bool = False) -> None: ...
    @property
    def size(self) -> int: ...
    @property
    def is_lost(self) -> bool:
        """Whether the file was truncated, and zeros were read in its place."""
    def array(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A read-only view that keeps the mapping alive."""
    def drop(self, offset: int, num_bytes: int) -> None:
        """Tell the kernel that these pages aren't needed again (MADV_DONTNEED)."""

def is_finite(values: npt.NDArray[np.generic]) -> bool:
    """Whether a contiguous array of fp32, fp16, or bf16 as uint16 holds neither NaN nor infinities. Releases the GIL."""

@final
class LinearWeight:
    """A weight matrix [num_outputs, num_inputs] repacked for the kernels of one instruction set."""

    @staticmethod
    def pack(
        parts: Sequence[
            npt.NDArray[np.generic]
            | tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]
            | tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.float32]]
        ],
        *,
        format: PackFormat,
        gated: bool = False,
        group_size: int = 0,
        rounding: RowRounding = "outliers",
        instruction_set: str = "",
        num_threads: int = 0,
        num_experts: int = 1,
        behind: bool = False,
    ) -> LinearWeight:
        """Concatenate row-major parts [n_i, k] (fp32, fp16, or bf16 as uint16; GGUF's blocks as uint8 [n_i, bytes], of the
        type ``format``, with ``group_size`` 16; e4m3 as uint8, with its scales [n_i, 1 or
        blocks of 128 inputs]) along the outputs and repack. ``gated``: two parts, gate and up, interleaved so that a tile
        holds both. int8 and int4 are quantised on the way, int8 with a scale per output, int4 per output and
        ``group_size`` (32, 64 or 128) inputs; or kept as they are where parts are codes (uint8), scales and zero points
        [n_i, 1 or groups], of int8 128 more than the numbers they stand for. ``rounding``: of the rows that int8 and int4
        are multiplied with (csrc/cpu/packed_linear.h); the packed bytes don't depend on it. ``num_experts``: of as many matrices of one shape the
        parts, the first one's first. ``behind``: bf16 of which every part lies in a ``MappedFile`` is only seen to be
        finite, and products read it there until ``pack_piece`` is done. Releases the GIL."""
    @property
    def is_packed(self) -> bool: ...
    def pack_piece(self, num_threads: int) -> bool:
        """Pack some 8 MB of what was left for it, from any thread, beside steps that use it, whose bits stay. Whether
        that was all. Releases the GIL."""
    @property
    def num_outputs(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_inputs(self) -> int: ...
    @property
    def format(self) -> str: ...
    @property
    def group_size(self) -> int: ...
    @property
    def rounding(self) -> str: ...
    @property
    def row_format(self) -> str | None:
        """How rows are quantised for it, equal for weights that take the same rows; None: not at all."""
    @property
    def num_bytes(self) -> int: ...
    @property
    def is_finite(self) -> bool:
        """Whether no part held a NaN or an infinity; always of what was read."""
    def order_inputs(self, order: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Say that the packed matrix's inputs are these of a row's. NativeError for what isn't an order, where rows
        aren't quantised, and of experts."""
    layout_version: int
    """Counted up when packing gives other bytes."""
    @staticmethod
    def read(
        *,
        file: MappedFile,
        offset: int,
        num_bytes: int,
        checksum: int,
        num_outputs: int,
        num_inputs: int,
        format: PackFormat,
        gated: bool = False,
        group_size: int = 0,
        rounding: RowRounding = "outliers",
        num_threads: int = 0,
        num_experts: int = 1,
    ) -> LinearWeight:
        """What an equal weight's ``packed`` was when it was written to a file, left there. Raises NativeError if the file
        holds something else. Releases the GIL."""
    def packed(self) -> npt.NDArray[np.uint8]:
        """A read-only view of the panels of ``csrc/cpu/packed_linear.h``, for files and other devices."""
    def checksum(self) -> int:
        """Of ``packed``, 64 bits. Releases the GIL."""
    def unpack(self) -> npt.NDArray[np.float32]:
        """The matrix back in row-major float32 (tests)."""

# ---------------------------------------------------------------- graph

@final
class KvCache:
    """Memory of all blocks and layers, reserved with mmap, touched shortly before use."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: Literal["fp32", "bf16", "int8", "e4m3", "e5m2"],
        is_latent: bool = False,
        fixed_scales: Sequence[float] = (),
    ) -> None:
        """``is_latent``: of keys alone, which are the values, too. ``fixed_scales``: of e4m3 and e5m2, each
        layer's of keys and of values; (): 1."""
    @staticmethod
    def block_bytes(
        *,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        is_latent: bool = False,
    ) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def bytes_per_block(self) -> int:
        """Of a block's memory in all layers."""
    def lay_pages_ahead(self, num_used: int) -> None:
        """Let a thread touch the memory of blocks from ``num_used`` on: at most 64 MiB of it."""

    def read(
        self, layer: int, block_id: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """K and V of a block as [block_size, num_kv_heads, head_dim] float32 (tests)."""

    def copy_out(self, block_id: int, target: bytearray | memoryview) -> None:
        """Put a block's memory of every layer into ``target``, one layer after the other."""

    def copy_in(self, block_id: int, content: bytes | bytearray) -> None:
        """Make a block what ``copy_out`` gave."""

    def write_out(self, writer: BlockWriter, name: str, block_id: int) -> None:
        """Have a block written as ``copy_out`` would give it; its content stays until the writer's
        pool evicts it."""

@final
class Handle:
    """A value of the step graph: no data, no arithmetic, no truth value."""

    name: str
    dtype: str
    columns: int
    rows: RowSymbol

@final
class LoraTable:
    """LoRA adapters by slot: what ``Step.add`` was given. A slot may be changed while steps run that don't refer to it."""

    def __init__(
        self, linears: Sequence[tuple[int, int]], *, dtype: Literal["fp32", "bf16"]
    ) -> None:
        """``linears``: inputs and outputs of each that adapters may add to, by linear id."""
    def set(
        self, slot: int, adapter: Sequence[Sequence[tuple[LinearWeight, LinearWeight, int]]]
    ) -> None:
        """By linear id up to three parts: A [rank, inputs], B [outputs, rank], first output. The weights are kept alive."""
    def clear(self, slot: int) -> None: ...

def assign_offsets(lifetimes: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Places in one arena for values of so many bytes that live from a first node to a last one:
    the offsets in order, and the bytes of all."""

@final
class Graph:
    """A recorded list of kernel calls, replayed by the worker for every step."""

    def __init__(
        self,
        *,
        max_tokens: int,
        max_seqs: int,
        max_logit_rows: int,
        max_blocks_per_seq: int,
        block_size: int,
        act_dtype: Literal["fp32", "bf16"],
        instruction_set: str = "",
    ) -> None: ...
    def embed(
        self,
        table: npt.NDArray[np.generic],
        scale: float = 1.0,
        format: BlockFormat | Literal[""] = "",
    ) -> Handle:
        """Rows of ``table`` [vocab, hidden] (fp32, fp16, or bf16 as uint16; blocks of ``format`` as uint8 [vocab, bytes];
        kept alive) by token id -> fp32 [T, hidden]."""
    def add_positions(
        self,
        x: Handle,
        table: npt.NDArray[np.generic],
        offset: int,
        format: BlockFormat | Literal[""] = "",
    ) -> Handle:
        """Rows of ``table`` by position + ``offset`` added to fp32 [T, n] in place."""
    def add_token_types(self, x: Handle, table: npt.NDArray[np.generic]) -> Handle:
        """The same by token type."""
    def norm(
        self,
        x: Handle,
        weight: npt.NDArray[np.float32] | None,
        bias: npt.NDArray[np.float32] | None,
        eps: float,
        *,
        kind: Literal["none", "rms", "layer"],
        residual: Handle | None = None,
        out_dtype: Literal["fp32", "act"] = "act",
        reader: LinearWeight | None = None,
    ) -> Handle:
        """fp32 [R, n] -> [R, n]; None: ones, zeros. ``residual``: fp32 [R, n], added in place and returned."""
    def norm_heads(
        self,
        x: Handle,
        weight: npt.NDArray[np.float32],
        bias: npt.NDArray[np.float32] | None,
        eps: float,
        *,
        kind: Literal["none", "rms", "layer"],
        first_column: int,
        num_groups: int,
    ) -> Handle:
        """Columns of fp32 [R, n] from first_column on, as many as weights, normed in groups, in place."""
    def rms_norm(
        self,
        x: Handle,
        weight: npt.NDArray[np.float32],
        eps: float,
        reader: LinearWeight | None = None,
    ) -> Handle:
        """fp32 [R, n] -> act dtype [R, n], or quantised as products with ``reader`` take it."""
    def linear(
        self,
        x: Handle,
        weight: LinearWeight | list[LinearWeight],
        *,
        bias: npt.NDArray[np.float32] | None = None,
        activation: Literal["", "silu", "gelu_tanh", "gelu", "relu", "relu2"] = "",
        residual: Handle | None = None,
        out_dtype: Literal["fp32", "act"] = "fp32",
        gated: bool = True,
    ) -> Handle:
        """act [R, k] -> [R, n]; rows are quantised first if the weight is, by its ``rounding``. ``activation``: of a ``gated`` weight the result is act(gate) * up, [R, n / 2] in act dtype, else act(y).
        A list: the parts of one weight, each in its own format.
        ``residual``: fp32 [R, n], added in place and returned."""
    def join(self, group: RankGroup) -> None:
        """Before anything is recorded: this is the graph of one of the group's ranks."""
    def summed_linear(
        self,
        x: Handle,
        slices: list[LinearWeight],
        *,
        bias: npt.NDArray[np.float32] | None = None,
        residual: Handle | None = None,
        table: LoraTable | None = None,
        linear_ids: Sequence[int] = (),
    ) -> Handle:
        """The inputs' slices one after the other; summed in their order, over all ranks. To each
        slice's products adapters add what ``table`` has under its id."""
    def summed_experts(
        self,
        x: Handle,
        routes: Handle,
        slices: list[LinearWeight],
        *,
        bias: npt.NDArray[np.float32] | None = None,
        residual: Handle,
    ) -> Handle:
        """The same of experts' outputs; ``bias`` is added by one rank alone."""
    def norm_all_heads(
        self,
        qkv: Handle,
        q_weight: npt.NDArray[np.float32],
        k_weight: npt.NDArray[np.float32],
        eps: float,
        *,
        head_dim: int,
        num_alike: int = 1,
    ) -> Handle:
        """fp32 [T, n], in place: the root mean square norm over all of the model's heads of queries,
        of which the first columns are this rank's, and over those of keys, of which so many
        neighbouring ranks have the same."""
    def gathered_linear(
        self,
        x: Handle,
        weight: LinearWeight | list[LinearWeight],
        *,
        bias: npt.NDArray[np.float32] | None = None,
        first_column: int,
    ) -> Handle:
        """Logits fp32 [L, vocab], of which this rank computes those from first_column on."""
    def meet(self, x: Handle) -> None:
        """What follows reads what all ranks have written; rank 0 alone waits."""
    def gated_activation(self, x: Handle, activation: Activation) -> Handle:
        """act(gate) * up: fp32 [R, 2 n] -> act dtype [R, n]."""
    def activation(self, x: Handle, activation: Activation) -> Handle:
        """act(x): fp32 [R, n] -> act dtype [R, n]."""
    def soft_cap(self, x: Handle, cap: float) -> Handle:
        """cap tanh(x / cap), fp32 in place."""
    def clip(self, x: Handle, cap: float) -> Handle:
        """x between -cap and cap, fp32 in place."""
    def lora_add(self, x: Handle, y: Handle, table: LoraTable, linear_id: int) -> Handle:
        """B A x of the rows' adapters added to ``y`` in place: act [T, k], fp32 [T, n]. A graph has one table."""
    def route(
        self,
        x: Handle,
        *,
        top_k: int,
        scoring: Literal["softmax", "sigmoid", "sparsemixer"],
        bias: npt.NDArray[np.float32] | None = None,
        num_groups: int = 1,
        top_groups: int = 1,
        group_best: int = 1,
        normalizes: bool = False,
        scale: float = 1.0,
        threshold: float = 0.0,
    ) -> Handle:
        """Ids of each row's experts, ascending, and their weights: fp32 [T, experts] -> fp32 [T, 2 top_k]."""
    def grouped_linear(
        self,
        x: Handle,
        routes: Handle,
        weight: LinearWeight,
        *,
        bias: npt.NDArray[np.float32] | None = None,
        activation: Activation | Literal[""] = "",
        residual: Handle | None = None,
    ) -> Handle:
        """act [T or E, k] -> act [E, n], of the last route's experts. ``residual``: fp32 [T, n], to which experts' outputs
        times weights are added in place in ascending order; returned."""
    def head_linear(
        self,
        x: Handle,
        weight: LinearWeight,
        *,
        num_heads: int,
        out_dtype: Literal["fp32", "act"] = "fp32",
    ) -> Handle:
        """Each head's columns times its own matrix: act [R, heads k] -> [R, heads n]."""
    def rope_cache_write(
        self,
        qkv: Handle,
        cache: KvCache,
        layer: int,
        *,
        num_q_heads: int,
        cos: npt.NDArray[np.float32],
        sin: npt.NDArray[np.float32],
        q_norm: npt.NDArray[np.float32] | None = None,
        k_norm: npt.NDArray[np.float32] | None = None,
        norm_eps: float = 0.0,
        latent: Handle | None = None,
    ) -> Handle:
        """fp32 qkv [T, (hq + 2 hkv) d] -> rotated q, act [T, hq d]; K and V go to the cache. cos, sin: [max positions, rotary / 2],
        rotate-half form, rotary <= d."""
    def attention(
        self,
        q: Handle,
        cache: KvCache,
        layer: int,
        *,
        num_q_heads: int,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        slopes: npt.NDArray[np.float32] | None = None,
        sees_later: bool = False,
        relative: npt.NDArray[np.float32] | None = None,
    ) -> Handle:
        """Causal paged attention, act [T, hq d] -> act [T, hq d]. window: keys seen counting the query's own; 0 = all.
        sees_later: all keys of sequences that are in the step as a whole. relative: see ``ops.attention``."""
    def gather_logit_rows(self, x: Handle) -> Handle:
        """[T, n] -> [L, n]: the rows whose logits are wanted."""
    def kept_rows(self, table: npt.NDArray[np.generic]) -> Handle:
        """Rows of ``table`` [slots, n] (fp32, or bf16 as uint16; kept alive) by token rows' slots -> fp32 [T, n]."""
    def keep_rows(self, x: Handle, table: npt.NDArray[np.generic]) -> None:
        """Write ``x`` to rows of ``table``, which has its dtype: token rows to their slots; logit rows to the slots of the
        positions behind theirs."""
    def spread_columns(self, x: Handle, columns: npt.NDArray[np.int32], num_columns: int) -> Handle:
        """Column i of fp32 [R, k] becomes column columns[i], ascending, of fp32 [R, num_columns]; the others are as
        unlikely as what is banned."""
    def sample(self, logits: Handle) -> None:
        """fp32 [L, vocab]: sampled ids, log-probabilities and top-n into the step buffer."""
    def output(self, x: Handle) -> None:
        """Keep a handle's rows readable after the step with ``read`` (tests)."""
    def finish(self) -> None:
        """Assign arena offsets from liveness; nothing can be recorded afterwards."""
    def read(self, x: Handle, num_rows: int) -> npt.NDArray[np.float32]: ...
    @property
    def arena_bytes(self) -> int: ...
    def describe(self) -> list[str]:
        """One line per node: op, operands, shapes, dtypes, offsets."""
    def measure_nodes(self, num_tokens: int, as_threads: int = 0) -> None:
        """Start anew to measure the nodes of steps of ``num_tokens`` tokens; 0 stops.

        ``as_threads``: cut into chunks as for so many threads; 0: as for the worker's. Not while a
        step runs.
        """
    def node_times(self) -> list[tuple[int, int, int, int]]:
        """Of each node: steps measured, their wall time, their CPU time of all threads (ns) and
        their chunks."""

@final
class RankGroup:
    """Memory in which the ranks of a model find steps, each other's sums, and logits."""

    def __init__(
        self,
        *,
        num_ranks: int,
        rank: int,
        descriptor: int = -1,
        max_tokens: int,
        max_seqs: int,
        max_logit_rows: int,
        max_blocks_per_seq: int,
        block_size: int,
        num_columns: int,
        vocab_size: int,
    ) -> None:
        """``descriptor``: of rank 0's, which makes the memory."""
    @property
    def descriptor(self) -> int: ...
    @property
    def is_lost(self) -> bool: ...
    @property
    def reason(self) -> str:
        """Why it is lost."""
    def wait_until_over(self) -> None:
        """Until it is closed or lost. Releases the GIL."""
    def lose(self, why: str) -> None:
        """All waits end and all steps fail, in every rank."""
    def close(self) -> None:
        """``serve`` returns in the other ranks."""
    def add_order(self) -> None:
        """Rank 0's: steps submitted from now on wait in each other rank for one more
        ``finish_order``."""
    def finish_order(self) -> None: ...
    def serve(self, graph: Graph, num_threads: int) -> None:
        """Replay rank 0's steps until the group is closed; NativeError when it is lost."""

class Worker:
    """So many threads that execute steps, on the cores that the thread that makes it may use."""

    def __init__(self, num_threads: int, beside: Worker | None = None) -> None:
        """``beside``: another one, whose steps and this one's run one after the other."""
    num_threads: int
    def submit(self, graph: Graph, step: Step, completion_fd: int) -> None:
        """Queue a step; when it is done, 1 is added to the eventfd ``completion_fd``."""
    def run(self, graph: Graph, step: Step) -> None:
        """Submit and wait (tests, embedding without a loop). Releases the GIL."""
    def drain(self) -> None:
        """Wait until every step is done that was submitted before. Releases the GIL."""
    def close(self) -> None:
        """Finish what is queued and join every thread that no other worker needs. Releases the
        GIL."""

@final
class DeviceWorker:
    """Two threads that launch steps of a started step list and read their results, without
    Python."""

    def __init__(self, library: str, step_list: int, group: RankGroup | None = None) -> None:
        """``library``: the file of the CUDA kernels; ``step_list``: an ``LmiStepList*`` of it, which
        must outlive the worker; ``group``: of the ranks that run what this one, rank 0, does."""
    @property
    def capture_error(self) -> str:
        """Why decode steps are captured no more; "" if they are."""
    def submit(self, step: Step, completion_fd: int) -> None:
        """As ``Worker.submit``; a step that follows another takes its tokens on the device."""
    def run(self, step: Step) -> None:
        """Submit and wait (tests). Releases the GIL."""
    def drain(self) -> None:
        """Wait until every submitted step is done. Releases the GIL."""
    def close(self) -> None:
        """Finish what is queued and join both threads. Releases the GIL."""

def serve_device_rank(group: RankGroup, library: str, step_list: int) -> None:
    """Launch rank 0's steps until the group is closed; the process ends when it is lost."""

@final
class TokenIndex:
    """Texts of tokens, found again by the few tokens before a place (``csrc/draft``). When it is full,
    the older half is forgotten."""

    def __init__(self, *, max_tokens: int, num_key_tokens: int) -> None: ...
    def __len__(self) -> int: ...
    def add_text(self, token_ids: Sequence[int]) -> None: ...

@final
class GuessRates:
    """How often guesses were right in all texts that share it; ``memory``: the weight of what was
    seen, a guess later."""

    def __init__(self, *, memory: float) -> None: ...

class Drafter:
    """What one text may go on with: what followed the place, in it or in ``history``, that is most
    like its end."""

    def __init__(
        self,
        *,
        max_tokens: int,
        min_match: int,
        max_match: int,
        history: TokenIndex | None = None,
        rates: GuessRates | None = None,
    ) -> None:
        """Places are found by ``min_match`` tokens, which are the history's key, and judged by
        ``max_match``; ``max_tokens``: of its own text that are remembered. ``rates`` are what its
        chances start from, and it adds to them."""
    def start(self, token_ids: Sequence[int]) -> None:
        """The text's first tokens, which nobody had to guess."""
    def extend(self, token_ids: Sequence[int]) -> None:
        """The next tokens, which are compared with what would have been drafted."""
    def follow(self, text: Sequence[int]) -> bool:
        """``extend`` by what ``text`` has beyond the tokens known; whether there is a draft then."""
    def draft(self, max_tokens: int, behind: Sequence[int] = ()) -> tuple[list[int], list[float]]:
        """What may follow, behind the tokens of ``behind``, at most so many tokens; and for each the
        chance that it and those before it are right."""
    def next_chances(self, max_tokens: int) -> list[float]:
        """As those of ``draft`` once the next token has come, as far as is known before."""

@final
class StepCosts:
    """What steps take by their number of rows: means of the last ones, with straight lines between the
    numbers that were seen."""

    def __init__(self) -> None: ...
    def note(self, num_rows: int, seconds: float) -> None:
        """A step was executed."""
    def note_gap(self, seconds: float, *, ahead: bool) -> None:
        """So long after a step the next one began; ``ahead``: it was submitted before."""
    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
    def seconds(self, num_rows: int, *, ahead: bool) -> float:
        """From the end of a step to that of the next; 0 before anything was measured."""
    def depths(
        self,
        num_rows: int,
        num_tokens: float,
        chances: Sequence[Sequence[float]],
        most: int,
        *,
        ahead: bool,
    ) -> list[int]:
        """How many drafts of each sequence, at most ``most`` together, bring most tokens a second in
        a step of ``num_rows`` rows and ``num_tokens`` tokens without. ``chances``: of each being
        right, in falling order; ``ahead``: steps without drafts are submitted before the last one's
        tokens are known."""
    def common_depth(
        self,
        drafting: StepCosts,
        chances: Sequence[float],
        num_rows: int,
        num_tokens: float,
        deepest: int,
        extra_s: float,
        *,
        ahead: bool,
    ) -> int:
        """The same for drafts of a model with costs of its own: of each sequence equally many, at
        most ``deepest``. ``chances``: that one is right behind right ones; ``extra_s``: what
        drafting takes beside, a token."""
