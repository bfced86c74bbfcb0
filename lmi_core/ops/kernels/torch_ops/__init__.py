"""Ops in plain torch, for any device: what runs where no kernel of the project's own does.

Each has the signature of its counterpart in ``ops.triton``; arithmetic is float32.
"""

from lmi_core.ops.kernels.torch_ops.activation import activation, clip, gated_activation, soft_cap
from lmi_core.ops.kernels.torch_ops.attention import attention
from lmi_core.ops.kernels.torch_ops.experts import group_rows, route
from lmi_core.ops.kernels.torch_ops.linear import linear, linear_packed
from lmi_core.ops.kernels.torch_ops.linear_quantized import linear_quantized
from lmi_core.ops.kernels.torch_ops.norm import norm, rms_norm
from lmi_core.ops.kernels.torch_ops.rope import rope_cache_write
from lmi_core.ops.kernels.torch_ops.sampling import sample

__all__ = [
    "activation",
    "attention",
    "gated_activation",
    "group_rows",
    "linear",
    "linear_packed",
    "linear_quantized",
    "norm",
    "rms_norm",
    "rope_cache_write",
    "route",
    "sample",
    "soft_cap",
    "clip",
]
