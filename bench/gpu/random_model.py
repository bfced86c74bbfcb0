"""Models with random weights, made on the device: nothing is read and nothing is written."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import torch

from bench.checkpoints import Shape, config_of
from bench.gpu.shapes import STANDARD_DEVIATION
from lmi_core.models.loader import LoadedModel
from lmi_core.models.registry import family_of
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weights import DecoderWeights, LayerWeights, Linear, Norm
from lmi_core.ops.cpu import INT4_GROUP_SIZE
from lmi_core.ops.device.packed_weight import HEADER_BYTES, PANEL_OUTPUTS, STEP_BYTES, PackedWeight
from lmi_core.ops.device.torch_weights import DeviceWeight
from lmi_core.weights.formats import Quantization
from lmi_core.weights.hf_config import read_hf_config


def read_spec(shape: Shape) -> DecoderSpec:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config_of(shape)))
        family, config = family_of(read_hf_config(Path(directory)))
        return family.read_spec(config)


def random_model(
    shape: Shape, device: torch.device, quantize: Quantization | None = None
) -> LoadedModel:
    """bf16, or quantised as the loader would: layers as asked, the head int8."""
    spec = read_spec(shape)
    attention = spec.attention

    def linear(
        outputs: int, inputs: int, *, is_gated: bool = False, is_head: bool = False
    ) -> Linear:
        if quantize is not None:
            format = "int8" if is_head else quantize
            return Linear(random_packed(outputs, inputs, format, is_gated, device))
        matrix = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=device)
        bias = attention.qkv_bias and outputs == attention.q_size + 2 * attention.kv_size
        return Linear(
            DeviceWeight(matrix.normal_(std=STANDARD_DEVIATION)),
            np.zeros(outputs, np.float32) if bias else None,
        )

    hidden, inner = spec.hidden_size, spec.intermediate_size
    ones = Norm(np.ones(hidden, np.float32))
    layers = tuple(
        LayerWeights(
            attention_norm=ones,
            qkv=linear(attention.q_size + 2 * attention.kv_size, hidden),
            q_norm=None,
            k_norm=None,
            attention_output=linear(hidden, attention.q_size),
            mlp_norm=ones,
            gate_up=linear(2 * inner, hidden, is_gated=True),
            down=linear(hidden, inner),
        )
        for _ in range(spec.num_layers)
    )
    embedding = torch.empty(spec.vocab_size, hidden, dtype=torch.bfloat16, device=device)
    embedding.normal_()
    weights = DecoderWeights(
        embedding=embedding.view(torch.int16).cpu().numpy().view(np.uint16),
        layers=layers,
        final_norm=ones,
        head=linear(spec.vocab_size, hidden, is_head=True),
    )
    return LoadedModel(
        spec=spec,
        whole_spec=spec,
        weights=weights,
        dtype="bf16",
        quantize=quantize,
        eos_token_ids=(),
    )


def random_packed(
    outputs: int, inputs: int, format: Quantization, is_gated: bool, device: torch.device
) -> PackedWeight:
    """Random codes; scales and zero points that give weights of the usual size."""
    group_size = INT4_GROUP_SIZE if format == "int4" else 0
    num_parts = 2 if is_gated else 1
    num_panels = num_parts * -(-outputs // num_parts // PANEL_OUTPUTS)
    if group_size:
        num_groups, num_steps = -(-inputs // group_size), group_size // 8
    else:
        num_groups, num_steps = 1, -(-inputs // 4)
    shape = (num_panels, num_groups, HEADER_BYTES + num_steps * STEP_BYTES)
    panels = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    if group_size:
        header = torch.tensor([STANDARD_DEVIATION / 4] * 16 + [8.0] * 16, dtype=torch.float16)
    elif format == "int8":
        header = torch.full((16,), STANDARD_DEVIATION / 64, dtype=torch.float32)
    else:
        panels &= 0xF7  # no NaN
        header = torch.full((16,), STANDARD_DEVIATION / 100, dtype=torch.float32)
    panels[..., :HEADER_BYTES] = header.view(torch.uint8).to(device)
    return PackedWeight(
        panels=panels.flatten(),
        format=format,
        num_outputs=outputs,
        num_inputs=inputs,
        group_size=group_size,
        is_gated=is_gated,
    )
