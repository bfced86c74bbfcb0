"""What the headers and settings of a model's directory say of it, read and checked before it is
loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lmi_core.errors import MissingExtraError, ModelError, UserError
from lmi_core.models.draft_model import FIELD as DRAFT_MODEL
from lmi_core.models.draft_model import DraftHeads, check_vocabulary, draft_config
from lmi_core.models.eagle_head import find_eagle_head, has_eagle_head
from lmi_core.models.gguf_spec import gguf_spec
from lmi_core.models.medusa_heads import find_medusa_heads, has_medusa_heads
from lmi_core.models.pooling import PoolingSpec, read_pooling
from lmi_core.models.registry import family_of
from lmi_core.models.rope import override_rope
from lmi_core.models.slices import WHOLE, Slicing, slicing_of
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.tensor_check import held_tensors
from lmi_core.models.weights import answer_matrix
from lmi_core.settings.engine_config import EngineConfig, check_max_model_len
from lmi_core.text.calibration_text import read_text
from lmi_core.text.tokenizer import Tokenizer
from lmi_core.weights.checkpoint import Checkpoint
from lmi_core.weights.formats import Quantization, WeightFormat
from lmi_core.weights.hf_config import HfConfig, task_of
from lmi_core.weights.quantized.checkpoint import layout_of, notes_on_rows, quantization_at_load
from lmi_core.weights.quantized.stored_layers import StoredLayers
from lmi_core.weights.safetensors_file import TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """What a directory's headers and settings say of a model that can be loaded."""

    asked: EngineConfig
    """What it is to be loaded with."""
    checkpoint: Checkpoint
    config: HfConfig
    """Of the language model, with the rotary settings that were asked for."""
    spec: DecoderSpec
    shapes: Mapping[str, tuple[int, ...]]
    tensors: Mapping[str, TensorInfo]
    dtype: WeightFormat
    """Of activations, and of what isn't quantised."""
    quantized: StoredLayers
    quantize: Quantization | None
    """What matrices are quantised to while they are loaded."""
    pooling: PoolingSpec | None
    kv_scales: tuple[str, ...]
    """The tensors that are scales of an fp8 KV cache."""
    slicing: Slicing
    """What rank 0 has of it; ``WHOLE``: it is computed by one process."""
    keeps_orders: bool
    """Whether int4 whose inputs are in another order stays so, and isn't widened."""
    notes: tuple[str, ...]
    """What is served otherwise than the files say, for explanations and the log."""
    tokenizer: Tokenizer | None = None
    """Where it was read already: that of the one engine which takes this."""
    drafts: tuple[FoundModel, ...] = ()
    """The model that drafts for it."""
    heads: DraftHeads | None = None
    """What drafts for it instead."""
    drafted_by: str = ""
    """Who does, in words; "": nobody."""


def find_model(asked: EngineConfig, opened: Checkpoint | None = None) -> FoundModel:
    """Read and check all but the weights of the model of ``asked``, where its checkpoint was
    ``opened`` already, of that.

    Raises ModelError, naming every tensor that is missing, unexpected or of the wrong shape, and
    UserError for a length, a task or a degree of ranks that the model doesn't have.
    """
    checkpoint = opened or Checkpoint(asked.model)
    settings = checkpoint.quantization
    layout = None if settings is None else layout_of(settings)
    made = None if asked.quantize is None else quantization_at_load(checkpoint, asked.quantize)
    if made == "smoothquant":
        _check_smoothquant(asked)
    config, spec, pooling = spec_and_pooling(checkpoint.config, asked)
    if (architecture := checkpoint.gguf_architecture) is not None:
        spec = gguf_spec(spec, architecture, checkpoint.tensors)
        _check_gguf(asked)
    for token_id in config.eos_token_ids:
        if token_id >= spec.vocab_size:
            raise config.error(
                "eos_token_id", f"{token_id} is beyond the vocabulary of {spec.vocab_size}"
            )
    held = held_tensors(checkpoint, layout, spec)
    spec, shapes = held.spec, held.shapes
    if pooling is not None and pooling.answers is not None:
        shapes[answer_matrix(spec)] = (spec.vocab_size, spec.hidden_size)
    if asked.max_model_len is not None:
        check_max_model_len(asked.max_model_len, spec.max_positions)
    is_sliced = asked.tensor_parallel_degree > 1 or asked.tp_invariant
    slicing = slicing_of(asked, spec) if is_sliced else WHOLE
    # Rows are put into a matrix's order as they are rounded, for one matrix as a whole.
    rounds_rows = made is None and asked.device == "cpu" and asked.activations != "bf16"
    coded = made is not None or settings is not None
    keeps_orders = rounds_rows and spec.experts is None and slicing == WHOLE
    found = FoundModel(
        asked=asked,
        checkpoint=checkpoint,
        config=config,
        spec=spec,
        shapes=shapes,
        tensors=held.tensors,
        dtype=held.stored_format if asked.dtype == "auto" else asked.dtype,
        quantized=held.quantized,
        quantize=made,
        pooling=pooling,
        kv_scales=held.kv_scales,
        slicing=slicing,
        keeps_orders=keeps_orders,
        notes=(
            *spec.notes,
            *checkpoint.gguf_notes,
            *(notes_on_rows(checkpoint, asked, made, keeps_orders=keeps_orders) if coded else ()),
            *_notes(spec, asked.max_model_len, checkpoint, held.tensors),
        ),
    )
    return _with_drafts(asked, found)


def spec_and_pooling(
    config: HfConfig, asked: EngineConfig
) -> tuple[HfConfig, DecoderSpec, PoolingSpec | None]:
    """The text's part of a config.json with the rotary settings that are asked for, and what it and
    the files beside it say of a model. Raises UserError for a task that isn't the model's."""
    family, config = family_of(config)
    if (asked.rope_scaling, asked.rope_factor, asked.rope_theta) != (None, None, None):
        config = override_rope(config, asked)
    spec = family.read_spec(config)
    task = task_of(config.path.parent, spec.architecture, asked.task)
    if task == "generate":
        return config, spec, None
    pooling = read_pooling(config, spec.architecture, task, is_causal=spec.is_causal)
    if not spec.is_causal and asked.kv_dtype.startswith(("int8", "fp8")):
        raise UserError(
            f"kv_dtype is {asked.kv_dtype}, but {config.architecture} keeps no keys and values "
            "beyond a step: leave it out",
            field="kv_dtype",
        )
    pooling = replace(
        pooling, normalizes=asked.normalize, tells_pairs_apart=spec.num_token_types > 1
    )
    return config, family.pooled(spec, config, pooling), pooling


def _with_drafts(asked: EngineConfig, found: FoundModel) -> FoundModel:
    """``found``, which is for ``asked``, with what drafts for it. Raises ModelError that says of
    what it speaks."""
    path = None if asked.speculation is None else asked.speculation.draft_model
    if path is None:
        return found
    try:
        if found.pooling is not None or not found.spec.has_head:
            raise ModelError(f"{asked.model} gives embeddings or scores: nothing is drafted for it")
        if has_medusa_heads(path):
            return _with_heads(found, find_medusa_heads(path, found.spec))
        checkpoint = Checkpoint(path)
        if has_eagle_head(checkpoint):
            return _with_heads(found, find_eagle_head(checkpoint, found.spec))
        config = draft_config(asked, checkpoint)
        draft = replace(find_model(replace(config, speculation=None), checkpoint), asked=config)
        check_vocabulary(asked.model, path)
    except MissingExtraError:
        raise
    except UserError as error:
        raise ModelError(f"the draft model: {error}", field=DRAFT_MODEL) from None
    return replace(found, drafts=(draft,), drafted_by=str(path))


def _with_heads(found: FoundModel, heads: DraftHeads) -> FoundModel:
    return replace(found, heads=heads, drafted_by=heads.description)


def _notes(
    spec: DecoderSpec,
    max_model_len: int | None,
    checkpoint: Checkpoint,
    tensors: Mapping[str, TensorInfo],
) -> Iterator[str]:
    served = max_model_len or spec.max_positions
    for kind, first in {(rope.kind, rope.original_max_positions) for rope in spec.ropes}:
        if kind in ("longrope", "dynamic") and served > first:
            yield (
                f"rotary positions of type {kind}: as up to {served} tokens are served, all "
                f"requests get the factors of long contexts, also those of up to {first} tokens; "
                f"option.max_model_len={first} serves these as the model was trained"
            )
    if "auto_map" in checkpoint.config.values:
        yield (
            f"the code that comes with the model isn't run: {spec.architecture} is computed by "
            "this engine's own description"
        )
    if num_others := len(checkpoint.tensors) - len(tensors):
        yield (
            f"{num_others} tensors of other parts than the language model are left out: this model "
            "is served for text"
        )


def _check_smoothquant(asked: EngineConfig) -> None:
    read_text(asked.calibration_file)
    if asked.lora is not None:
        raise ModelError(
            "quantize=smoothquant changes what adapters would read: leave option.enable_lora out, "
            "or write quantize=int8",
            field="option.enable_lora",
        )


def _check_gguf(asked: EngineConfig) -> None:
    if asked.lora is not None:
        raise ModelError(
            f"{asked.model} is in GGUF, whose layers LoRA adapters don't name: leave the adapters "
            "out, or serve the model in safetensors",
            field="option.enable_lora",
        )
