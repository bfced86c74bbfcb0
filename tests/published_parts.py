"""What the references of ``tests.published_models`` are made of, in plain torch: a whole sequence
at a time, without a cache."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import Module, Parameter
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

Tensor = torch.Tensor
Shapes = dict[str, tuple[int, ...]]


class Published(PreTrainedModel):
    """A model whose parameters are ``shapes`` by name, and whose logits are ``forward_ids``."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for name, shape in self.shapes(config).items():
            *path, last = name.split(".")
            module: Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, Module())
                module = module.get_submodule(part)
            module.register_parameter(last, Parameter(torch.empty(shape)))
        self.post_init()

    def _init_weights(self, module: Module) -> None:
        pass

    def _weights(self, prefix: str = "") -> Any:
        """The parameters below ``prefix``, by the rest of their names."""
        return {
            name.removeprefix(prefix): parameter
            for name, parameter in self.named_parameters()
            if name.startswith(prefix)
        }

    @staticmethod
    def shapes(c: Any) -> Shapes:
        raise NotImplementedError

    def forward_ids(self, ids: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        return SimpleNamespace(logits=torch.stack([self.forward_ids(ids) for ids in input_ids]))

    @torch.no_grad()
    def generate(self, ids: Tensor, *, max_new_tokens: int, **settings: Any) -> Tensor:
        """Greedily, and no end."""
        for _ in range(max_new_tokens):
            logits = self.forward(ids).logits[:, -1]
            logits[:, self.config.eos_token_id] = -math.inf
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        return ids


def register(model_type: str, **names: str) -> Any:
    """Make Transformers load a class for ``model_type``; ``names``: of usual settings, those of its
    config.json."""

    def decorate(model: type[Published]) -> type[Published]:
        fields = {"model_type": model_type, "attribute_map": names}
        config = type(f"{model_type.title()}Config", (PreTrainedConfig,), fields)
        kind = type(model.__name__, (model,), {"config_class": config})
        # Releases of Transformers after those that a reference was written for may know its family.
        AutoConfig.register(model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, kind, exist_ok=True)
        return model

    return decorate


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def angles(x: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and pair, [tokens, 1, size / 2]."""
    frequencies = theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    turned = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * frequencies
    return turned.cos()[:, None].to(x.dtype), turned.sin()[:, None].to(x.dtype)


def rotate_halves(x: Tensor, theta: float) -> Tensor:
    """x [tokens, heads, size]; the first half of a head is turned with the second one."""
    cos, sin = angles(x, x.shape[-1], theta)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rotate_neighbours(x: Tensor, size: int, theta: float) -> Tensor:
    """Dimensions 2i and 2i + 1 of the first ``size`` are turned together."""
    cos, sin = angles(x, size, theta)
    a, b = x[..., 0:size:2], x[..., 1:size:2]
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([turned, x[..., size:]], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None) -> Tensor:
    """q [tokens, heads, size], k and v of fewer heads; each attends to itself and before."""
    tokens, heads, size = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
    if slopes is not None:
        keys = torch.arange(tokens, dtype=scores.dtype)
        scores = scores + slopes.to(scores.dtype)[:, None, None] * keys
    unseen = torch.ones(tokens, tokens).triu(1).bool()
    scores = scores.masked_fill(unseen, -math.inf)
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1, dtype=wide).to(q.dtype), v).flatten(1)


def heads_of(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(-1, (num_heads, -1))


def layers(count: int, prefix: str, layer: Shapes) -> Shapes:
    return {prefix.format(i) + name: shape for i in range(count) for name, shape in layer.items()}
