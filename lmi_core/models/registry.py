"""From an architecture's name in config.json to its family."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING

from lmi_core.errors import ModelError
from lmi_core.weights.hf_config import HfConfig, UnsupportedSettingError

if TYPE_CHECKING:
    from lmi_core.models.family import Family

MODULES = {
    "BaiChuanForCausalLM": "baichuan",
    "BaichuanForCausalLM": "baichuan",
    "BloomForCausalLM": "bloom",
    "ChatGLMForConditionalGeneration": "chatglm",
    "ChatGLMModel": "chatglm",
    "CodeGenForCausalLM": "codegen",
    "Cohere2ForCausalLM": "cohere2",
    "CohereForCausalLM": "cohere",
    "DbrxForCausalLM": "dbrx",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Exaone4ForCausalLM": "exaone4",
    "ExaoneForCausalLM": "exaone",
    "FalconForCausalLM": "falcon",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "GPTJForCausalLM": "gptj",
    "GPTNeoForCausalLM": "gpt_neo",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GlmForCausalLM": "glm",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granite_moe",
    "InternLM2ForCausalLM": "internlm2",
    "InternLM3ForCausalLM": "internlm3",
    "InternLMForCausalLM": "internlm",
    "LLaMAForCausalLM": "llama",
    "LlamaForCausalLM": "llama",
    "MPTForCausalLM": "mpt",
    "MiniCPMForCausalLM": "minicpm",
    "Mistral3ForConditionalGeneration": "mistral",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "MptForCausalLM": "mpt",
    "NemotronForCausalLM": "nemotron",
    "OPTForCausalLM": "opt",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "OlmoForCausalLM": "olmo",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi",
    "PhiMoEForCausalLM": "phimoe",
    "PhimoeForCausalLM": "phimoe",
    "QWenLMHeadModel": "qwen",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "RWForCausalLM": "falcon",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
}
"""The module of each architecture's family, imported when it is wanted."""


_DECODER = "ForCausalLM"
_ENCODERS = {
    "Bert": "bert",
    "Camembert": "roberta",
    "MPNet": "mpnet",
    "ModernBert": "modernbert",
    "Roberta": "roberta",
    "XLMRoberta": "roberta",
}
POOLED = {
    name.removesuffix(_DECODER) + ending: module
    for name, module in MODULES.items()
    if name.endswith(_DECODER)
    for ending in ("Model", "ForSequenceClassification")
} | {
    name + ending: module
    for name, module in _ENCODERS.items()
    for ending in ("Model", "ForMaskedLM", "ForSequenceClassification")
}
"""The same of architectures that give no tokens: encoders, and decoders without their head or with
another."""


def supported_architectures() -> tuple[str, ...]:
    return (*MODULES, *POOLED)


def unsupported_setting(config: HfConfig) -> str | None:
    """What config.json sets that the family of its architecture doesn't have here. Faults of the
    file itself are the loader's to tell."""
    try:
        family, text = family_of(config)
        family.read_spec(text)
    except UnsupportedSettingError as error:
        return str(error).removeprefix(f"{config.path}: ")
    except Exception:
        return None
    return None


def family_of(config: HfConfig) -> tuple[Family, HfConfig]:
    """The family that a config.json's architecture belongs to, or ModelError listing those there
    are; and what its ``read_spec`` reads: of a multimodal model, its language model's part."""
    architecture = config.architecture
    module = MODULES.get(architecture) or POOLED.get(architecture)
    if module is None:
        raise ModelError(
            f"architecture {architecture!r} in config.json is not supported; supported: "
            f"{', '.join(supported_architectures())}",
            field="architectures",
        )
    family: Family = importlib.import_module(f"lmi_core.models.families.{module}").FAMILY
    values, text = config.values, config.values.get("text_config")
    if isinstance(text, dict):
        values = {**values, **text, "architectures": values.get("architectures")}
    return family, replace(config, values=values, keys=family.keys)
