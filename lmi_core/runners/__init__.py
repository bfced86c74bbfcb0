"""Runners: what executes the engine's steps, on the CPU, on torch devices, by Transformers."""
