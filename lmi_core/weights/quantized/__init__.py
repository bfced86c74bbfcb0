"""Checkpoints whose linear layers are stored in codes of few bits: a module for each layout.

``checkpoint.py`` chooses the layout that config.json names; a layout says which tensors stand for a
layer, and makes a matrix of them, whose codes and scales are the checkpoint's own.
"""
