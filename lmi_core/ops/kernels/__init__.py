"""Implementations of the ops on torch devices, and which of them runs."""
