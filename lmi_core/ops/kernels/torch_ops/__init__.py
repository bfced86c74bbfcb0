"""Ops in plain torch, for any device: what runs where no kernel of the project's own does.

What an op's function takes and gives in every package is said here; arithmetic is float32.
"""
