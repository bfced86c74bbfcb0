"""Engine arguments; names and defaults are vLLM's."""

from dataclasses import dataclass, field


@dataclass
class AsyncEngineArgs:
    model: str = ""
    served_model_name: "str | list[str] | None" = None
    dtype: str = "auto"
    seed: int = 0
    max_model_len: "int | None" = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    gpu_memory_utilization: float = 0.92
    max_num_batched_tokens: "int | None" = None
    max_num_seqs: "int | None" = None
    max_logprobs: int = 20
    enforce_eager: bool = False
    enable_prefix_caching: "bool | None" = None
    trust_remote_code: bool = False
    quantization: "str | None" = None
    speculative_config: "dict | None" = None
    kv_transfer_config: "dict | None" = None
    additional_config: dict = field(default_factory=dict)
    block_size: "int | None" = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: "int | None" = None
    lora_dtype: str = "auto"
    disable_log_stats: bool = False
    enable_log_requests: bool = False

    def __post_init__(self):
        if self.dtype not in ("auto", "float32", "float16", "bfloat16"):
            raise ValueError(f"unknown dtype {self.dtype}")
