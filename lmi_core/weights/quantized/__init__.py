"""Checkpoints whose linear layers are stored in int4 or int8: AWQ, GPTQ, compressed-tensors.

``checkpoint.py`` chooses the layout that config.json names; a layout says which tensors stand for a
layer, and makes an ``IntegerMatrix`` of them, whose codes and scales are the checkpoint's own.
"""
