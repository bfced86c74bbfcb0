"""Layouts in the order of a kernel's threads: AWQ's gemv, gemv_fast and marlin, GPTQ's marlin.

Written here a code at a time, by what each kernel reads, and compared with what it stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)
safetensors_torch = pytest.importorskip("safetensors.torch")

from lmi_core.errors import ModelError  # noqa: E402
from tests.integer_checkpoints import (  # noqa: E402
    AWQ,
    GPTQ,
    Coded,
    Form,
    make_integer_checkpoint,
    pack,
    set_config,
)
from tests.loading import load_model  # noqa: E402

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
Tensors = dict[str, Any]
GROUP_WORDS = {32: 4, 64: 2, 128: 1}
"""Of gemv, by its groups' size: how many words of zero points are written together."""


def padded(values: np.ndarray, group_size: int) -> np.ndarray:
    """[outputs, groups], with room for more."""
    step = 8 * GROUP_WORDS[group_size]
    wide = np.zeros((len(values), -(-values.shape[1] // step) * step), values.dtype)
    wide[:, : values.shape[1]] = values
    return wide


def gemv(coded: Coded, group_size: int) -> Tensors:
    return {
        "qweight": pack(coded.codes, 4),
        "qzeros": pack(padded(coded.zeros.astype(np.int64), group_size), 4),
        "scales": torch.from_numpy(padded(coded.scales, group_size)).half(),
    }


def gemv_fast(coded: Coded, group_size: int) -> Tensors:
    num_outputs, num_inputs = coded.codes.shape
    words = np.zeros((num_outputs // 4, num_inputs), np.uint16)
    for row in range(num_outputs):
        for column in range(num_inputs):
            # Of 32 inputs, pairs of each 8 lie together; of the four pairs, even inputs come first.
            eighth, within = divmod(column % 32, 8)
            place = within // 2 * 8 + within % 2 * 4 + eighth
            at = row % 4 * 64 + column % 64 // 32 * 32 + place
            word, nibble = column // 64 * 64 + at // 4, at % 4
            words[row // 4, word] |= np.uint16(int(coded.codes[row, column]) << (4 * nibble))
    scales = coded.scales.astype(np.float16)
    zeros = -(scales.astype(np.float32) * coded.zeros).astype(np.float16)
    tensors = {"qzeros": zeros, "scales": scales}
    found = {name: padded(each, group_size).T.copy() for name, each in tensors.items()}
    return {
        "qweight": torch.from_numpy(words.view(np.int16)),
        **{name: torch.from_numpy(each) for name, each in found.items()},
    }


def marlin(coded: Coded, codes: str, scales: str) -> Tensors:
    num_outputs, num_inputs = coded.codes.shape
    words = np.zeros((num_inputs // 16, 2 * num_outputs), np.uint32)
    for tile_row in range(num_inputs // 16):
        for tile_column in range(num_outputs // 64):
            for thread in range(32):
                for quarter in range(4):
                    first = 64 * tile_column + 16 * quarter + thread // 4
                    inputs = [16 * tile_row + 2 * (thread % 4) + more for more in (0, 1, 8, 9)]
                    own = [coded.codes[first + half, i] for half in (0, 8) for i in inputs]
                    word = sum(
                        int(own[i]) << (4 * at) for at, i in enumerate((0, 2, 4, 6, 1, 3, 5, 7))
                    )
                    words[tile_row, 128 * tile_column + 4 * thread + quarter] = word
    stored = coded.scales.T.astype(np.float16)
    if len(stored) > 1:
        order = [i + 8 * j for i in range(8) for j in range(8)]
    else:
        order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    size = len(order)
    columns = [size * chunk + i for chunk in range(num_outputs // size) for i in order]
    return {
        codes: torch.from_numpy(words.view(np.int32)),
        scales: torch.from_numpy(np.ascontiguousarray(stored[:, columns])),
    }


def _awq(version: str, group_size: int, write: Callable[..., Tensors]) -> Form:
    config = {**AWQ, "version": version, "group_size": group_size}
    return Form(config, lambda coded: write(coded, group_size), group_size=group_size)


def _gptq_marlin(coded: Coded) -> Tensors:
    return {**marlin(coded, "B", "s"), "workspace": torch.zeros(32, dtype=torch.int32)}


MARLIN = {"quant_method": "marlin", "group_size": 128}
FORMS = {
    "gemv": _awq("gemv", 32, gemv),
    "gemv-64": _awq("GEMV", 64, gemv),
    "gemv-128": _awq("gemv", 128, gemv),
    "gemv-fast": _awq("gemv_fast", 32, gemv_fast),
    "gemv-fast-128": _awq("gemv_fast", 128, gemv_fast),
    "awq-marlin": Form(
        {**AWQ, "version": "marlin", "group_size": 128, "zero_point": False},
        lambda coded: marlin(coded, "qweight", "scales"),
        group_size=128,
        is_symmetric=True,
    ),
    "gptq-marlin": Form(
        {**GPTQ, "group_size": -1, "sym": True, "checkpoint_format": "marlin"},
        _gptq_marlin,
        group_size=None,
        is_symmetric=True,
    ),
    "marlin": Form(MARLIN, _gptq_marlin, group_size=128, is_symmetric=True),
}


@pytest.fixture(scope="module", params=FORMS)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Coded]]:
    path = tmp_path_factory.mktemp("layout") / "model"
    return make_integer_checkpoint(path, FORMS[request.param], **SHAPE)


def test_codes_and_scales_are_the_checkpoints(made: tuple[Path, dict[str, Coded]]) -> None:
    path, coded = made
    model = load_model(path)
    assert model.quantize == "int4"
    for layer_id, layer in enumerate(model.weights.layers):
        for linear, names in (
            (layer.qkv, ("self_attn.q", "self_attn.k", "self_attn.v")),
            (layer.attention_output, ("self_attn.o",)),
            (layer.gate_up, ("mlp.gate", "mlp.up")),
            (layer.down, ("mlp.down",)),
        ):
            parts = [coded[f"model.layers.{layer_id}.{name}_proj.weight"] for name in names]
            exact = np.concatenate([part.matrix for part in parts])
            np.testing.assert_array_equal(linear.weight.unpack(), exact)  # type: ignore[union-attr]


LAYER = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("form", "settings", "changes", "message"),
    [
        ("gemv", {"group_size": 16}, {}, "group_size is 16; 32 and more can be read"),
        ("gemv", {"version": "odd"}, {}, "version is 'odd'; gemm, gemv, gemv_fast, marlin can"),
        ("gemv", {"version": "gemm"}, {}, "wrong shape: .*qweight"),
        ("gemv-fast", {}, {"qzeros": torch.ones(32, 128).half()}, "down_proj.qzeros isn't scales"),
        ("gptq-marlin", {"desc_act": True}, {}, "desc_act is true, which Marlin's order has no"),
        ("gptq-marlin", {"group_size": 64}, {}, "group_size is 64; Marlin's order has groups of"),
        ("marlin", {"bits": 8}, {}, "bits is 8; in Marlin's order 4 can be read"),
        ("marlin", {}, {"B": None}, "missing: model.layers.0.mlp.down_proj"),
    ],
)
def test_faults_are_named(
    form: str, settings: Tensors, changes: Tensors, message: str, tmp_path: Path
) -> None:
    path, _ = make_integer_checkpoint(tmp_path / "model", FORMS[form], **SHAPE)
    file = path / "model.safetensors"
    tensors = {**safetensors_torch.load_file(file)}
    tensors |= {f"{LAYER}.{suffix}": tensor for suffix, tensor in changes.items()}
    safetensors_torch.save_file({n: t for n, t in tensors.items() if t is not None}, file)
    set_config(path, quantization_config={**FORMS[form].config, **settings})
    with pytest.raises(ModelError, match=message):
        load_model(path)


def test_tiles_that_do_not_fill_are_refused(tmp_path: Path) -> None:
    form = Form(MARLIN | {"group_size": -1}, lambda coded: tensors_of(coded), group_size=None)
    path, _ = make_integer_checkpoint(tmp_path / "model", form, intermediate_size=96)
    with pytest.raises(ModelError, match="32 outputs and 64 inputs; Marlin's tiles have 64 and 16"):
        load_model(path)


@pytest.mark.parametrize("version", ["gemv", "gemv_fast"])
def test_groups_that_inputs_do_not_fill_are_refused(version: str, tmp_path: Path) -> None:
    """Instead of looked for behind the scales that there are."""

    def write(coded: Coded) -> Tensors:
        num_outputs, num_inputs = coded.codes.shape
        if version == "gemv_fast":
            words = torch.zeros(num_outputs // 4, num_inputs, dtype=torch.int16)
            rows = torch.zeros(0, num_outputs).half()
            return {"qweight": words, "qzeros": rows, "scales": rows.clone()}
        return {
            "qweight": torch.zeros(num_outputs, num_inputs // 8, dtype=torch.int32),
            "qzeros": torch.zeros(num_outputs, 0, dtype=torch.int32),
            "scales": torch.zeros(num_outputs, 0).half(),
        }

    form = Form({**AWQ, "version": version, "group_size": 128}, write, group_size=None)
    path, _ = make_integer_checkpoint(tmp_path / "model", form)
    with pytest.raises(ModelError, match="has 64 inputs, which groups of 128 don't fill"):
        load_model(path)


def tensors_of(coded: Coded) -> Tensors:
    num_outputs, num_inputs = coded.codes.shape
    words = torch.zeros(num_inputs // 16, 2 * num_outputs, dtype=torch.int32)
    return {"B": words, "s": torch.ones(1, num_outputs).half()}
