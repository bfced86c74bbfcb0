"""``lmi bench``, and the parts that the benchmarks of the repository share with it."""
