"""Triton kernels, with the signatures of ``ops.torch_ops``; arithmetic is float32.

Without a GPU they run in Triton's interpreter, in a process started with ``TRITON_INTERPRET=1``.
"""

from lmi_core.ops.kernels.triton.activation import gated_activation
from lmi_core.ops.kernels.triton.attention import attention
from lmi_core.ops.kernels.triton.linear_packed import linear_packed
from lmi_core.ops.kernels.triton.linear_quantized import linear_quantized
from lmi_core.ops.kernels.triton.norm import rms_norm
from lmi_core.ops.kernels.triton.rope import rope_cache_write

__all__ = [
    "attention",
    "gated_activation",
    "linear_packed",
    "linear_quantized",
    "rms_norm",
    "rope_cache_write",
]
