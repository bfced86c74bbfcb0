"""From a model directory to a decoder's spec and packed weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lmi_core.errors import MissingExtraError, ModelError, UserError
from lmi_core.models.decoder_weights import load_decoder, load_whole_head
from lmi_core.models.draft_model import FIELD as DRAFT_MODEL
from lmi_core.models.draft_model import (
    DraftHeads,
    check_vocabulary,
    draft_config,
    find_draft_heads,
)
from lmi_core.models.eagle_head import EagleHead
from lmi_core.models.expert_tensors import is_router
from lmi_core.models.family import spec_and_pooling
from lmi_core.models.gguf_spec import gguf_spec
from lmi_core.models.kv_scales import LayerScales, read_kv_scales
from lmi_core.models.pooling import PoolingSpec
from lmi_core.models.pooling_head import PoolingHead
from lmi_core.models.pooling_layers import load_pooling_head
from lmi_core.models.registry import family_of
from lmi_core.models.rope_config import override_rope
from lmi_core.models.slices import WHOLE, Slicing, slicing_of
from lmi_core.models.smoothing import LayerFactors, Smoothing
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.tensor_check import HeldTensors, held_tensors
from lmi_core.models.tensor_reader import Progress, TensorReader
from lmi_core.models.weight_packing import WeightPacking
from lmi_core.models.weights import (
    DecoderWeights,
    Linear,
    WeightBackend,
    answer_matrix,
    is_transposed,
)
from lmi_core.settings.engine_config import DType, EngineConfig, check_max_model_len
from lmi_core.settings.engine_config import Quantization as Quantize
from lmi_core.settings.lora_config import LoraConfig
from lmi_core.text.calibration_text import read_text
from lmi_core.text.tokenizer import Tokenizer
from lmi_core.weights.checkpoint import Checkpoint
from lmi_core.weights.formats import PackFormat, Quantization, WeightFormat
from lmi_core.weights.fp8_checkpoint import FP8_DTYPES, scale_of
from lmi_core.weights.hf_config import HfConfig
from lmi_core.weights.quantized.checkpoint import layout_of, notes_on_rows, quantization_at_load
from lmi_core.weights.quantized.stored_layers import StoredLayers
from lmi_core.weights.safetensors_file import TensorInfo

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What the engine needs of a model; ``dtype`` is that of the packed matrices."""

    path: Path
    spec: DecoderSpec
    whole_spec: DecoderSpec
    """Of the model of which ``spec`` is a slice."""
    weights: DecoderWeights
    dtype: WeightFormat
    """Activations; of the weights, what isn't quantised."""
    quantize: str | None
    """What the layers' matrices are, also where the checkpoint had them so."""
    eos_token_ids: tuple[int, ...]
    pooling: PoolingSpec | None = None
    """What its prompts are pooled to; None: it generates."""
    head: PoolingHead | None = None
    slicing: Slicing = WHOLE
    """What of the model this is."""
    whole_head: Linear | None = None
    """The output head of the whole model, where a head that drafts has none."""
    kv_scales: tuple[LayerScales, ...] = ()
    """For an fp8 KV cache, of each layer; empty: the checkpoint has none."""


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
    draft: FoundModel | None = None
    """What drafts for it."""
    heads: DraftHeads | None = None
    """What drafts for it instead."""

    @property
    def drafted_by(self) -> str:
        """In words; "": nobody drafts for it."""
        if self.draft is not None:
            return str(self.draft.asked.model)
        return "" if self.heads is None else self.heads.description

    @property
    def models(self) -> tuple[FoundModel, ...]:
        """It, and what drafts for it."""
        return (self,) if self.draft is None else (self, self.draft)


def find_model(asked: EngineConfig) -> FoundModel:
    """Read and check all but the weights of the model of ``asked``.

    Raises ModelError, naming every tensor that is missing, unexpected or of the wrong shape, and
    UserError for a length, a task or a degree of ranks that the model doesn't have.
    """
    checkpoint = Checkpoint(asked.model)
    layout = layout_of(checkpoint.quantization)
    made = quantization_at_load(checkpoint, asked.quantize)
    if made == "smoothquant":
        _check_smoothquant(asked)
    family = family_of(checkpoint.config.architecture)
    config = override_rope(family.text_config(checkpoint.config), asked)
    spec, pooling = spec_and_pooling(family, config, asked)
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
    check_max_model_len(asked.max_model_len, spec.max_positions)
    slicing = slicing_of(asked, spec)
    keeps_orders = made is None and _keeps_orders(asked, spec, slicing)
    found = FoundModel(
        asked=asked,
        checkpoint=checkpoint,
        config=config,
        spec=spec,
        shapes=shapes,
        tensors=held.tensors,
        dtype=_stored_format(held, architecture) if asked.dtype == "auto" else asked.dtype,
        quantized=held.quantized,
        quantize=made,
        pooling=pooling,
        kv_scales=held.kv_scales,
        slicing=slicing,
        keeps_orders=keeps_orders,
        notes=(
            *spec.notes,
            *checkpoint.gguf_notes,
            *notes_on_rows(checkpoint, asked, made, keeps_orders=keeps_orders),
            *_notes(spec, asked.max_model_len, checkpoint, held.tensors),
        ),
    )
    return _with_drafts(asked, found)


def _with_drafts(asked: EngineConfig, found: FoundModel) -> FoundModel:
    """``found``, which is for ``asked``, with what drafts for it. Raises ModelError that says of
    what it speaks."""
    path = None if asked.speculation is None else asked.speculation.draft_model
    if path is None:
        return found
    try:
        if found.pooling is not None or not found.spec.has_head:
            raise ModelError(f"{asked.model} gives embeddings or scores: nothing is drafted for it")
        config = draft_config(asked)
        if config is None:
            return replace(found, heads=find_draft_heads(path, found.spec))
        draft = replace(find_model(replace(config, speculation=None)), asked=config)
        check_vocabulary(asked.model, path)
    except MissingExtraError:
        raise
    except UserError as error:
        raise ModelError(f"the draft model: {error}", field=DRAFT_MODEL) from None
    return replace(found, draft=draft)


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


def load_model(
    path: Path,
    dtype: DType = "auto",
    *,
    quantize: Quantize | None = None,
    backend: WeightBackend | None = None,
    progress: Progress | None = None,
    takes_adapters: bool = False,
) -> LoadedModel:
    """The model in directory ``path``, with an engine's defaults; ``backend``: None: the CPU's."""
    lora = LoraConfig() if takes_adapters else None
    config = EngineConfig(model=path, dtype=dtype, quantize=quantize, lora=lora)
    if backend is None:
        from lmi_core.ops.cpu import NativeWeights

        backend = NativeWeights()
    return load_weights(find_model(config), backend, progress)


def load_weights(
    found: FoundModel,
    backend: WeightBackend,
    progress: Progress | None = None,
    smoothing: Smoothing | None = None,
) -> LoadedModel:
    """Read and pack the weights of the model that ``find_model`` found, of them what its
    ``slicing`` says.

    What is quantised is the matrices of layers and head; the head stays int8 with int4, whose
    errors would go straight into the logits, and the embedding as it is. Layers that the checkpoint
    has in integers are kept so, and everything else as it is.
    Where there may be LoRA adapters, gate and up aren't packed for an activation in the linear
    itself, which adapters must come before. ``smoothing``: of a model that is quantised so.
    Raises ModelError for damage inside of tensors.
    """
    asked, config, spec, made = found.asked, found.config, found.spec, found.quantize
    for note in found.notes:
        _log.warning("%s: %s", asked.model, note)
    weight_format, slicing = found.dtype, found.slicing
    if spec.rounds_embedding_scale and weight_format == "bf16":
        spec = replace(spec, embedding_scale=_to_bf16(spec.embedding_scale))
    keeps_halves = found.checkpoint.gguf_architecture is not None
    needed = needed_tensors([*found.shapes, *found.kv_scales], found.tensors, found.quantized)
    factors = _layer_factors(spec, smoothing, keeps_values=bool(found.kv_scales))
    packing = WeightPacking(
        backend,
        weight_format,
        made,
        keeps_halves=keeps_halves,
        keeps_orders=found.keeps_orders,
    )
    transposed = {name for name in needed if is_transposed(found.spec, name)}
    reader = TensorReader(needed, found.quantized, backend, packing, progress, transposed)
    head_format: PackFormat = weight_format if made is None else "int8"
    fuses_gate = asked.lora is None
    weights = load_decoder(
        reader, spec, head_format, factors, fuses_gate=fuses_gate, slicing=slicing
    )
    whole_head = None
    if slicing.num_ranks > 1 and isinstance(found.heads, EagleHead) and not found.heads.has_head:
        whole_head = load_whole_head(reader, spec)
    head = (
        None
        if found.pooling is None
        else load_pooling_head(reader, asked.model, spec, found.pooling)
    )
    packing.report()
    model = LoadedModel(
        path=asked.model,
        spec=slicing.spec(spec),
        whole_spec=spec,
        weights=weights,
        dtype=weight_format,
        quantize=made or packing.kept_format,
        eos_token_ids=config.eos_token_ids,
        pooling=found.pooling,
        head=head,
        slicing=slicing,
        whole_head=whole_head,
        kv_scales=read_kv_scales(asked.model, spec, found.kv_scales, reader.vector)
        if found.kv_scales
        else (),
    )
    reader.check_files()
    return model


def _keeps_orders(asked: EngineConfig, spec: DecoderSpec, slicing: Slicing) -> bool:
    """Rows are put into a matrix's order as they are rounded, for one matrix as a whole."""
    rounds_rows = asked.device == "cpu" and asked.activations != "bf16"
    return rounds_rows and spec.experts is None and slicing.is_whole


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


def needed_tensors(
    names: Sequence[str], tensors: Mapping[str, TensorInfo], quantized: StoredLayers
) -> dict[str, TensorInfo]:
    """The tensors to be read for ``names``."""
    needed = {name: tensors[name] for name in quantized.spare_biases}
    for name in names:
        if name in quantized:
            needed |= quantized.tensors_of(name)
            continue
        needed[name] = tensors[name]
        if tensors[name].dtype in FP8_DTYPES and (scale := scale_of(tensors[name], tensors)):
            needed[scale.name] = scale
    return needed


def _stored_format(held: HeldTensors, gguf_architecture: str | None) -> WeightFormat:
    """What weights and activations are where nobody says it: as the checkpoint, or bf16."""
    if gguf_architecture is not None:
        # A file may have any type for each matrix; none is rounded but routers, which converters
        # widen.
        has_fp32 = any(
            held.tensors[name].dtype == "F32"
            for name, shape in held.shapes.items()
            if len(shape) > 1 and not is_router(held.spec, name) and not name.endswith(".bias")
        )
        return "fp32" if has_fp32 else "bf16"
    return "fp32" if held.tensors[held.spec.names.embedding].dtype == "F32" else "bf16"


def _to_bf16(value: float) -> float:
    """The nearest, ties to even."""
    bits = int(np.float32(value).view(np.uint32))
    return float(np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32))


def _layer_factors(
    spec: DecoderSpec, smoothing: Smoothing | None, *, keeps_values: bool
) -> tuple[LayerFactors, ...]:
    if smoothing is None:
        return (LayerFactors(),) * spec.num_layers
    layers = range(spec.num_layers)
    return tuple(smoothing.factors(spec, i, keeps_values=keeps_values) for i in layers)
