"""Ops in plain torch, for any device: what runs where no kernel of the project's own does.

Each has the signature of its counterpart in ``ops.triton``; arithmetic is float32.
"""
