"""The runner of the CPU: weights, KV cache and step graph on one worker thread."""
