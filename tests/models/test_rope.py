"""Rotary tables against transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmi_core.errors import ModelError
from lmi_core.models.rope import inverse_frequencies, rope_spec, rope_tables, scaled_max_positions
from lmi_core.models.spec import RopeSpec
from lmi_core.weights.hf_config import HfConfig

MAX_POSITIONS = 4096
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn_betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn_truncate_null": {**YARN, "truncate": None},
    "yarn_mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn_attention": {**YARN, "attention_factor": 1.25},
    "yarn_no_original": {"rope_type": "yarn", "factor": 4.0},
    "llama3": LLAMA3,
}


def spec_of(values: dict[str, Any]) -> RopeSpec:
    return rope_spec(HfConfig(Path("config.json"), values), 64, MAX_POSITIONS)


def oracle_frequencies(parameters: dict[str, Any], seq_len: int | None) -> tuple[Any, float]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_theta": 500000.0, **parameters},
    )
    if parameters["rope_type"] == "default":
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
        frequencies, factor = rotary.compute_default_rope_parameters(config)
    else:
        init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        frequencies, factor = init(config, "cpu", seq_len=seq_len)
    return frequencies.numpy(), factor


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    rope = spec_of({"rope_parameters": {"rope_theta": 500000.0, **SCALINGS[name]}})
    expected, factor = oracle_frequencies(SCALINGS[name], None)
    np.testing.assert_allclose(inverse_frequencies(rope, MAX_POSITIONS), expected, rtol=2e-6)
    assert rope.attention_factor == pytest.approx(factor)


def test_dynamic_scales_by_the_longest_context() -> None:
    rope = spec_of({"rope_parameters": {"rope_theta": 500000.0, **SCALINGS["dynamic"]}})
    expected, _ = oracle_frequencies(SCALINGS["dynamic"], 8192)
    np.testing.assert_allclose(inverse_frequencies(rope, 8192), expected, rtol=2e-6)
    short = inverse_frequencies(rope, 100)
    np.testing.assert_array_equal(short, inverse_frequencies(rope, MAX_POSITIONS))


def test_tables_follow_positions_alone() -> None:
    rope = spec_of({"rope_parameters": {"rope_theta": 10000.0, **YARN}})
    cos, sin = rope_tables(rope, 100)
    assert cos.shape == sin.shape == (100, 32)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_array_equal(cos, rope_tables(rope, 300)[0][:100])
    np.testing.assert_allclose(cos**2 + sin**2, rope.attention_factor**2, rtol=1e-5)
    angle = np.float64(np.float32(99) * inverse_frequencies(rope, 100)[3])
    assert cos[99, 3] == pytest.approx(np.cos(angle) * rope.attention_factor, rel=1e-6)


@pytest.mark.parametrize(
    "old",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 4}},
        {
            "rope_scaling": None,
            "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0},
        },
    ],
)
def test_both_spellings(old: dict[str, Any]) -> None:
    new = {"rope_theta": 500000.0, "rope_type": "linear", "factor": 4.0}
    assert spec_of(old) == spec_of({"rope_parameters": new})


def test_theta_beside_null_scaling() -> None:
    assert spec_of({"rope_theta": 1e6, "rope_scaling": None}).theta == 1e6
    assert spec_of({}).theta == 10000.0


def test_original_length_outside_the_rope_object_wins() -> None:
    values = {"rope_scaling": LLAMA3, "original_max_position_embeddings": 2048}
    assert spec_of(values).original_max_positions == 2048


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        (YARN, 4096),
        ({**YARN, "factor": 8.0}, 8192),
        (LLAMA3, 4096),
    ],
)
def test_longest_context(scaling: dict[str, Any], expected: int) -> None:
    assert scaled_max_positions(spec_of({"rope_scaling": scaling}), MAX_POSITIONS) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "'ntk'; supported: default"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "short_factor must list 32 numbers",
        ),
        ({"rope_scaling": {"type": ["linear"]}}, "rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is None"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "at least 1"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor is True"),
        ({"rope_scaling": {"type": "linear", "factor": 1e308}}, "rope_scaling.factor is 1e+308"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0**20}}, "more than 2147483647"),
        ({"rope_scaling": {**YARN, "factor": 1e308}}, "rope_scaling.factor is 1e+308"),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "must be a number above 0"),
        ({"rope_scaling": [1]}, "must be an object or null"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor is None"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": {**YARN, "attention_factor": float("nan")}}, "attention_factor is nan"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer type"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": 1.0, "rope_scaling": YARN}, "rope_theta is 1.0"),
        ({"partial_rotary_factor": 0.99}, "must be an even number of them"),
    ],
)
def test_faults(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json: ") as caught:
        spec_of(values)
    assert message in str(caught.value)
