"""Realistic configurations, one or more for every system; their explanations are golden files."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmi_core.config.targets.host import Host

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 4096,
}

CPU = Host()
ON_CPU = ("model", "--device", "cpu")
"""For degrees of parallelism, which mean nothing there."""
NO_CACHE = {"HF_HOME": "absent", "DJL_CACHE_DIR": "absent"}
"""Keeps what this machine has fetched out of the results."""


@dataclass(frozen=True)
class Case:
    """A model directory ``model`` (if there are properties), arguments and environment."""

    properties: str | None = None
    argv: tuple[str, ...] = ("model",)
    environ: dict[str, str] = field(default_factory=dict)
    config: dict[str, object] | None = None
    host: Host = CPU
    exit_code: int = 0


_VLLM = """\
engine=Python
option.model_id=mistralai/Mistral-7B-Instruct-v0.2
option.revision=b70aa86578567ba3301b21c8a27bea4e8f6d6d61
option.rolling_batch=vllm
option.tensor_parallel_degree=max
option.max_rolling_batch_size=64
option.max_model_len=8192
option.gpu_memory_utilization=0.9
option.enforce_eager=false
option.enable_chunked_prefill=true
option.enable_prefix_caching=true
option.max_rolling_batch_prefill_tokens=4096
option.kv_transfer_config={"kv_role":"kv_both"}
"""
_TRTLLM = """\
engine=MPI
option.model_id=s3://my-bucket/llama-2-13b-chat
option.tensor_parallel_degree=4
option.rolling_batch=trtllm
option.max_rolling_batch_size=32
option.max_input_len=2048
option.max_output_len=1024
option.dtype=fp16
option.tokens_per_block=64
option.batch_scheduler_policy=guaranteed_no_evict
option.kv_cache_free_gpu_mem_fraction=0.9
option.enable_kv_cache_reuse=true
option.use_custom_all_reduce=true
option.multi_block_mode=false
"""
_NEURONX = """\
engine=Python
option.entryPoint=djl_python.transformers_neuronx
option.tensor_parallel_degree=8
option.n_positions=2048
option.dtype=fp16
option.rolling_batch=auto
option.max_rolling_batch_size=8
option.neuron_optimize_level=2
option.context_length_estimate=256,512,1024
option.group_query_attention=shard-over-heads
"""
_DEEPSPEED = """\
engine=DeepSpeed
option.task=text-generation
option.dtype=fp16
option.tensor_parallel_degree=4
option.max_tokens=2048
option.triangular_masking=true
option.return_tuple=true
option.enable_cuda_graph=false
option.low_cpu_mem_usage=true
option.parallel_loading=true
batch_size=4
max_batch_delay=50
"""

CASES: dict[str, Case] = {
    "common": Case(
        "engine=Python\n"
        "option.dtype=bf16\n"
        "option.rolling_batch=auto\n"
        "option.max_rolling_batch_size=16\n"
        "option.output_formatter=jsonlines\n"
        "option.trust_remote_code=false\n"
        "option.model_loading_timeout=3600\n"
        "job_queue_size=500\n",
        config=LLAMA,
    ),
    "environment": Case(
        argv=(),
        environ={
            "HF_MODEL_ID": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
            "OPTION_ROLLING_BATCH": "auto",
            "OPTION_MAX_MODEL_LEN": "2048",
            "TENSOR_PARALLEL_DEGREE": "max",
            "MAX_CONCURRENT_REQUESTS": "200",
            "SERVING_JOB_QUEUE_SIZE": "300",
            "SERVING_INFERENCE_ADDRESS": "http://0.0.0.0:8080",
            "OPTION_MAX_ROLLING_BATCHSIZE": "8",
        },
    ),
    "accelerate": Case(
        "engine=Python\n"
        "option.entryPoint=djl_python.huggingface\n"
        "option.task=text-generation\n"
        "option.device_map=auto\n"
        "option.low_cpu_mem_usage=true\n"
        "option.dtype=fp16\n"
        "option.load_in_8bit=true\n"
        "option.rolling_batch=disable\n"
        "option.batch_size=4\n",
        config=LLAMA,
    ),
    "scheduler": Case(
        "engine=Python\n"
        "option.rolling_batch=scheduler\n"
        "option.max_rolling_batch_size=8\n"
        "option.decoding_strategy=greedy\n"
        "option.max_sparsity=0.33\n"
        "option.max_splits=3\n"
        "option.disable_flash_attn=true\n",
        config=LLAMA,
    ),
    "lmi_dist": Case(
        "engine=MPI\n"
        "option.model_id=meta-llama/Llama-2-13b-hf\n"
        "option.rolling_batch=lmi-dist\n"
        "option.tensor_parallel_degree=4\n"
        "option.max_rolling_batch_prefill_tokens=1088\n"
        "option.paged_attention=true\n"
        "option.dtype=fp16\n"
        "option.speculative_draft_model=JackFram/llama-68m\n"
        "option.speculative_length=4\n",
        ON_CPU,
    ),
    "vllm": Case(_VLLM),
    "vllm_prefer_native": Case(_VLLM, ("model", "--prefer-native")),
    "deepspeed": Case(_DEEPSPEED, ON_CPU, config=LLAMA),
    "deepspeed_smoothquant": Case(
        "engine=DeepSpeed\noption.quantize=smoothquant\noption.smoothquant_alpha=0.65\n",
        config=LLAMA,
    ),
    "fastertransformer": Case(
        "engine=FasterTransformer\n"
        "option.tensor_parallel_degree=1\n"
        "option.pipeline_parallel_degree=1\n"
        "option.dtype=fp32\n",
        config=LLAMA,
    ),
    "neuronx": Case(_NEURONX, ON_CPU, config=LLAMA),
    "neuronx_missing": Case(_NEURONX, config=LLAMA, host=Host(num_neuron_cores=8), exit_code=2),
    "neuronx_installed": Case(
        _NEURONX,
        config=LLAMA,
        host=Host(num_neuron_cores=8, packages=frozenset({"vllm_neuron"})),
    ),
    "trtllm": Case(_TRTLLM, exit_code=2),
    "trtllm_installed": Case(_TRTLLM, host=Host(num_gpus=4, packages=frozenset({"tensorrt_llm"}))),
    "trtllm_prefer_native": Case(_TRTLLM, (*ON_CPU, "--prefer-native")),
    "trtllm_smoothquant": Case(
        "engine=MPI\n"
        "option.rolling_batch=trtllm\n"
        "option.quantize=smoothquant\n"
        "option.smoothquant_alpha=0.8\n"
        "option.smoothquant_per_token=true\n"
        "option.smoothquant_per_channel=true\n"
        "option.multi_query_mode=false\n",
        config=LLAMA,
    ),
    "trtllm_awq": Case(
        "engine=MPI\n"
        "option.rolling_batch=trtllm\n"
        "option.quantize=awq\n"
        "option.awq_format=int4_awq\n"
        "option.awq_calib_size=32\n",
        config=LLAMA,
    ),
    "vllm_awq": Case(
        "option.rolling_batch=vllm\noption.quantize=awq_marlin\noption.dtype=fp16\n",
        argv=("model", "--prefer-native"),
        config=LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4}},
    ),
    "tgi_gptq": Case(
        "",
        argv=("--model-id", "model", "--quantize", "gptq"),
        config=LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    ),
    "several": Case(
        "option.dtype=bf16\njob_queue_size=9\n",
        argv=("--admin-key", "a-secret"),
        environ={
            "SERVING_LOAD_MODELS": "chat:v1:Python=model,chat:v2=model",
            "SERVING_MODEL_STORE": "store",
            "SERVING_MODEL_URL_PATTERN": "s3://models/.*",
            "SERVING_ALLOW_CUSTOM_CODE": "false",
            "SERVING_WAIT_MODEL_LOADING": "false",
            "SERVING_ALLOW_MULTI_STATUS": "true",
        },
        config=LLAMA,
    ),
    "batching": Case(
        "engine=Python\n"
        "option.rolling_batch=disable\n"
        "option.enable_streaming=true\n"
        "batch_size=8\n"
        "max_batch_delay=20\n"
        "max_idle_time=30\n"
        "minWorkers=1\n"
        "maxWorkers=2\n",
        config=LLAMA,
        exit_code=2,
    ),
    "batching_dynamic": Case(
        "engine=Python\n"
        "option.rolling_batch=disable\n"
        "option.batch_size=8\n"
        "option.max_batch_delay=50\n"
        'option.stop_sequence=["###", "User:"]\n'
        "job_queue_size=200\n"
        "gpu.maxWorkers=1\n"
        "reserved_memory_mb=1000\n",
        config=LLAMA,
    ),
    "sagemaker": Case(
        argv=(),
        environ={
            "HF_MODEL_ID": "meta-llama/Llama-3.1-8B-Instruct",
            "HF_MODEL_REVISION": "main",
            "SM_NUM_GPUS": "1",
            "HF_MODEL_QUANTIZE": "bitsandbytes",
            "SAGEMAKER_STARTUP_TIMEOUT": "900",
            "SAGEMAKER_MAX_PAYLOAD_IN_MB": "6",
            "SERVING_REQUEST_ID_HEADER_KEY": "X-Amzn-SageMaker-Inference-Id",
        },
    ),
    "gpu": Case(
        "option.model_id=Qwen/Qwen3-8B\n"
        "option.device=cuda\n"
        "option.dtype=bf16\n"
        "option.gpu_memory_utilization=0.8\n"
        "option.num_threads=4\n"
        "option.max_model_len=8192\n",
        host=Host(num_gpus=1),
    ),
    "stable_diffusion": Case(
        "engine=Python\n"
        "option.entryPoint=djl_python.stable_diffusion\n"
        "option.model_id=stabilityai/stable-diffusion-2-1\n",
        exit_code=2,
    ),
    "tgi_quantized": Case(
        argv=(
            *("--model-id", "teknium/OpenHermes-2.5-Mistral-7B", "--quantize", "eetq"),
            *("--rope-scaling", "dynamic", "--rope-factor", "2.0", "--max-total-tokens", "8192"),
            *("--max-batch-total-tokens", "32768", "--cuda-memory-fraction", "0.9"),
            *("--json-output", "--max-best-of", "4", "--cuda-graphs", "1,2,4"),
        ),
        environ={"HF_TOKEN": "hunter2", "LOG_LEVEL": "info"},
    ),
    "tgi": Case(
        argv=(
            *("--model-id", "HuggingFaceH4/zephyr-7b-beta", "--num-shard", "1"),
            *("--max-input-tokens", "3072", "--max-total-tokens", "4096"),
            *("--max-batch-prefill-tokens", "4096", "--max-concurrent-requests", "64"),
            *("--waiting-served-ratio", "1.2", "--max-waiting-tokens", "20"),
            *("--trust-remote-code", "--port", "8080"),
        ),
        host=Host(num_gpus=1),
    ),
    "tgi_environment": Case(
        argv=(),
        environ={
            "MODEL_ID": "bigscience/bloom-560m",
            "QUANTIZE": "bitsandbytes-nf4",
            "NUM_SHARD": "1",
            "MAX_INPUT_LENGTH": "1024",
            "MAX_TOTAL_TOKENS": "1024",
            "PORT": "80",
            "API_KEY": "hunter2",
        },
        exit_code=2,
    ),
    "mistakes": Case(
        "option.model_id=org/model\n"
        "option.dtype=fp17\n"
        "option.rolling_bach=auto\n"
        "option.max_sparsity=1.5\n"
        "option.decoding_strategy=contrastive # or sample, greedy\n"
        "option.tensor_parallel_degree=two\n",
        exit_code=2,
    ),
}
