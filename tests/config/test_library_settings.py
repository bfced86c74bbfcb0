"""What a configuration becomes in other libraries' words: the arguments of their engines.

TensorRT-LLM's are those of its LLM API, Neuron's those of vLLM and its plugin; neither has run
here. What the arguments do is shown with scripted libraries in tests/adapters.
"""

import pytest

from lmi_core.config.targets.host import Host

LLAMA = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096}
GPUS = Host(num_gpus=4, packages=frozenset({"vllm", "tensorrt_llm"}))
NEURON = Host(num_neuron_cores=4, packages=frozenset({"vllm_neuron"}))


@pytest.mark.parametrize(
    ("properties", "host", "backend", "expected"),
    [
        (
            "option.rolling_batch=vllm\noption.max_rolling_batch_prefill_tokens=512\n"
            "option.gpu_memory_utilization=0.8\noption.tensor_parallel_degree=max\n"
            "option.enable_prefix_caching=true\noption.quantize=awq\noption.own_list=[1, 2]\n"
            "option.kv_cache_dtype=fp8_e4m3fn\n"
            'option.speculative_config={"method": "ngram", "num_speculative_tokens": 3}\n'
            'option.limit_mm_per_prompt={"image": 2}\noption.seed=4\noption.block_size=16\n'
            "option.own_text=word\noption.own_depth=" + "[" * 5000,
            GPUS,
            "vllm",
            {
                "max_num_seqs": 256,
                "max_num_batched_tokens": 512,
                "gpu_memory_utilization": 0.8,
                "tensor_parallel_size": 4,
                "enable_prefix_caching": True,
                "quantization": "awq",
                "kv_cache_dtype": "fp8_e4m3",
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
                "limit_mm_per_prompt": {"image": 2},
                "seed": 4,
                "block_size": 16,
                "own_list": [1, 2],
                "own_text": "word",
                "own_depth": "[" * 5000,
            },
        ),
        (
            "engine=MPI\noption.rolling_batch=trtllm\noption.tensor_parallel_degree=2\n"
            "option.max_num_tokens=2048\noption.max_rolling_batch_size=8\n"
            "option.kv_cache_free_gpu_mem_fraction=0.7\noption.enable_kv_cache_reuse=true\n"
            "option.batch_scheduler_policy=max_utilization\noption.dtype=bf16\n"
            'option.speculative_config={"decoding_type": "NGram", "max_draft_len": 3}',
            GPUS,
            "trtllm",
            {
                "tensor_parallel_size": 2,
                "max_num_tokens": 2048,
                "max_batch_size": 8,
                "kv_cache_config": {
                    "free_gpu_memory_fraction": 0.7,
                    "enable_block_reuse": True,
                },
                "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
                "dtype": "bfloat16",
                "speculative_config": {"decoding_type": "NGram", "max_draft_len": 3},
            },
        ),
        (
            "option.rolling_batch=tnx\noption.tensor_parallel_degree=4\noption.n_positions=1024\n"
            "option.max_rolling_batch_size=4\noption.dtype=bf16\n"
            "option.context_length_estimate=512,256\noption.enable_prefix_caching=false\n"
            'option.additional_config={"neuron_config": {"num_seqs_buckets": [4], '
            '"num_batched_tokens_buckets": [64]}, "own": 1}',
            NEURON,
            "neuron",
            {
                "tensor_parallel_size": 4,
                "max_model_len": 1024,
                "max_num_seqs": 4,
                "dtype": "bfloat16",
                "max_num_batched_tokens": 512,
                "enable_prefix_caching": False,
                "additional_config": {
                    "neuron_config": {
                        "num_batched_tokens_buckets": [256, 512],
                        "num_seqs_buckets": [4],
                    },
                    "own": 1,
                },
            },
        ),
    ],
)
def test_arguments(model_dir, explained, properties, host, backend, expected):
    (model,) = explained(model_dir(properties, config=LLAMA), host=host).models
    assert model.backend == backend
    found = dict(model.library.arguments)
    assert {name: found.get(name) for name in expected} == expected


def test_one_device_needs_no_degree(model_dir, explained):
    name = model_dir("option.rolling_batch=vllm\noption.tensor_parallel_degree=1", config=LLAMA)
    (model,) = explained(name, host=Host(packages=GPUS.packages)).models
    assert "tensor_parallel_size" not in model.library.arguments


@pytest.mark.parametrize(
    ("line", "outcome", "text"),
    [
        ("option.quantize=static_int8", "refused", "quantises nothing at load"),
        ("option.pipeline_parallel_degree=2", "refused", "no pipelines"),
        ("option.load_split_model=true", "refused", "as Transformers saves it"),
        ("option.neuron_optimize_level=3", "no effect", "compiler's options itself"),
        ("option.compiled_graph_path=s3://b/k", "no effect", "NEURON_COMPILED_ARTIFACTS"),
        ("option.group_query_attention=shard-over-heads", "no effect", "shards"),
        ("batch_size=2\noption.rolling_batch=disable", "mapped", "max_num_seqs=2"),
    ],
)
def test_what_vllm_neuron_does_with_a_key(model_dir, explained, line, outcome, text):
    entry = "option.entryPoint=djl_python.transformers_neuronx"
    report = explained(model_dir(f"{entry}\n{line}", config=LLAMA), host=NEURON)
    (row,) = (row for row in report.rows[0] if row.key == line.partition("=")[0])
    assert (row.outcome, report.models[0].backend) == (outcome, "neuron")
    assert text in row.text


@pytest.mark.parametrize(
    ("line", "method", "outcome", "text"),
    [
        ("option.quantize=awq", None, "refused", "quantises nothing at load"),
        ("option.quantize=awq", "fp8", "refused", "quantises nothing at load"),
        ("option.quantize=smoothquant", "modelopt", "no effect", "read as it is quantised"),
        ("option.quantize=awq", "awq", "no effect", "read as it is quantised"),
        ("option.dtype=int8", None, "refused", "quantises nothing at load"),
        ("option.rotary_base=500000", None, "refused", "config.json"),
        ("option.kv_cache_dtype=fp8_e4m3", None, "mapped", "kv_cache_config.dtype=fp8"),
        ("option.kv_cache_dtype=int8", None, "refused", "write auto or fp8"),
        ("option.trtllm_python_backend=true", None, "refused", "encoder-decoder"),
        ("option.multi_block_mode=true", None, "no effect", "chooses its kernels itself"),
        ("option.speculative_length=3", None, "no effect", "option.speculative_config"),
        ("option.enable_lora=true", None, "refused", "LoRA"),
        ("option.enable_lora=false", None, "no effect", ""),
    ],
)
def test_what_tensorrt_llm_does_with_a_key(model_dir, explained, line, method, outcome, text):
    stored = {} if method is None else {"quantization_config": {"quant_method": method}}
    name = model_dir(f"option.rolling_batch=trtllm\n{line}", config={**LLAMA, **stored})
    report = explained(name, host=GPUS)
    (row,) = (row for row in report.rows[0] if row.key == line.partition("=")[0])
    assert row.outcome == outcome
    assert text in row.text
    assert bool(report.errors) == (outcome == "refused")
