"""The runner of the CPU: weights, KV cache and step graph on a worker's threads."""
