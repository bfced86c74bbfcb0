"""LoRA adapters: PEFT's files, and where in the decoder they add to linears."""
