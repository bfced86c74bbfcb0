"""A bench checkpoint as a bf16 GGUF file: ``python -m bench.peers.gguf_writer CHECKPOINT FILE``.

Runs in llama.cpp's environment and needs no PyTorch. Follows the GGUF specification and the tensor
names of its ``llama``, ``qwen2`` and ``qwen3moe`` architectures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
UNUSED_MERGE = "! #"
"""The format wants a list of merges; this one makes the last token, and no prompt holds it."""
NORMAL, CONTROL = 1, 3


def gguf_name(name: str) -> str:
    """The name of a checkpoint's tensor in the file."""
    if name in NAMES:
        return NAMES[name]
    layer_id, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer_id}.{LAYER_NAMES[module]}.{kind}"


def interleave(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Rows of a q or k projection from halves rotated together to neighbours rotated together,
    which is how the ``llama`` architecture's rotary embedding pairs them."""
    heads = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(rows.shape))


def read_bf16(path: Path) -> dict[str, npt.NDArray[np.uint16]]:
    """The tensors of a safetensors file that holds only bf16, mapped."""
    data = np.memmap(path, np.uint8, "r")
    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8 : 8 + header_bytes].tobytes())
    header.pop("__metadata__", None)
    body = data[8 + header_bytes :]
    return {
        name: body[slice(*entry["data_offsets"])].view(np.uint16).reshape(entry["shape"])
        for name, entry in header.items()
    }


def write(checkpoint: Path, target: Path) -> None:
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    architecture = config["model_type"].replace("_", "")
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    if num_experts := config.get("num_experts", 0):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    add_tokenizer(writer, checkpoint, config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = read_bf16(checkpoint / "model.safetensors")
    for name, rows in with_stacks(tensors, num_experts):
        module = name.split(".")[-2]
        if architecture == "llama" and module in heads:
            rows = interleave(rows, heads[module])
        add_tensor(writer, gguf_name(name), rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def with_stacks(
    tensors: dict[str, npt.NDArray[np.uint16]], num_experts: int
) -> Iterator[tuple[str, npt.NDArray[np.uint16]]]:
    """Experts' matrices of a layer as one tensor of three dimensions."""
    for name, rows in tensors.items():
        if ".experts." not in name:
            yield name, rows
        elif ".experts.0." in name:
            names = [name.replace(".experts.0.", f".experts.{i}.") for i in range(num_experts)]
            yield name.replace(".experts.0.", ".experts."), np.stack([tensors[n] for n in names])


def add_tensor(writer: Any, name: str, rows: npt.NDArray[np.uint16]) -> None:
    """Matrices as bf16; norms and biases as fp32, which the format wants."""
    import gguf

    if rows.ndim == 1:
        writer.add_tensor(name, (rows.astype(np.uint32) << 16).view(np.float32))
    else:
        data = np.ascontiguousarray(rows).view(np.uint8)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)


def add_tokenizer(writer: Any, checkpoint: Path, config: dict[str, Any]) -> None:
    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens[-1] = UNUSED_MERGE.replace(" ", "")
    special = (config["bos_token_id"], config["eos_token_id"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if i in special else NORMAL for i in range(len(tokens))])
    writer.add_token_merges([UNUSED_MERGE])
    writer.add_bos_token_id(special[0])
    writer.add_eos_token_id(special[1])
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
