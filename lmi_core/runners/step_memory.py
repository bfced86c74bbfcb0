"""What the loop and a runner share: the block pool and its size, the tables, the step buffers."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmi_core import _native
from lmi_core.errors import InsufficientMemoryError, UserError
from lmi_core.runners.prefix_secret import derived, installation_secret

if TYPE_CHECKING:
    from lmi_core.models.spec import DecoderSpec
    from lmi_core.settings.engine_config import EngineConfig

NUM_STEPS = 3
"""Two are in flight while the results of the one before are delivered."""
MAX_LOGIT_ROWS = 256
"""Rows whose logits one step computes; prompt log-probabilities go in chunks of at most this."""
DEFAULT_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Of a step, by the type of device; more where more sequences run."""
DEFAULT_CONTEXT_TOKENS = 4096
"""The default pool has room for max_num_seqs sequences of this length (or the model's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """Capacities of a runner's steps; all are final."""

    vocab_size: int
    max_model_len: int
    max_num_tokens: int
    max_logit_rows: int
    max_logprobs: int
    """The whole vocabulary at most."""
    max_blocks_per_seq: int

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        *,
        vocab_size: int,
        max_positions: int,
        max_num_tokens: int,
        pools: bool = False,
        takes_whole: bool = False,
    ) -> StepSizes:
        """``max_num_tokens``: of a step, where ``config`` says nothing. ``pools``: every row may be
        wanted. ``takes_whole``: the longest prompt must fit into a step."""
        max_model_len = config.max_model_len or max_positions
        max_num_tokens = config.max_num_batched_tokens or max_num_tokens
        if takes_whole:
            max_num_tokens = max(max_num_tokens, max_model_len)
        return cls(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_num_tokens=max_num_tokens,
            max_logit_rows=max(MAX_LOGIT_ROWS, config.max_num_seqs, max_num_tokens * pools),
            max_logprobs=min(config.max_logprobs, vocab_size),
            max_blocks_per_seq=-(-max_model_len // config.block_size),
        )

    @classmethod
    def of_model(cls, config: EngineConfig, spec: DecoderSpec, device: str = "cpu") -> StepSizes:
        """Of a model on this type of device."""
        return cls.of(
            config,
            vocab_size=spec.vocab_size,
            max_positions=spec.max_positions,
            max_num_tokens=max(DEFAULT_BATCHED_TOKENS[device], config.max_num_seqs),
            pools=not spec.has_head,
            takes_whole=not spec.is_causal,
        )


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Owned by the loop's thread, but for the one step that was submitted."""

    pool: _native.BlockPool
    block_tables: _native.BlockTables
    sampling: _native.SamplingTable
    steps: tuple[_native.Step, ...]

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        sizes: StepSizes,
        num_blocks: int,
    ) -> StepMemory:
        tables = _native.BlockTables(config.max_num_seqs, sizes.max_blocks_per_seq)
        sampling = _native.SamplingTable(config.max_num_seqs, sizes.vocab_size)
        steps = tuple(
            _native.Step(
                max_tokens=sizes.max_num_tokens,
                max_seqs=config.max_num_seqs,
                max_logit_rows=sizes.max_logit_rows,
                max_logprobs=sizes.max_logprobs,
                max_copies=config.max_num_seqs,
                block_size=config.block_size,
                block_tables=tables,
                sampling=sampling,
            )
            for _ in range(NUM_STEPS)
        )
        key = config.prefix_key or prefix_hash_key(config.prefix_cache_dir)
        pool = _native.BlockPool(num_blocks, config.block_size, key)
        return cls(pool, tables, sampling, steps)


def prefix_hash_key(directory: Path | None) -> bytes:
    """What a pool's hashes are keyed with: the same after every start where prefixes outlast it."""
    if directory is not None:
        with suppress(OSError):  # who opens the directory says so
            return derived(installation_secret(directory), "prefix hashes", 16)
    return os.urandom(16)


@dataclass(frozen=True, slots=True)
class KvCacheSize:
    """The size of the block pool and why it has that size."""

    num_blocks: int
    num_bytes: int
    reason: str


def size_kv_cache(
    config: EngineConfig,
    *,
    block_bytes: int,
    max_model_len: int,
    spare: tuple[int, str] | None = None,
    claimed_bytes: int = 0,
) -> KvCacheSize:
    """Decide how many blocks the pool has. ``spare``: memory in bytes that is the pool's to fill,
    and what it is; None: a part of the machine's, for as many tokens as are likely wanted.
    ``claimed_bytes``: what other engines have taken of the machine's.

    Raises InsufficientMemoryError if the memory given can't hold one sequence of ``max_model_len``
    tokens, or isn't there; the message names the values that would work.
    """
    blocks_per_seq = -(-max_model_len // config.block_size)
    if config.kv_cache_bytes is not None:
        budget, reason = config.kv_cache_bytes, "kv_cache_bytes"
    elif spare is not None:
        budget, reason = spare
    else:
        budget, reason = _default_budget(config.num_models, claimed_bytes)
    if config.kv_cache_bytes is not None and spare is None:
        _check_unclaimed(config.kv_cache_bytes, claimed_bytes)
    num_blocks = budget // block_bytes
    if config.max_batch_total_tokens is not None:
        most = -(-config.max_batch_total_tokens // config.block_size)
        if most < blocks_per_seq:
            raise UserError(
                f"max_batch_total_tokens={config.max_batch_total_tokens} is less than one sequence "
                f"of max_model_len={max_model_len} may have: raise it, or lower max_model_len",
                field="max_batch_total_tokens",
            )
        if most <= num_blocks:
            return KvCacheSize(most, most * block_bytes, "max_batch_total_tokens")
    if config.kv_cache_bytes is None and spare is None:
        tokens = min(max_model_len, DEFAULT_CONTEXT_TOKENS)
        wanted = config.max_num_seqs * -(-tokens // config.block_size)
        enough = f"{config.max_num_seqs} sequences of {tokens} tokens"
        if wanted < blocks_per_seq:
            wanted, enough = blocks_per_seq, f"one sequence of {max_model_len} tokens"
        if wanted <= num_blocks:
            num_blocks, reason = wanted, enough
    if num_blocks < blocks_per_seq:
        fitting = num_blocks * config.block_size
        needed = blocks_per_seq * block_bytes
        shorter = f"max_model_len to at most {fitting}, or " if fitting else ""
        raise InsufficientMemoryError(
            f"the KV cache of {budget / 2**20:.1f} MiB ({reason}) holds {fitting} tokens, but one"
            f" sequence of max_model_len={max_model_len} needs {needed / 2**20:.1f} MiB: set"
            f" {shorter}kv_cache_bytes to at least {needed}",
            field="kv_cache_bytes",
        )
    return KvCacheSize(num_blocks, num_blocks * block_bytes, reason)


def _default_budget(num_models: int, claimed_bytes: int) -> tuple[int, str]:
    """A quarter of the memory limit, shared by models that are loaded together; a model that comes
    later gets at most a quarter of what is left."""
    limit: int = _native.cpu_info()["memory_limit_bytes"]
    share, left = limit // 4 // num_models, max(0, limit - claimed_bytes) // 4
    if left < share:
        return left, "a quarter of the memory that no model has taken"
    if num_models > 1:
        return share, f"a quarter of the memory limit, shared by {num_models} models"
    return share, "a quarter of the memory limit"


def _check_unclaimed(kv_cache_bytes: int, claimed_bytes: int) -> None:
    limit = _native.cpu_info()["memory_limit_bytes"]
    if kv_cache_bytes > limit - claimed_bytes:
        raise InsufficientMemoryError(
            f"kv_cache_bytes={kv_cache_bytes} is more than is left: of {limit} bytes, weights and "
            f"KV caches have taken {claimed_bytes}; set kv_cache_bytes to at most "
            f"{max(0, limit - claimed_bytes)}, or unload a model",
            field="kv_cache_bytes",
        )
