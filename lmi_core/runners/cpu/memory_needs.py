"""What memory a model takes, as its headers say, and what this process's engines have taken."""

from __future__ import annotations

import math
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lmi_core import _native
from lmi_core.errors import InsufficientMemoryError
from lmi_core.files import repack_directory
from lmi_core.models.eagle_head import EagleHead
from lmi_core.models.found_model import FoundModel
from lmi_core.models.spec import DecoderSpec
from lmi_core.runners.cpu.core_groups import num_weight_nodes
from lmi_core.runners.cpu.cpu_model import block_bytes
from lmi_core.runners.draft_steps import draft_rows
from lmi_core.runners.step_memory import KvCacheSize, StepSizes, size_kv_cache
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.units import megabytes
from lmi_core.weights.hf_config import QuantizationSettings
from lmi_core.weights.mxfp4 import MXFP4_ENDINGS
from lmi_core.weights.quantized.methods import (
    MXFP4,
    fp4_format,
    has_few_bits,
    widened_format,
)
from lmi_core.weights.repack_cache import MIN_CHECKPOINT_BYTES

_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 4.25 / 8}
_BYTES |= {"llm_int8": 1.0, "eetq": 1.0, "smoothquant": 1.0, "nf4": 4.5 / 8, "fp4": 4.5 / 8}
"""Of a weight; int4 with the scale and zero point of 128, nf4 and fp4 with the scale of 64."""
_FEW_BITS_BYTES = 4.5 / 8
"""Of a weight of 2 or 3 bits, in blocks of 4 with a scale of 32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """In bytes."""

    weights: int
    kv_cache: int
    blocks: KvCacheSize
    """The KV cache of one process."""
    workspace: int
    """Of a step's activations."""
    stored: int
    """Files that are mapped while they are read."""

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.workspace

    def describe(self) -> str:
        return (
            f"about {megabytes(self.total)} (weights {megabytes(self.weights)}, KV cache up to "
            f"{megabytes(self.kv_cache)}, steps {megabytes(self.workspace)})"
        )


def estimate(found: FoundModel, claimed_bytes: int = 0) -> Estimate:
    """What the CPU engine takes for a model whose files are here, and for what drafts for it;
    ``claimed_bytes``: what other engines have. Raises InsufficientMemoryError for a KV cache that
    can't be had."""
    config, models = found.asked, (found, *found.drafts)
    pool_bytes = _pool_block_bytes(found)
    stored = sum(each.checkpoint.stored_bytes for each in models)
    sizes = StepSizes.of_model(config, found.spec)
    blocks = size_kv_cache(
        config,
        block_bytes=pool_bytes,
        max_model_len=sizes.max_model_len,
        claimed_bytes=claimed_bytes,
    )
    return Estimate(
        kv_cache=blocks.num_bytes,
        blocks=blocks,
        weights=sum(map(_weight_bytes, models))
        + (0 if found.heads is None else found.heads.num_weights),
        workspace=_workspace_bytes(found, sizes)
        + sum(_draft_workspace_bytes(config, draft.spec) for draft in found.drafts),
        stored=stored,
    )


def _pool_block_bytes(found: FoundModel) -> int:
    """Of a KV block of a model, in all its ranks, and of what drafts for it."""
    config, spec, dtype = found.asked, found.spec, found.dtype
    if found.slicing.num_ranks > 1:
        spec = found.slicing.spec(spec)
    num_bytes = found.slicing.num_ranks * block_bytes(config, spec, dtype)
    for draft in found.drafts:
        num_bytes += block_bytes(draft.asked, draft.spec, draft.dtype)
    if isinstance(found.heads, EagleHead):
        # That of the head's layer, and the states that it goes on from.
        spec = found.heads.spec
        num_bytes += block_bytes(config, spec, dtype)
        num_bytes += config.block_size * spec.hidden_size * (4 if dtype == "fp32" else 2)
    return num_bytes


def _weight_bytes(found: FoundModel) -> int:
    settings = found.checkpoint.quantization
    if settings is not None and not _is_made_anew(settings, found):
        return found.checkpoint.stored_bytes + _copied_bytes(found) + _latent_bytes(found)
    spec, names, dtype = found.spec, found.spec.names, found.dtype
    shapes = dict(found.shapes)
    embedding = math.prod(shapes.pop(names.embedding))
    head_name = f"{names.head}.weight"
    head = embedding if spec.tied_head else math.prod(shapes.pop(head_name, (0,)))
    head = head if spec.has_head else 0
    matrices = sum(_num_weights(name, shape) for name, shape in shapes.items())
    vectors = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 1)
    head_bytes = 1.0 if found.quantize else _BYTES[dtype]
    matrix_bytes = _BYTES[found.quantize or dtype]
    if settings is not None and not _is_widened(settings, found) and has_few_bits(settings):
        matrix_bytes = _FEW_BITS_BYTES
    matrix_bytes *= matrices
    num_bytes = int(matrix_bytes + head * head_bytes + 4 * vectors)
    return num_bytes + _copied_bytes(found) + _latent_bytes(found)


def _copied_bytes(found: FoundModel) -> int:
    """Of an embedding in fp16, which becomes floats; others are read where they lie."""
    embedding = found.tensors[found.spec.names.embedding]
    is_kept = embedding.dtype != "F16" or found.checkpoint.gguf_architecture is not None
    return 0 if is_kept else 4 * math.prod(found.shapes[found.spec.names.embedding])


def _latent_bytes(found: FoundModel) -> int:
    """Of the ways to and from the latent space, which are widened and filled up with zeros."""
    attention = found.spec.attention
    if (latent := attention.latent) is None:
        return 0
    columns = latent.nope_dim + latent.rope_dim + latent.value_dim
    num_weights = attention.num_q_heads * (latent.rope_dim + latent.kv_rank) * columns
    return int(found.spec.num_layers * num_weights * _BYTES[found.dtype])


def _is_widened(settings: QuantizationSettings, found: FoundModel) -> bool:
    return widened_format(settings, keeps_orders=found.keeps_orders) is not None


def _is_made_anew(settings: QuantizationSettings, found: FoundModel) -> bool:
    """Whether the checkpoint's matrices take other memory than its files do."""
    has_choice = settings.method == MXFP4 or fp4_format(settings) is not None
    is_other = _is_widened(settings, found) or has_few_bits(settings)
    return is_other or (has_choice and found.asked.quantize is not None)


def _num_weights(name: str, shape: tuple[int, ...]) -> int:
    """Of a matrix, or of several in one tensor; MXFP4's bytes hold two."""
    if len(shape) == 1 or name.endswith(MXFP4_ENDINGS[1]):
        return 0
    return math.prod(shape) * (2 if name.endswith(MXFP4_ENDINGS[0]) else 1)


def check_memory(found: FoundModel, claimed_bytes: int = 0) -> Estimate:
    """What the model takes. Raises InsufficientMemoryError, with the numbers, unless it fits beside
    what other engines have taken: into the memory that the process may use, and its address
    space."""
    config, needs = found.asked, estimate(found, claimed_bytes)
    limit = int(_native.cpu_info()["memory_limit_bytes"])
    if needs.total > limit - claimed_bytes:
        taken = f", of which other models have taken {megabytes(claimed_bytes)}"
        raise InsufficientMemoryError(
            f"the model in {config.model} needs {needs.describe()}; this process may use "
            f"{megabytes(limit)}{taken if claimed_bytes else ''}: set quantize or a smaller "
            "kv_cache_bytes, unload a model, or raise the control group's limit",
            field="model",
        )
    room = free_address_bytes()
    if room is not None and needs.total + needs.stored > room:
        raise InsufficientMemoryError(
            f"the model in {config.model} needs {needs.describe()} and maps "
            f"{megabytes(needs.stored)} of files; ulimit -v leaves {megabytes(max(0, room))} of "
            "addresses: raise it, or set a smaller kv_cache_bytes",
            field="model",
        )
    return needs


def shares_weights(config: EngineConfig, stored_bytes: int) -> bool:
    """Whether processes find the packed weights of a checkpoint of this size in the cache."""
    is_kept = repack_directory(config.repack_cache_dir) is not None
    return is_kept and stored_bytes >= MIN_CHECKPOINT_BYTES


def estimate_copies(
    found: FoundModel,
    num_copies: int,
    claimed_bytes: int = 0,
    allowed: Sequence[Sequence[int]] = (),
) -> Estimate:
    """As ``estimate``, of so many processes together. They share packed weights in the repack
    cache, those of each NUMA node, and divide the part of the memory that KV caches get.
    ``allowed``: the cores of a job's processes, as for ``own_groups``."""
    config = found.asked
    each = replace(config, num_models=config.num_models * num_copies)
    needs = estimate(replace(found, asked=each), claimed_bytes)
    num_weights = num_copies
    if shares_weights(config, needs.stored):
        degree = config.tensor_parallel_degree
        num_weights = num_weight_nodes(config.cpu_binding, degree, num_copies, allowed)
    return replace(
        needs,
        weights=num_weights * needs.weights,
        kv_cache=num_copies * needs.kv_cache,
        workspace=num_copies * needs.workspace,
    )


def check_copies(
    found: FoundModel,
    num_copies: int,
    claimed_bytes: int = 0,
    *,
    allowed: Sequence[Sequence[int]] = (),
) -> Estimate:
    """What the copies of a model take together, as ``estimate_copies`` says. Raises
    InsufficientMemoryError where they don't fit beside what other engines have taken."""
    needs = estimate_copies(found, num_copies, claimed_bytes, allowed)
    limit = int(_native.cpu_info()["memory_limit_bytes"])
    if needs.total > limit - claimed_bytes:
        raise InsufficientMemoryError(
            f"{num_copies} copies of the model in {found.asked.model} need {needs.describe()}; "
            f"{megabytes(max(0, limit - claimed_bytes))} are left: set a smaller num_copies, "
            "quantize or a smaller kv_cache_bytes",
            field="num_copies",
        )
    return needs


@contextmanager
def memory_errors() -> Iterator[None]:
    """Says of memory that runs out while a model is loaded what it is: InsufficientMemoryError."""
    try:
        yield
    except (MemoryError, _native.NativeError, OSError, RuntimeError) as error:
        text = str(error)
        words = ("Cannot allocate memory", "can't start new thread", "Unable to allocate")
        if not isinstance(error, MemoryError) and not any(word in text for word in words):
            raise
        raise InsufficientMemoryError(
            f"memory ran out while the model was loaded ({text or 'MemoryError'}): see the limits "
            "of ulimit -v and of the control group, or set quantize or a smaller kv_cache_bytes",
            field="kv_cache_bytes",
        ) from None


def free_address_bytes() -> int | None:
    """What ``ulimit -v`` leaves of the address space; None: it sets no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return limit - num_pages * resource.getpagesize()


def _workspace_bytes(found: FoundModel, sizes: StepSizes) -> int:
    """Of all ranks. A row has its residual, its widest linear's input and output, and q, k and v;
    logits are fp32 of the whole vocabulary, what is pooled of the hidden size."""
    spec, num_ranks = found.spec, found.slicing.num_ranks
    result_columns = spec.vocab_size if spec.has_head else spec.hidden_size
    row_bytes = _row_bytes(spec) + (8 * spec.hidden_size if num_ranks > 1 else 0)  # others read it
    result_bytes = sizes.max_logit_rows * result_columns * 4
    return num_ranks * (sizes.max_num_tokens * row_bytes + result_bytes)


def _draft_workspace_bytes(config: EngineConfig, spec: DecoderSpec) -> int:
    return draft_rows(config) * _row_bytes(spec) + config.max_num_seqs * spec.vocab_size * 4


def _row_bytes(spec: DecoderSpec) -> int:
    row_bytes = 4 * (2 * spec.hidden_size + 2 * spec.intermediate_size)
    if spec.experts is not None:
        # Each of a row's experts has an input and an output of its own.
        row_bytes += 8 * spec.experts.top_k * (spec.hidden_size + spec.experts.intermediate_size)
    return row_bytes


class MemoryClaims:
    """Bytes by engine, so that none counts another's as free: its weights, and its KV cache to the
    full size that it may grow to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_bytes: dict[int, int] = {}

    def others_bytes(self, owner: object) -> int:
        """What all but ``owner`` have taken."""
        with self._lock:
            return self._others_bytes(owner)

    def claim(self, owner: object, num_bytes: int) -> None:
        """Count ``num_bytes`` as taken until ``owner`` releases them."""
        with self._lock:
            self._num_bytes[id(owner)] = num_bytes

    def claim_checked(self, owner: object, check: Callable[[int], Estimate]) -> Estimate:
        """As ``claim``, of what ``check`` returns for the bytes that others have, who take none
        between its look and the claim; returns it. What it raises changes nothing."""
        with self._lock:
            needs = check(self._others_bytes(owner))
            self._num_bytes[id(owner)] = needs.total
            return needs

    def release(self, owner: object) -> None:
        with self._lock:
            self._num_bytes.pop(id(owner), None)

    def _others_bytes(self, owner: object) -> int:
        return sum(num for key, num in self._num_bytes.items() if key != id(owner))


HOST_MEMORY = MemoryClaims()
"""Main memory; a device's own driver knows what is free there."""
