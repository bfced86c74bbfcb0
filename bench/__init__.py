"""Benchmarks: kernels, engine, serving, start-up, and the peers side by side."""
