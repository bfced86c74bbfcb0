"""Matrices that a checkpoint has [inputs, outputs], the usual way."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.found_model import FoundModel
from lmi_core.models.spec import layer_linears
from lmi_core.models.tensor_check import expected_shapes
from lmi_core.weights.safetensors_file import Turned


def with_usual_matrices(found: FoundModel) -> FoundModel:
    """``found`` with linears of layers [outputs, inputs], whichever way its files have them."""
    names = found.spec.names
    if not names.transposed:
        return found
    spec = replace(found.spec, names=replace(names, transposed=False))
    tensors = dict(found.tensors)
    for layer_id in range(spec.num_layers):
        prefix = names.layer.format(layer=layer_id)
        for source in layer_linears(spec, layer_id).values():
            for name in (f"{prefix}{module}.weight" for module, _ in source.modules):
                stored = tensors[name]
                turned = Turned(stored.shape)
                tensors[name] = replace(stored, shape=stored.shape[::-1], turned=turned)
    return replace(found, spec=spec, tensors=tensors, shapes=expected_shapes(spec))
