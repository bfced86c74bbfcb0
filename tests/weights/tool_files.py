"""Files that other tools write of the embedded model, served over HTTP.

    python -m tests.weights.tool_files gguf bitsandbytes compressed-tensors gptqmodel

Each tool by the name of its package, which must be there; of llama.cpp, with ``gguf``, the program
that ``--llama-quantize`` names. ``lmi serve`` answers in fp32 with rows as they are, as must
Transformers in fp32 with the weights that the tool's own dequantisation gives: greedy text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from lmi_core.demo import MODEL_DIR
from tests.gguf_files import llama_metadata, llama_tensors
from tests.server.serve_process import serve

State = dict[str, torch.Tensor]
PROMPTS = ("Once upon a time there was a", "Question: What is 12 plus 7?\nAnswer:")
NUM_TOKENS = 32
EXACT = {"OPTION_DTYPE": "fp32", "OPTION_ACTIVATIONS": "bf16"}
FLOATS: State = {
    name: tensor.float() for name, tensor in load_file(MODEL_DIR / "model.safetensors").items()
}
LINEARS = [name for name in FLOATS if name.endswith("_proj.weight")]
LLAMA_KINDS = ("Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q6_K", "IQ4_XS")
MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
Case = tuple[str, Path, State]
"""What is written, where, and what its weights are."""


def model_of(state: State) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(MODEL_DIR)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model.eval()


def expected_texts(state: State) -> list[str]:
    model, texts = model_of(state), []
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        start = len(ids)
        for _ in range(NUM_TOKENS):
            with torch.no_grad():
                token_id = int(model(torch.tensor([ids])).logits[0, -1].argmax())
            if token_id in (1, 5):
                break
            ids.append(token_id)
        texts.append(tokenizer.decode(ids[start:]))
    return texts


def served_texts(path: Path) -> list[str]:
    texts = []
    with serve(path) as process:
        with urllib.request.urlopen(f"{process.url}/v1/models") as response:
            name = json.load(response)["data"][0]["id"]
        for prompt in PROMPTS:
            body = {"model": name, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
            request = urllib.request.Request(
                f"{process.url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=120) as response:
                texts.append(json.load(response)["choices"][0]["text"])
    return texts


def directory_of(path: Path, state: State, settings: dict[str, Any]) -> Path:
    """The model's directory with these tensors."""
    shutil.copytree(MODEL_DIR, path)
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return path


def add_tokenizer(path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(MODEL_DIR / name, path / name)


def write_by_gguf(path: Path, kind: str) -> Path:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    metadata = llama_metadata(MODEL_DIR, pre="smollm", **{"tokenizer.ggml.eot_token_id": 5})
    del metadata["general.architecture"]
    adders = {bool: "bool", int: "uint32", float: "float32", str: "string"}
    for key, value in metadata.items():
        add = getattr(writer, f"add_{adders.get(type(value), 'array')}")
        add(key, value.tolist() if isinstance(value, np.ndarray) else value)
    for name, (_, shape, values) in llama_tensors(MODEL_DIR, "F32").items():
        values = np.ascontiguousarray(values.reshape(shape), np.float32)
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(name, values)
        else:
            as_kind = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(values, as_kind), raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_by_gguf(path: Path) -> State:
    import gguf

    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        *layer, module, _ = tensor.name.split(".")
        prefix = f"model.layers.{layer[1]}." if layer else ""
        name = f"{prefix}{MODULES[module]}.weight"
        shape = [int(size) for size in reversed(tensor.shape)]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        for num_heads, part in ((4, "q_proj"), (2, "k_proj")):
            if part in name:
                heads = values.reshape(num_heads, -1, 2, shape[1])
                values = heads.swapaxes(1, 2).reshape(shape)
        state[name] = torch.from_numpy(np.ascontiguousarray(values))
    return state


def of_gguf(root: Path, llama_quantize: Path | None) -> Iterator[Case]:
    for kind in ("F16", "Q8_0"):
        path = write_by_gguf(root / f"{kind}.gguf", kind)
        yield f"gguf's writer, {kind}", path, read_by_gguf(path)
    if llama_quantize is None:
        return
    floats = write_by_gguf(root / "F32.gguf", "F32")
    for kind in LLAMA_KINDS:
        path = root / f"llama-{kind}.gguf"
        subprocess.run([llama_quantize, floats, path, kind, "1"], check=True, capture_output=True)
        yield f"llama.cpp's quantiser, {kind}", path, read_by_gguf(path)


def of_bitsandbytes(root: Path) -> Iterator[Case]:
    import bitsandbytes as bnb
    from transformers import BitsAndBytesConfig

    asked: dict[str, dict[str, Any]] = {
        "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "fp4 twice": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        "int8": {"load_in_8bit": True},
    }
    for name, settings in asked.items():
        config = BitsAndBytesConfig(**settings)
        model = AutoModelForCausalLM.from_pretrained(
            MODEL_DIR, quantization_config=config, dtype=torch.float32, device_map="cpu"
        )
        path, state = root / name, dict(FLOATS)
        model.save_pretrained(path)
        add_tokenizer(path)
        for module_name, module in model.named_modules():
            weight = f"{module_name}.weight"
            if isinstance(module, bnb.nn.Linear4bit):
                stored = module.weight
                floats = bnb.functional.dequantize_4bit(stored.data, stored.quant_state)
                state[weight] = floats.float().reshape(FLOATS[weight].shape)
            elif isinstance(module, bnb.nn.Linear8bitLt):
                state[weight] = module.weight.data.float() * module.weight.SCB[:, None] / 127
        yield f"bitsandbytes, {name}", path, state


def of_compressed_tensors(root: Path) -> Iterator[Case]:
    from compressed_tensors import quantization as ct
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    for preset in ("W4A16", "W8A16", "W8A8", "FP8_DYNAMIC", "W4A8"):
        model, state = model_of(FLOATS), dict(FLOATS)
        scheme = ct.preset_name_to_scheme(preset, ["Linear"])
        groups = {"group_0": scheme}
        ct.apply_quantization_config(
            model, ct.QuantizationConfig(config_groups=groups, ignore=["lm_head"])
        )
        for name, module in model.named_modules():
            if getattr(module, "quantization_scheme", None) is None:
                continue
            arguments, weight = module.quantization_scheme.weights, module.weight.data
            parts = weight.reshape(len(weight), -1, arguments.group_size or weight.shape[1])
            scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), arguments)
            module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
            module.quantization_status = ct.QuantizationStatus.FROZEN
            made = fake_quantize(weight, module.weight_scale, zero.float(), arguments)
            state[f"{name}.weight"] = made.float()
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        path = root / preset
        model.save_pretrained(path)
        compressor.update_config(str(path))
        add_tokenizer(path)
        yield f"compressed-tensors, {preset}", path, state


def grid_of(
    weight: torch.Tensor, size: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales and zero points [outputs, groups], and the weights on that grid."""
    groups, most = weight.reshape(len(weight), -1, size), 2**bits - 1
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / most).half().float()
    zeros = (-low / scales).round()
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, most)
    return scales, zeros, ((codes - zeros[..., None]) * scales[..., None]).reshape(weight.shape)


def of_gptqmodel(root: Path) -> Iterator[Case]:
    """Packed by its own layers, with inputs in order and in another."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    size = 64
    for bits, is_ordered in itertools.product((2, 3, 4, 8), (False, True)):
        state = dict(FLOATS)
        stored = {name: tensor for name, tensor in FLOATS.items() if name not in LINEARS}
        for name in LINEARS:
            num_outputs, num_inputs = FLOATS[name].shape
            order = torch.arange(num_inputs)
            if is_ordered:
                order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(bits))
            places = order.argsort()
            scales, zeros, made = grid_of(FLOATS[name][:, order], size, bits)
            state[name] = made[:, places].contiguous()
            linear = torch.nn.Linear(num_inputs, num_outputs, bias=False)
            linear.weight.data = state[name].clone()
            layer = TorchLinear(
                bits=bits, group_size=size, sym=False, desc_act=is_ordered, in_features=num_inputs,
                out_features=num_outputs, bias=False, pack_dtype=torch.int32,
                register_buffers=True,
            )  # fmt: skip
            groups = (places // size).int()
            layer.pack(linear=linear, scales=scales, zeros=zeros, g_idx=groups)
            prefix = name.removesuffix("weight")
            stored |= {prefix + key: value for key, value in layer.state_dict().items()}
        settings = {"quant_method": "gptq", "bits": bits, "group_size": size}
        settings |= {"desc_act": is_ordered, "sym": False, "checkpoint_format": "gptq_v2"}
        name = f"gptqmodel, {bits} bits{', act-order' if is_ordered else ''}"
        yield name, directory_of(root / name, stored, settings), state


def main() -> None:
    parser = argparse.ArgumentParser()
    tools = ("gguf", "bitsandbytes", "compressed-tensors", "gptqmodel")
    parser.add_argument("tools", nargs="+", choices=tools)
    parser.add_argument("--llama-quantize", type=Path)
    arguments = parser.parse_args()
    is_wrong = False
    os.environ.update(EXACT)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = f"{directory}/cache"
        for tool in arguments.tools:
            made = globals()[f"of_{tool.replace('-', '_')}"]
            more = (arguments.llama_quantize,) if tool == "gguf" else ()
            for name, path, state in made(Path(directory), *more):
                same = served_texts(path) == expected_texts(state)
                is_wrong |= not same
                print(f"{name}: {'the same text' if same else 'ANOTHER TEXT'}", flush=True)
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
