"""Checkpoints whose linear layers are in int4 or int8, in the layouts that are found, for tests.

Packing goes bit by bit, as the layouts are described, and shares nothing with what reads them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import make_checkpoint

Array = npt.NDArray[Any]
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ puts each of eight columns into a word."""


@dataclass(frozen=True)
class Coded:
    """weight[n, k] = scales[n, groups[k]] (codes[n, k] - zeros[n, groups[k]])."""

    codes: Array
    scales: Array
    zeros: Array
    groups: Array

    @property
    def matrix(self) -> Array:
        zeros, scales = self.zeros[:, self.groups], self.scales[:, self.groups]
        return (self.codes.astype(np.float32) - zeros) * scales.astype(np.float32)


@dataclass(frozen=True)
class Form:
    """A way to store layers."""

    config: dict[str, Any]
    write: Callable[[Coded], dict[str, Tensor]]
    num_bits: int = 4
    group_size: int | None = 32
    is_symmetric: bool = False
    scale_dtype: torch.dtype = torch.float16
    order: Callable[[Array], Array] = lambda groups: groups


def make_integer_checkpoint(
    directory: Path, form: Form, variant: str = "llama2", **config: Any
) -> tuple[Path, dict[str, Coded]]:
    """Write a 16-bit checkpoint whose layers are quantised; what their matrices are, by name."""
    shape = {"hidden_size": 64, "intermediate_size": 96, **config}
    make_checkpoint(directory, variant, dtype="float16", **shape)
    tensors: dict[str, Tensor] = {}
    coded: dict[str, Coded] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if is_linear(name):
            coded[name] = quantize(as_linear(tensor, variant), form)
            layer = name.removesuffix(".weight")
            written = form.write(coded[name])
            tensors |= {f"{layer}.{suffix}": part for suffix, part in written.items()}
        else:
            tensors[name] = tensor
    save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors")
    set_config(directory, quantization_config=form.config)
    return directory, coded


def is_linear(name: str) -> bool:
    """Whether a tensor of this name is the matrix of a linear layer."""
    return name.endswith(("proj.weight", "c_attn.weight", "c_fc.weight"))


def as_linear(tensor: Tensor, variant: str) -> Array:
    """A matrix as quantisers have it, which make linear layers of GPT-2's."""
    return (tensor.T if variant == "gpt2" else tensor).float().numpy()


def set_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def dense_checkpoint(directory: Path, source: Path, coded: dict[str, Coded]) -> Path:
    """The same model in fp32, without any quantisation."""
    shutil.copytree(source, directory)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.is_floating_point() and name.endswith(("weight", "bias")):
            tensors[name] = tensor.float()
    tensors |= {name: torch.from_numpy(each.matrix) for name, each in coded.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return directory


def quantize(matrix: Array, form: Form) -> Coded:
    """Between the least and the largest weight of a group, or around zero."""
    num_inputs = matrix.shape[1]
    groups = form.order(np.arange(num_inputs) // (form.group_size or num_inputs))
    most = 2**form.num_bits - 1
    scales, zeros = [], []
    for group in range(groups.max() + 1):
        of_group = matrix[:, groups == group]
        least, largest = of_group.min(axis=1), of_group.max(axis=1)
        if form.is_symmetric:
            least, largest = -np.abs(of_group).max(axis=1), np.abs(of_group).max(axis=1)
        scale = torch.from_numpy((largest - least) / most).to(form.scale_dtype).float().numpy()
        scales.append(scale)
        middle = np.full_like(scale, 2 ** (form.num_bits - 1))
        zeros.append(middle if form.is_symmetric else np.clip(np.rint(-least / scale), 0, most))
    scale, zero = np.stack(scales, axis=1), np.stack(zeros, axis=1)
    codes = np.rint(matrix / scale[:, groups]) + zero[:, groups]
    return Coded(np.clip(codes, 0, most).astype(np.int64), scale, zero, groups)


def pack(codes: Array, num_bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Words of the codes of every row, the first in the lowest bits, or in ``places``."""
    per_word = 32 // num_bits
    rows, columns = codes.shape
    words = np.zeros((rows, -(-columns // per_word)), np.uint64)
    for column in range(columns):
        at = column % per_word if places is None else places[column % per_word]
        values = codes[:, column].astype(np.uint64) << np.uint64(num_bits * at)
        words[:, column // per_word] |= values
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def pack_stream(codes: Array, num_bits: int) -> Tensor:
    """As ``pack``, of codes that follow each other across words."""
    rows, columns = codes.shape
    bits = (codes[:, :, None] >> np.arange(num_bits)) & 1
    stream = np.zeros((rows, -(-columns * num_bits // 32) * 32), np.uint8)
    stream[:, : columns * num_bits] = bits.reshape(rows, -1)
    raw = np.packbits(stream, axis=1, bitorder="little")
    return torch.from_numpy(raw.view(np.int32).copy())


def write_awq(coded: Coded) -> dict[str, Tensor]:
    return {
        "qweight": pack(coded.codes.T, 4, AWQ_NIBBLES),
        "qzeros": pack(coded.zeros.T.astype(np.int64), 4, AWQ_NIBBLES),
        "scales": torch.from_numpy(coded.scales.T.copy()).half(),
    }


def write_gptq(
    coded: Coded, num_bits: int = 4, offset: int = 1, dtype: torch.dtype = torch.float16
) -> dict[str, Tensor]:
    zeros = (coded.zeros.T.astype(np.int64) - offset) % 2**num_bits
    return {
        "qweight": pack_stream(coded.codes, num_bits).T,
        "qzeros": pack_stream(zeros, num_bits),
        "scales": torch.from_numpy(coded.scales.T.copy()).to(dtype),
        "g_idx": torch.from_numpy(coded.groups.astype(np.int32)),
    }


def write_packed(
    coded: Coded, num_bits: int = 4, is_symmetric: bool = False, *, is_ordered: bool = True
) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": pack(coded.codes, num_bits),
        "weight_scale": torch.from_numpy(coded.scales).bfloat16(),
        "weight_shape": torch.tensor(coded.codes.shape),
    }
    if not is_ordered:
        tensors["weight_g_idx"] = torch.from_numpy(coded.groups.astype(np.int32))
    if not is_symmetric:
        tensors["weight_zero_point"] = pack(coded.zeros.T.astype(np.int64), num_bits).T
    return tensors


def write_int8(coded: Coded) -> dict[str, Tensor]:
    return {
        "weight": torch.from_numpy((coded.codes - 128).astype(np.int8)),
        "weight_scale": torch.from_numpy(coded.scales).bfloat16(),
    }


def compressed(format: str, num_bits: int, **weights: Any) -> dict[str, Any]:
    """config.json's quantization_config of compressed-tensors."""
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": num_bits, "type": "int", "strategy": "group", **weights},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
_BF16 = {"scale_dtype": torch.bfloat16}
FORMS: dict[str, Form] = {
    "awq": Form(AWQ, write_awq),
    "awq-column": Form({**AWQ, "group_size": -1}, write_awq, group_size=None),
    "gptq": Form(GPTQ, write_gptq),
    "gptq-symmetric": Form({**GPTQ, "sym": True}, write_gptq, is_symmetric=True),
    "gptq-v2": Form(
        {**GPTQ, "checkpoint_format": "gptq_v2"}, lambda coded: write_gptq(coded, offset=0)
    ),
    "gptq-96": Form({**GPTQ, "group_size": 96}, write_gptq, group_size=96),
    "gptq-groups-reversed": Form(
        {**GPTQ, "desc_act": True}, write_gptq, order=lambda groups: groups[::-1]
    ),
    "gptq-8": Form(
        {**GPTQ, "bits": 8, "group_size": -1},
        lambda coded: write_gptq(coded, 8, dtype=torch.float32),
        num_bits=8,
        group_size=None,
        is_symmetric=True,
    ),
    "packed": Form(
        compressed("pack-quantized", 4, group_size=32, symmetric=False), write_packed, **_BF16
    ),
    "packed-symmetric": Form(
        compressed("pack-quantized", 4, group_size=32, symmetric=True),
        lambda coded: write_packed(coded, is_symmetric=True),
        is_symmetric=True,
        **_BF16,
    ),
    "packed-8": Form(
        compressed("pack-quantized", 8, strategy="channel"),
        lambda coded: write_packed(coded, 8, is_symmetric=True),
        num_bits=8,
        group_size=None,
        is_symmetric=True,
        **_BF16,
    ),
    "int8": Form(
        compressed("int-quantized", 8, strategy="channel"),
        write_int8,
        num_bits=8,
        group_size=None,
        is_symmetric=True,
        **_BF16,
    ),
}


def _shuffled(groups: Array) -> Array:
    return np.random.default_rng(0).permutation(groups)


OTHER_FORMS: dict[str, tuple[Form, str | None]] = {
    "gptq-reordered": (Form({**GPTQ, "desc_act": True}, write_gptq, order=_shuffled), "int4"),
    "gptq-16": (Form({**GPTQ, "group_size": 16}, write_gptq, group_size=16), None),
    "gptq-8-groups": (
        Form(
            {**GPTQ, "bits": 8, "sym": True},
            lambda coded: write_gptq(coded, 8),
            num_bits=8,
            is_symmetric=True,
        ),
        "q8_0",
    ),
    "gptq-8-asymmetric": (
        Form({**GPTQ, "bits": 8}, lambda coded: write_gptq(coded, 8), num_bits=8),
        None,
    ),
    "gptq-3": (Form({**GPTQ, "bits": 3}, lambda coded: write_gptq(coded, 3), num_bits=3), "q4_0"),
    "gptq-2": (Form({**GPTQ, "bits": 2}, lambda coded: write_gptq(coded, 2), num_bits=2), "q4_0"),
    "gptq-3-reordered": (
        Form(
            {**GPTQ, "bits": 3, "desc_act": True},
            lambda coded: write_gptq(coded, 3),
            num_bits=3,
            order=_shuffled,
        ),
        None,
    ),
    "awq-16": (Form({**AWQ, "group_size": 16}, write_awq, group_size=16), None),
    "packed-reordered": (
        Form(
            compressed("pack-quantized", 4, group_size=32, symmetric=False, actorder="group"),
            lambda coded: write_packed(coded, is_ordered=False),
            order=_shuffled,
            **_BF16,
        ),
        "int4",
    ),
    "packed-8-groups": (
        Form(
            compressed("pack-quantized", 8, group_size=32, symmetric=True),
            lambda coded: write_packed(coded, 8, is_symmetric=True),
            num_bits=8,
            is_symmetric=True,
            **_BF16,
        ),
        "q8_0",
    ),
}
"""Those that no product has codes for as they are, and what stands for the same; None: floats."""
