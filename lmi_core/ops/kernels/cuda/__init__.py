"""The project's own CUDA kernels (csrc/cuda), with the signatures of ``ops.torch_ops``.

They run where ``LMI_OPS`` asks for them; what a kernel doesn't cover (a dtype, a head size) goes to
the next best implementation, and the log says so once.
"""
