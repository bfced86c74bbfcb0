"""The part of vLLM that the adapter calls, with a scripted model."""
