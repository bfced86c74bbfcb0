"""What the backends of this version can do, as data (ARCHITECTURE's rule ``capability``).

An option or request parameter names the capability it needs. Turning a feature on is adding its
name to a backend here.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmi_core.weights.quantized.methods import METHODS

CAPABILITIES = {
    "batch.chunked_prefill": "prompts split over steps",
    "batch.invariant": "tokens that don't depend on the rest of the batch",
    "batch.paged": "continuous batching over a paged KV cache",
    "cache.prefix": "reuse of the KV cache of equal prefixes",
    "chat.content_format": "message contents in OpenAI's list form",
    "chat.reasoning": "splitting reasoning from the answer",
    "chat.tools": "tool calls",
    "device.cuda": "CUDA devices",
    "dtype.bf16": "bf16 weights",
    "dtype.fp32": "fp32 weights",
    "format.json": "json answers",
    "format.jsonlines": "jsonlines answers",
    "format.sse": "server-sent events on LMI routes",
    "format.tgi_compat": "TGI's answer format on LMI routes",
    "handler.custom": "running a custom model.py",
    "handler.formatter": "running a custom output formatter",
    "kv.fp8": "an fp8 KV cache",
    "kv.int8": "an int8 KV cache",
    "lora": "LoRA adapters",
    "parallel.cluster": "one model over several hosts",
    "parallel.copies": "several copies of a model",
    "parallel.pipeline": "pipeline parallelism",
    "parallel.tensor": "a copy that several devices share",
    "quant.bitsandbytes": "weights quantised at load as bitsandbytes does",
    "quant.eetq": "weights quantised at load as EETQ does",
    "quant.fp8": "fp8 weights quantised at load",
    "quant.int4": "int4 weights quantised at load",
    "quant.int8": "int8 weights quantised at load",
    "quant.smoothquant": "int8 weights and activations, smoothed at load",
    "request.contrastive": "contrastive search",
    "request.sampling": "sampling parameters",
    "request.stop": "stop texts",
    "request.watermark": "watermarking",
    "server.keystore": "TLS from a Java key store",
    "server.sessions_in_s3": "sessions in S3",
    "speculation.draft_model": "speculative decoding with a draft model",
    "speculation.ngram": "speculative decoding by n-gram",
    "task.other": "this task",
    "task.pooling": "embeddings, and scores of pairs of texts",
    "weights.awq": "AWQ checkpoints",
    "weights.bitsandbytes": "checkpoints of bitsandbytes",
    "weights.compressed-tensors": "checkpoints of compressed-tensors",
    "weights.dummy": "random weights",
    "weights.exl2": "EXL2 checkpoints",
    "weights.fbgemm_fp8": "fp8 checkpoints of FBGEMM",
    "weights.fp8": "fp8 checkpoints",
    "weights.gguf": "GGUF files",
    "weights.gptq": "GPTQ checkpoints",
    "weights.marlin": "checkpoints in Marlin's order",
    "weights.modelopt": "checkpoints of NVIDIA's Model Optimizer",
    "weights.mxfp4": "checkpoints with MXFP4 experts",
}
"""Every capability that the option table names, in words."""


@dataclass(frozen=True, slots=True)
class Backend:
    """What serves a model: its title, the capabilities it has, and what must be installed.

    ``index`` is where the package is, if PyPI doesn't have it.
    """

    name: str
    title: str
    capabilities: frozenset[str] = frozenset()
    package: str | None = None
    extra: str | None = None
    index: str | None = None

    @property
    def installation(self) -> str:
        """The command that installs what is needed."""
        command = f"pip install 'lmi-core[{self.extra}]'"
        return command if self.index is None else f"{command} --extra-index-url {self.index}"


_NEURON_INDEX = "https://pip.repos.neuron.amazonaws.com"

_FRONT = frozenset(
    {
        "chat.reasoning",
        "chat.tools",
        "format.json",
        "format.jsonlines",
        "format.sse",
        "format.tgi_compat",
        "request.sampling",
        "request.stop",
    }
)
"""What the server's routes bring, whatever computes the tokens."""

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            "lmi",
            "lmi engine",
            _FRONT
            | {
                "batch.chunked_prefill",
                "batch.invariant",
                "batch.paged",
                "cache.prefix",
                "device.cuda",
                "dtype.bf16",
                "dtype.fp32",
                "handler.formatter",
                "kv.fp8",
                "kv.int8",
                "lora",
                "parallel.copies",
                "parallel.tensor",
                "quant.bitsandbytes",
                "quant.eetq",
                "quant.fp8",
                "quant.int4",
                "quant.int8",
                "quant.smoothquant",
                "request.contrastive",
                "request.watermark",
                "speculation.draft_model",
                "speculation.ngram",
                "task.pooling",
                *(f"weights.{method}" for method in METHODS),
            },
        ),
        Backend(
            "transformers",
            "Transformers",
            _FRONT
            | {
                "batch.chunked_prefill",
                "device.cuda",
                "dtype.bf16",
                "dtype.fp32",
                "handler.formatter",
                "lora",
                "parallel.tensor",
                "request.watermark",
            },
            "transformers",
            "transformers",
        ),
        Backend(
            "vllm",
            "vLLM",
            _FRONT | {"lora", "parallel.copies", "parallel.tensor"},
            "vllm",
            "vllm",
        ),
        Backend("trtllm", "TensorRT-LLM", _FRONT | {"parallel.tensor"}, "tensorrt_llm", "trtllm"),
        Backend(
            "neuron",
            "vLLM Neuron",
            _FRONT | {"parallel.tensor"},
            "vllm_neuron",
            "neuron",
            _NEURON_INDEX,
        ),
        Backend("handler", "custom handler", frozenset({"handler.custom"})),
        Backend("server", "server"),
    )
}
"""The backends of this version by name; ``server`` takes the keys of the server as a whole."""
