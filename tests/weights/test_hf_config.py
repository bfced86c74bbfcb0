"""Reading of configurations, and what the families make of them."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmi_core.errors import ModelError
from lmi_core.models.registry import family_of, supported_architectures
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import read_hf_config
from tests.checkpoints import VARIANTS, cached_checkpoint

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
}


def write(directory: Path, config: Any, generation: Any = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation is not None:
        text = json.dumps(generation)
        (directory / "generation_config.json").write_text(text, encoding="utf-8")
    return directory


def spec_of(directory: Path, **config: Any) -> DecoderSpec:
    family, hf_config = family_of(read_hf_config(write(directory, {**LLAMA, **config})))
    return family.read_spec(hf_config)


def test_a_first_generation_llama_needs_few_keys(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    attention = spec.attention
    assert (attention.num_q_heads, attention.num_kv_heads, attention.head_dim) == (32, 32, 128)
    assert attention.windows == (0, 0, 0)
    assert attention.scale == pytest.approx(128**-0.5)
    assert spec.max_positions == 2048
    assert not spec.tied_head
    assert not any((attention.qkv_bias, attention.output_bias, spec.mlp_bias))


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_configurations_keep_their_meaning(variant: str) -> None:
    family, config = family_of(read_hf_config(cached_checkpoint(variant)))
    spec = family.read_spec(config)
    model_type, extra = VARIANTS[variant]
    assert spec.family == model_type
    assert spec.tied_head == extra.get("tie_word_embeddings", False)
    assert spec.attention.head_dim == extra.get("head_dim", 16)
    assert spec.ropes[0].kind == extra.get("rope_parameters", {}).get("rope_type", "default")
    assert spec.attention.qk_norm == ("head" if model_type == "qwen3" else "")
    assert config.eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": 8}, (4096,) * 3),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 100}, (100,) * 3),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (0,) * 3),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100}, (0,) * 3),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 100,
                "max_window_layers": 2,
            },
            (0, 0, 100),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 100,
                "max_window_layers": 2,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            (100, 0, 0),
        ),
    ],
)
def test_windows(tmp_path: Path, config: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert spec_of(tmp_path, **config).attention.windows == windows


def test_qwen2_has_biases_on_qkv_only(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, architectures=["Qwen2ForCausalLM"])
    assert spec.attention.qkv_bias
    assert not spec.attention.output_bias


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        (2, None, (2,)),
        (None, None, ()),
        (2, {"eos_token_id": [7, 5]}, (2, 5, 7)),
        ([3, 2], {"eos_token_id": 2}, (2, 3)),
        (None, {"eos_token_id": 0}, (0,)),
    ],
)
def test_eos_ids_of_both_files(
    tmp_path: Path, eos: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    config = read_hf_config(write(tmp_path, {**LLAMA, "eos_token_id": eos}, generation))
    assert config.eos_token_ids == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": None}, "architectures is None"),
        ({"architectures": ["XLNetLMHeadModel"]}, "'XLNetLMHeadModel' in config.json"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"hidden_size": 0}, "hidden_size is 0, but must be an integer >= 1"),
        ({"hidden_size": 4096.0}, "hidden_size is 4096.0"),
        ({"hidden_size": 2**40}, "hidden_size is 1099511627776, but must be an integer <= 2147"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but must be an integer"),
        ({"hidden_size": 100}, "32 heads don't divide 100"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'; supported: silu"),
        ({"hidden_act": ["silu"]}, "hidden_act is ['silu']; supported: silu"),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0.5}},
            "rope_scaling.original_max_position_embeddings is below 1",
        ),
        ({"architectures": ["MptForCausalLM"], "attn_config": True}, "attn_config is True"),
        ({"architectures": ["InternLMForCausalLM"], "rotary": {"type": []}}, "its type must be"),
        (
            {"architectures": ["Qwen2MoeForCausalLM"], "mlp_only_layers": 3},
            "mlp_only_layers is 3, but must list layers",
        ),
        (
            {"architectures": ["GPTNeoForCausalLM"], "attention_layers": True},
            "attention_types must be of all layers",
        ),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"head_dim": 63}, "head_dim is 63"),
        ({"architectures": ["GPTJForCausalLM"], "rotary_dim": 9}, "rotary_dim is 9, but must be"),
        ({"architectures": ["GPTJForCausalLM"], "rotary_dim": 256}, "up to the head's size of 128"),
        (
            {"architectures": ["CodeGenForCausalLM"], "num_attention_heads": 2},
            "n_head is 2, but must be a multiple of 4",
        ),
        (
            {
                "rope_scaling": {
                    "type": "longrope",
                    "factor": 2.0,
                    "short_factor": [1.0] * 64,
                    "long_factor": [1.0] * 64,
                },
                "original_max_position_embeddings": 1,
            },
            "original_max_position_embeddings is 1, but must be at least 2",
        ),
        (
            {"architectures": ["OPTForCausalLM"], "hidden_size": 99, "num_attention_heads": 3},
            "head_dim is 33, of a head, but must be even",
        ),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 33},
            "kv_lora_rank is 33, but must be even",
        ),
        ({"architectures": ["PhimoeForCausalLM"], "num_experts_per_tok": 3}, "only 2 is supported"),
        (
            {"architectures": ["GemmaForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention is true",
        ),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [2, -1]}, "eos_token_id is [2, -1]"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            "layer_types must list 3",
        ),
    ],
)
def test_faults_name_the_key(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec_of(tmp_path, **config)
    assert message in str(caught.value)


def test_an_unknown_architecture_lists_the_supported(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        spec_of(tmp_path, architectures=["XLNetLMHeadModel"])
    for name in supported_architectures():
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "must hold a JSON object, found list"),
    ],
)
def test_malformed_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_hf_config(tmp_path)


def test_a_directory_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ModelError, match=f"model {tmp_path} can't be read: Permission denied"):
        read_hf_config(tmp_path)


def test_missing_directory_and_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_hf_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match="can't be read"):
        read_hf_config(tmp_path)


def spec_of_family(tmp_path: Path, **values: Any) -> DecoderSpec:
    shape = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
    shape |= {"vocab_size": 100, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps({**shape, **values}))
    family, config = family_of(read_hf_config(tmp_path))
    return family.read_spec(config)


def test_older_files_of_gemma_3_say_theta_by_other_keys(tmp_path: Path) -> None:
    spec = spec_of_family(
        tmp_path,
        architectures=["Gemma3ForConditionalGeneration"],
        text_config={
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window": 1024,
        },
    )
    assert spec.attention.windows == (1024,) * 5 + (0,)
    ropes = [(rope.theta, rope.kind, rope.factor) for rope in spec.ropes]
    assert ropes == [(10000.0, "default", 1.0)] * 5 + [(1000000.0, "linear", 8.0)]


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_older_files_of_phi_3_have_other_names_of_long_rope(tmp_path: Path, name: str) -> None:
    spec = spec_of_family(
        tmp_path,
        architectures=["Phi3ForCausalLM"],
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_scaling={"type": name, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    )
    rope = spec.ropes[0]
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("longrope", 32.0, 4096)
    assert rope.attention_factor == pytest.approx((1 + 5 / 12) ** 0.5)
    assert spec.max_positions == 131072


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_phi_3_has_the_original_length_beside_its_rotary_settings(tmp_path: Path, key: str) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    values = {"architectures": ["Phi3ForCausalLM"], "max_position_embeddings": 32768, key: rope}
    assert spec_of_family(tmp_path, **values).ropes[0].factor == 8.0
    rope["original_max_position_embeddings"] = 8192
    with pytest.raises(ModelError, match=f"{key}.original_max_position_embeddings is 8192, but"):
        spec_of_family(tmp_path, **values)
    values["original_max_position_embeddings"] = 2048
    assert spec_of_family(tmp_path, **values).ropes[0].factor == 16.0


def test_rotary_settings_that_are_null_are_absent(tmp_path: Path) -> None:
    nothing = {"rope_parameters": None, "rope_scaling": None}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    for architecture in ("GptOssForCausalLM", "Gemma3ForCausalLM", "Olmo3ForCausalLM"):
        values = {"architectures": [architecture], **experts}
        absent = spec_of_family(tmp_path, **values)
        assert spec_of_family(tmp_path, **values, **nothing) == absent
        if architecture.startswith("GptOss"):
            assert absent.ropes[0].factor == 32


def test_settings_that_transformers_does_not_read_are_told(tmp_path: Path) -> None:
    gemma = {"architectures": ["Gemma3ForCausalLM"]}
    spec = spec_of_family(tmp_path, **gemma, attn_logit_softcapping=50.0)
    assert spec.notes[0].startswith("attn_logit_softcapping is 50, but scores aren't capped")
    assert replace(spec, notes=()) == spec_of_family(tmp_path, **gemma)
    mpt = {"architectures": ["MptForCausalLM"], "d_model": 64, "n_layers": 2, "n_heads": 4}
    spec = spec_of_family(tmp_path, **mpt, attn_config={"alibi_bias_max": 16})
    assert spec.attention.slopes == (2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16)
    assert "alibi_bias_max is 16" in spec.notes[0]
    assert not spec_of_family(tmp_path, **mpt, attn_config={"alibi_bias_max": 8}).notes


def test_gemmas_that_say_gelu_mean_its_approximation(tmp_path: Path) -> None:
    spec = spec_of_family(tmp_path, architectures=["GemmaForCausalLM"], hidden_act="gelu")
    assert spec.activation == "gelu_tanh"


def test_a_number_under_two_names_is_one_number(tmp_path: Path) -> None:
    model = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    model |= {"num_key_value_heads": 4}
    spec = spec_of_family(tmp_path, **model, num_experts=4)
    assert spec.experts is not None
    assert spec.experts.num_experts == 4
    for bad in (8, "x", 0):
        with pytest.raises(ModelError, match="num_local_experts is 4, but num_experts beside it"):
            spec_of_family(tmp_path, **model, num_experts=bad)


def test_errors_name_the_key_as_the_family_does(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"layer_norm_eps is 0"):
        spec_of_family(tmp_path, architectures=["CohereForCausalLM"], layer_norm_eps=0)
    with pytest.raises(ModelError, match=r"num_experts is 8; only None"):
        spec_of_family(tmp_path, architectures=["MiniCPMForCausalLM"], num_experts=8)
