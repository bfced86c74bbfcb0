"""Writing of models as GGUF files."""
