"""What one rank of a model has of an adapter: B's rows where outputs are cut, A's columns where
inputs are, so that the ranks' sums have what the adapter adds."""

from __future__ import annotations

import numpy as np

from lmi_core.adapters.adapter import Adapter, AdapterPart
from lmi_core.models.lora_linears import OwnLinear, linear_shapes, own_linears
from lmi_core.models.slices import Slicing
from lmi_core.models.spec import DecoderSpec


def own_slices(adapter: Adapter, spec: DecoderSpec, slicing: Slicing) -> Adapter:
    """Parts by the rank's linear ids, of an adapter for the whole model of ``spec``."""
    if slicing.is_whole:
        return adapter
    own: Adapter = [[] for _ in linear_shapes(spec, slicing)]
    for linear in own_linears(spec, slicing):
        parts = (_own_part(part, linear) for part in adapter[linear.whole_id])
        own[linear.linear_id] = [part for part in parts if part is not None]
    return own


def _own_part(part: AdapterPart, linear: OwnLinear) -> AdapterPart | None:
    """None: it adds to none of the rank's outputs."""
    if linear.inputs is not None:
        return AdapterPart(
            np.ascontiguousarray(part.a[:, slice(*linear.inputs)]), part.b, part.first_output
        )
    if linear.rows is None:
        return part
    end = part.first_output + len(part.b)
    [places] = np.nonzero((linear.rows >= part.first_output) & (linear.rows < end))
    if not places.size:
        return None
    # A part is of queries, keys, values, gate, up, or all outputs: what a rank has lies together.
    b = np.ascontiguousarray(part.b[linear.rows[places] - part.first_output])
    return AdapterPart(part.a, b, int(places[0]))
