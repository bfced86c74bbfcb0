"""The part of TensorRT-LLM that the adapter calls, with a scripted model."""

__version__ = "1.3.0rc26"
