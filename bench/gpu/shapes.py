"""What the suite measures; needs nothing that has to be built."""

from __future__ import annotations

from bench.checkpoints import Shape

STANDARD_DEVIATION = 0.02
"""Of random weights."""
GPU_SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen2-1.5b", "Qwen2ForCausalLM", 28, 1536, 12, 2, 8960, True, 151936),
        Shape("llama3-8b", "LlamaForCausalLM", 32, 4096, 32, 8, 14336, False, 128256),
        Shape("near-zero", "LlamaForCausalLM", 2, 128, 4, 2, 256, False, 512),
    )
}
