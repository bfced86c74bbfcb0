"""What config.json leaves out is what transformers takes for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmi_core.models.found_model import spec_and_pooling
from lmi_core.models.registry import MODULES
from lmi_core.models.spec import DecoderSpec
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.weights.hf_config import HfConfig

transformers = pytest.importorskip("transformers")

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("intermediate_size", "n_embd", "n_layer", "n_head", "n_inner", "d_model", "n_layers")
SIZES += ("n_heads", "num_layers", "num_heads", "ffn_dim", "word_embed_proj_dim", "ffn_hidden_size")
LEFT_OUT = {
    "CohereForCausalLM",  # theta was 10000 before transformers 5, and is 500000 since
    "Gemma3ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",  # sizes are in text_config, of the families tested here
    "Glm4MoeForCausalLM",  # the default sizes give no head size
}
# Those it has, without importing each.
ARCHITECTURES = sorted(set(MODULES) & set(dir(transformers)) - LEFT_OUT)


def spec_of(values: dict[str, object]) -> DecoderSpec:
    config = HfConfig(Path("config.json"), values)
    _, spec, _ = spec_and_pooling(config, EngineConfig(model=Path("m")))
    return spec


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    config = getattr(transformers, architecture).config_class()
    whole = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    sizes = {key: whole[key] for key in ("model_type", "architectures", *SIZES) if key in whole}
    assert spec_of(sizes) == spec_of(whole)
