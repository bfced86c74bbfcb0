"""From a model directory to a decoder's spec and packed weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmi_core.models.family import WeightNames
from lmi_core.models.kv_scales import LayerScales, kv_scale_names, read_kv_scales
from lmi_core.models.registry import family_of
from lmi_core.models.rope_config import RopeOverride
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.tensor_check import check_tensors
from lmi_core.models.tensor_reader import Progress, TensorReader
from lmi_core.models.weights import DecoderWeights, LayerWeights, WeightBackend, expected_shapes
from lmi_core.weights.checkpoint import read_checkpoint
from lmi_core.weights.formats import PackFormat, Quantization, WeightFormat
from lmi_core.weights.fp8_checkpoint import FP8_DTYPE, scale_of
from lmi_core.weights.hf_config import HfConfig, read_hf_config
from lmi_core.weights.quantized.checkpoint import quantization_at_load, read_layout
from lmi_core.weights.quantized.methods import CheckpointMethod
from lmi_core.weights.quantized.stored_layers import StoredLayers
from lmi_core.weights.safetensors_file import TensorInfo

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What the engine needs of a model; ``dtype`` is that of the packed matrices."""

    path: Path
    spec: DecoderSpec
    weights: DecoderWeights
    dtype: WeightFormat
    """Activations; of the weights, what isn't quantised."""
    quantize: Quantization | None
    """What the layers' matrices are; fp8 also where the checkpoint had them so."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    kv_scales: tuple[LayerScales, ...] = ()
    """For an fp8 KV cache, of each layer; empty: the checkpoint has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """What a directory's headers and settings say of a model that can be loaded."""

    config: HfConfig
    spec: DecoderSpec
    names: WeightNames
    shapes: Mapping[str, tuple[int, ...]]
    tensors: Mapping[str, TensorInfo]
    quantized: StoredLayers
    quantize: Quantization | None
    """What matrices are quantised to while they are loaded."""


def plan_model(
    path: Path,
    *,
    quantize: Quantization | CheckpointMethod | None = None,
    rope: RopeOverride | None = None,
) -> ModelPlan:
    """Read and check all but the weights of the model in ``path``; arguments and errors are those
    of ``load_model``."""
    config = read_hf_config(path)
    layout = read_layout(config)
    made = quantization_at_load(config, quantize)
    if rope is not None:
        config = rope.apply(config)
    family = family_of(config.architecture)
    spec = family.read_spec(config)
    for token_id in config.eos_token_ids:
        if token_id >= spec.vocab_size:
            raise config.error(
                "eos_token_id", f"{token_id} is beyond the vocabulary of {spec.vocab_size}"
            )
    tensors = read_checkpoint(path)
    shapes = expected_shapes(spec, family.names)
    matrices = {name: shape for name, shape in shapes.items() if name != family.names.embedding}
    quantized = StoredLayers(layout, matrices, tensors)
    check_tensors(path, spec, family.names, tensors, quantized)
    return ModelPlan(
        config=config,
        spec=spec,
        names=family.names,
        shapes=shapes,
        tensors=tensors,
        quantized=quantized,
        quantize=made,
    )


def load_model(
    path: Path,
    dtype: Literal["auto", "bf16", "fp32"] = "auto",
    *,
    quantize: Quantization | CheckpointMethod | None = None,
    rope: RopeOverride | None = None,
    backend: WeightBackend | None = None,
    progress: Progress | None = None,
    takes_adapters: bool = False,
) -> LoadedModel:
    """Read, check and pack the model in directory ``path``.

    ``dtype`` auto: bf16 where the checkpoint is 16 bit, else fp32. ``quantize``: what the matrices
    of layers and head become; the head stays int8 with int4, whose errors would go straight into
    the logits, and the embedding as it is. Layers that the checkpoint has in integers are kept so,
    and everything else as it is; ``quantize`` may name its method, and nothing else.
    ``rope``: instead of the checkpoint's rotary settings. ``backend``: None: native.
    ``takes_adapters``: gate and up aren't packed for an activation in the linear itself, which LoRA
    adapters must come before.
    Raises ModelError, naming every tensor that is missing, unexpected or of the wrong shape.
    """
    plan = plan_model(path, quantize=quantize, rope=rope)
    config, spec, names, made = plan.config, plan.spec, plan.names, plan.quantize
    tensors, quantized, shapes = plan.tensors, plan.quantized, plan.shapes
    weight_format = _stored_format(tensors, names) if dtype == "auto" else dtype
    scale_names = kv_scale_names(spec, names, tensors)
    reader = TensorReader(
        _needed([*shapes, *scale_names], tensors, quantized),
        quantized,
        backend or _native_backend(),
        weight_format,
        made,
        progress,
    )
    head_format: PackFormat = weight_format if made is None else "int8"
    weights = _load_weights(reader, spec, names, head_format, fuses_gate=not takes_adapters)
    _warn(reader, weight_format)
    model = LoadedModel(
        path=path,
        spec=spec,
        weights=weights,
        dtype=weight_format,
        quantize=made or reader.kept_format,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        kv_scales=read_kv_scales(path, spec, names, scale_names, reader.vector),
    )
    reader.check_files()
    return model


def _needed(
    names: Sequence[str], tensors: Mapping[str, TensorInfo], quantized: StoredLayers
) -> dict[str, TensorInfo]:
    """The tensors to be read for ``names``."""
    needed = {name: tensors[name] for name in quantized.spare_biases}
    for name in names:
        if name in quantized:
            needed |= quantized.tensors_of(name)
            continue
        needed[name] = tensors[name]
        if tensors[name].dtype == FP8_DTYPE and (scale := scale_of(tensors[name], tensors)):
            needed[scale.name] = scale
    return needed


def _warn(reader: TensorReader, weight_format: WeightFormat) -> None:
    """Say what of the checkpoint's quantisation isn't as it was."""
    if "fp8" in reader.widened:
        _log.warning(
            "the checkpoint's fp8 weights are held as %s here; quantize=int8 keeps them as small "
            "as they are",
            weight_format,
        )
    if reader.widened & {"int4", "int8"}:
        _log.warning(
            "matrices that are multiplied as one are quantised in part or in different ways: they "
            "are held as %s",
            weight_format,
        )
    if reader.most_rounding > 0:
        _log.warning(
            "scales of the checkpoint's int4 weights are rounded to fp16: they change by at most "
            "%.2g %%",
            100 * reader.most_rounding,
        )


def _native_backend() -> WeightBackend:
    from lmi_core.ops.cpu import NativeWeights

    return NativeWeights()


def _stored_format(tensors: Mapping[str, TensorInfo], names: WeightNames) -> WeightFormat:
    return "fp32" if tensors[names.embedding].dtype == "F32" else "bf16"


def _load_weights(
    reader: TensorReader,
    spec: DecoderSpec,
    names: WeightNames,
    head_format: PackFormat,
    *,
    fuses_gate: bool,
) -> DecoderWeights:
    if spec.tied_head:
        head = reader.tied_head(names.embedding, head_format)
    else:
        head = reader.linear([names.head], format=head_format)
    return DecoderWeights(
        embedding=reader.table(names.embedding),
        layers=tuple(
            _load_layer(reader, spec, names, i, fuses_gate=fuses_gate)
            for i in range(spec.num_layers)
        ),
        final_norm=reader.vector(names.final_norm),
        head=head,
    )


def _load_layer(
    reader: TensorReader,
    spec: DecoderSpec,
    names: WeightNames,
    layer_id: int,
    *,
    fuses_gate: bool,
) -> LayerWeights:
    prefix = names.layer.format(layer=layer_id)
    qk_norm = spec.attention.qk_norm
    return LayerWeights(
        attention_norm=reader.vector(prefix + names.attention_norm),
        qkv=reader.linear([prefix + names.q, prefix + names.k, prefix + names.v]),
        q_norm=reader.vector(prefix + names.q_norm) if qk_norm else None,
        k_norm=reader.vector(prefix + names.k_norm) if qk_norm else None,
        attention_output=reader.linear([prefix + names.attention_output]),
        mlp_norm=reader.vector(prefix + names.mlp_norm),
        gate_up=reader.linear([prefix + names.gate, prefix + names.up], gated=fuses_gate),
        down=reader.linear([prefix + names.down]),
    )
