"""Triton kernels, with the signatures of ``torch_ops``; arithmetic is float32.

Without a GPU they run in Triton's interpreter, in a process started with ``TRITON_INTERPRET=1``.
"""
