"""Tests of the benchmarks: what they count, not how fast anything is."""
