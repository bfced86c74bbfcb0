"""GGUF: one file with a model's settings, tokenizer and tensors, as llama.cpp's tools write it."""
