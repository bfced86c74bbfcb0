"""The project's own CUDA kernels (csrc/cuda), with the signatures of ``ops.torch_ops``.

They run where ``LMI_OPS`` asks for them; what a kernel doesn't cover (a dtype, a head size) goes to
the next best implementation, and the log says so once.
"""

from lmi_core.ops.kernels.cuda.activation import gated_activation
from lmi_core.ops.kernels.cuda.attention import attention
from lmi_core.ops.kernels.cuda.linear import linear, linear_packed
from lmi_core.ops.kernels.cuda.linear_quantized import linear_quantized
from lmi_core.ops.kernels.cuda.norm import rms_norm
from lmi_core.ops.kernels.cuda.rope import rope_cache_write
from lmi_core.ops.kernels.cuda.sampling import sample

__all__ = [
    "attention",
    "gated_activation",
    "linear",
    "linear_packed",
    "linear_quantized",
    "rms_norm",
    "rope_cache_write",
    "sample",
]
