"""Benchmarks of single kernels: ``python -m bench.kernels.NAME``."""
