"""EAGLE heads for tests: random ones in the layouts that are published, and what they draft by
definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

HIDDEN, INNER, VOCAB, DRAFT_VOCAB = 64, 96, 384, 200
HEADS, KV_HEADS, HEAD_DIM, EPS = 4, 2, 16, 1e-6
LAYERS = [0, 1, 2]


def write_head(directory: Path, kind: str = "eagle3", **changes: Any) -> Path:
    """``kind``: eagle3, as its authors have it; speculators, the same in another layout; eagle."""
    from safetensors.torch import save_file

    directory.mkdir()
    generator = torch.Generator().manual_seed(3)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    def weight(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    is_third = kind != "eagle"
    read = 2 * HIDDEN if is_third else HIDDEN
    layer = {
        "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, read),
        "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, read),
        "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, read),
        "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
        "mlp.up_proj.weight": matrix(INNER, HIDDEN),
        "mlp.down_proj.weight": matrix(HIDDEN, INNER),
        "post_attention_layernorm.weight": weight(HIDDEN),
    }
    tensors = {"embed_tokens.weight": matrix(VOCAB, HIDDEN) * 8}
    settings: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": EPS,
        "vocab_size": VOCAB,
    }
    config = {"architectures": ["LlamaForCausalLM"], **settings}
    if is_third:
        layer |= {"hidden_norm.weight": weight(HIDDEN), "input_layernorm.weight": weight(HIDDEN)}
        ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
        tensors |= {
            "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
            "norm.weight": weight(HIDDEN),
            "lm_head.weight": matrix(DRAFT_VOCAB, HIDDEN) * 4,
            "d2t": ids - torch.arange(DRAFT_VOCAB),
            "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True),
        }
        config["architectures"] = ["LlamaForCausalLMEagle3"]
        config |= {"draft_vocab_size": DRAFT_VOCAB}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in LAYERS]}
    else:
        tensors |= {"fc.weight": matrix(HIDDEN, 2 * HIDDEN), "fc.bias": matrix(1, HIDDEN)[0]}
    if kind == "speculators":
        config = {
            "architectures": ["Eagle3Speculator"],
            "transformer_layer_config": settings,
            "draft_vocab_size": DRAFT_VOCAB,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": LAYERS,
        }
    prefix = "midlayer." if kind == "eagle3" else "layers.0."
    tensors |= {prefix + name: tensor for name, tensor in layer.items()}
    tensors |= changes.pop("tensors", {})
    save_file({k: v for k, v in tensors.items() if v is not None}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


class Reference:
    """A head beside the model in ``target``, in fp32, of every token anew."""

    def __init__(self, directory: Path, target: Path) -> None:
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.w = {
            name.removeprefix("midlayer.").removeprefix("layers.0."): tensor
            for name, tensor in load_file(directory / "model.safetensors").items()
        }
        config = json.loads((directory / "config.json").read_text())
        self.norms_residual = config.get("norm_before_residual", False)
        self.is_third = "hidden_norm.weight" in self.w

    @torch.no_grad()
    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """Greedily, behind a text whose last token the model hasn't seen."""
        seen = self.model(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        if self.is_third:
            states = torch.cat([seen[i][0] for i in LAYERS], -1) @ self.w["fc.weight"].T
        else:
            states = seen[-1][0]
        tokens, drafts = list(token_ids[1:]), []
        for _ in range(count):
            state, logits = self._last(torch.tensor(tokens), states)
            best = int(logits.argmax())
            drafts.append(best + int(self.w["d2t"][best]) if self.is_third else best)
            tokens.append(drafts[-1])
            states = torch.cat([states, state[None]])
        return drafts

    def _last(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        w, rows = self.w, self.w["embed_tokens.weight"][tokens]
        if self.is_third:
            normed = self._norm(states, "hidden_norm")
            x = normed if self.norms_residual else states
            h = torch.cat([self._norm(rows, "input_layernorm"), normed], -1)
        else:
            h = x = torch.cat([rows, states], -1) @ w["fc.weight"].T + w["fc.bias"]
        x = x + self._attention(h) @ w["self_attn.o_proj.weight"].T
        h = self._norm(x, "post_attention_layernorm")
        gate, up = h @ w["mlp.gate_proj.weight"].T, h @ w["mlp.up_proj.weight"].T
        last = (x + (silu(gate) * up) @ w["mlp.down_proj.weight"].T)[-1]
        if self.is_third:
            return last, self._norm(last, "norm") @ w["lm_head.weight"].T
        return last, self.model.lm_head(last)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, (HIDDEN,), self.w[f"{name}.weight"], EPS)

    def _attention(self, h: Tensor) -> Tensor:
        angles = torch.arange(len(h))[:, None] * 1e4 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def heads(part: str, rotates: bool = True) -> Tensor:
            x = (h @ self.w[f"self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, HEAD_DIM))
            x = x.transpose(0, 1)
            if part != "q":
                x = x.repeat_interleave(HEADS // KV_HEADS, 0)
            turned = torch.cat([-x[..., HEAD_DIM // 2 :], x[..., : HEAD_DIM // 2]], -1)
            return x * cos + turned * sin if rotates else x

        y = scaled_dot_product_attention(heads("q"), heads("k"), heads("v", False), is_causal=True)
        return y.transpose(0, 1).flatten(1)
