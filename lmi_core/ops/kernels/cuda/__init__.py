"""The project's own CUDA kernels (csrc/cuda), with the signatures of ``torch_ops``.

What a kernel doesn't cover (a dtype, a head size) goes to the next best implementation, and the log
says so once.
"""
