"""The committed model directory: files that agree with each other, the trainer and transformers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

from bench.demo.bpe import load_tokenizer
from bench.demo.chat import SPECIAL_TOKENS, TEMPLATE, Turn, render_chat
from lmi_core.demo import MODEL_DIR

TOKENIZER = load_tokenizer(MODEL_DIR)
CONFIG = json.loads((MODEL_DIR / "config.json").read_text())
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": " Hello "},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "What is 3 + 4?"},
]


def load_json(name: str) -> dict[str, object]:
    return json.loads((MODEL_DIR / name).read_text())


def test_weights_are_small_bf16_and_fit_the_config() -> None:
    path = MODEL_DIR / "model.safetensors"
    assert path.stat().st_size <= 9_000_000
    hidden, mlp, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    q_size = CONFIG["num_attention_heads"] * head
    kv_size = CONFIG["num_key_value_heads"] * head
    shapes = {"embed_tokens": [CONFIG["vocab_size"], hidden], "norm": [hidden]}
    for layer_id in range(CONFIG["num_hidden_layers"]):
        shapes |= {
            f"layers.{layer_id}.{name}": shape
            for name, shape in {
                "input_layernorm": [hidden],
                "post_attention_layernorm": [hidden],
                "self_attn.q_proj": [q_size, hidden],
                "self_attn.k_proj": [kv_size, hidden],
                "self_attn.v_proj": [kv_size, hidden],
                "self_attn.o_proj": [hidden, q_size],
                "mlp.gate_proj": [mlp, hidden],
                "mlp.up_proj": [mlp, hidden],
                "mlp.down_proj": [hidden, mlp],
            }.items()
        }
    with safe_open(path, framework="np") as weights:
        names = list(weights.keys())
        found = {name: weights.get_slice(name) for name in names}
        assert {part.get_dtype() for part in found.values()} == {"BF16"}
        assert {name: part.get_shape() for name, part in found.items()} == {
            f"model.{name}.weight": shape for name, shape in shapes.items()
        }


def test_shape_is_what_the_kernels_are_tuned_for() -> None:
    assert CONFIG["architectures"] == ["LlamaForCausalLM"]
    assert CONFIG["tie_word_embeddings"] is True
    assert CONFIG["hidden_size"] % 128 == 0
    assert CONFIG["intermediate_size"] % 128 == 0
    assert (
        CONFIG["max_position_embeddings"] == load_json("tokenizer_config.json")["model_max_length"]
    )


def test_tokenizer_fits_the_config() -> None:
    assert TOKENIZER.get_vocab_size() == CONFIG["vocab_size"]
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(6))
    assert CONFIG["bos_token_id"] == TOKENIZER.token_to_id("<|begin|>")
    eos_ids = [TOKENIZER.token_to_id(token) for token in ("<|endoftext|>", "<|end|>")]
    assert load_json("generation_config.json")["eos_token_id"] == eos_ids
    assert CONFIG["eos_token_id"] == eos_ids


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    if not any(token in text for token in SPECIAL_TOKENS):
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_every_byte_has_a_token() -> None:
    text = bytes(range(256)).decode("latin-1") + "é漢🙂\x00"
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids) == text
    assert len({piece for piece in TOKENIZER.get_vocab() if len(piece) == 1}) == 256


def test_digits_are_single_tokens() -> None:
    assert TOKENIZER.encode("1234", add_special_tokens=False).tokens == list("1234")
    long_digits = [p for p in TOKENIZER.get_vocab() if sum(map(str.isdigit, p)) and len(p) > 1]
    assert long_digits == []


def test_encoding_begins_with_the_begin_token() -> None:
    assert TOKENIZER.encode("Once upon a time").ids[0] == CONFIG["bos_token_id"]


def test_common_words_are_short() -> None:
    text = "Once upon a time, there was a little fox who lived in a castle."
    assert len(TOKENIZER.encode(text, add_special_tokens=False).ids) <= len(text.split()) + 3


def render(messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
    config = load_json("tokenizer_config.json")
    template = ImmutableSandboxedEnvironment().from_string(str(config["chat_template"]))
    return template.render(
        messages=messages,
        bos_token=config["bos_token"],
        add_generation_prompt=add_generation_prompt,
    )


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_template_renders_as_the_generator_does(add_generation_prompt: bool) -> None:
    turns = [Turn(message["role"], message["content"]) for message in CHAT]
    expected = render_chat(turns, generation_prompt=add_generation_prompt)
    assert render(CHAT, add_generation_prompt=add_generation_prompt) == expected
    assert load_json("tokenizer_config.json")["chat_template"] == TEMPLATE


def test_template_spells_out_the_roles() -> None:
    text = render(CHAT[:2], add_generation_prompt=True)
    assert text == "<|begin|><|system|>Be kind.<|end|><|user|>Hello<|end|><|assistant|>"


def test_transformers_loads_the_directory() -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    assert model.dtype == torch.bfloat16
    ids = tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    own = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    text = render(CHAT, add_generation_prompt=True)
    assert ids[0].tolist() == own.encode(text, add_special_tokens=False).ids
    out = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == "3 + 4 = 7"
