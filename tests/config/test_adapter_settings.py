"""What a configuration becomes in other libraries' words: the arguments of their engines.

TensorRT-LLM's are those of its LLM API; neither it nor Neuron has run here.
"""

import pytest

from lmi_core.config.host import Host

LLAMA = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096}
GPUS = Host(num_gpus=4, packages=frozenset({"vllm", "tensorrt_llm"}))
NEURON = Host(num_neuron_cores=4, packages=frozenset({"optimum"}))


@pytest.mark.parametrize(
    ("properties", "host", "backend", "expected"),
    [
        (
            "option.rolling_batch=vllm\noption.max_rolling_batch_prefill_tokens=512\n"
            "option.gpu_memory_utilization=0.8\noption.tensor_parallel_degree=max\n"
            "option.enable_prefix_caching=true\noption.quantize=awq\noption.own_list=[1, 2]\n"
            "option.kv_cache_dtype=fp8_e4m3fn\n"
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
                "own_list": [1, 2],
                "own_text": "word",
                "own_depth": "[" * 5000,
            },
        ),
        (
            "engine=MPI\noption.rolling_batch=trtllm\noption.tensor_parallel_degree=2\n"
            "option.max_num_tokens=2048\noption.max_rolling_batch_size=8\n"
            "option.kv_cache_free_gpu_mem_fraction=0.7\noption.enable_kv_cache_reuse=true\n"
            "option.batch_scheduler_policy=max_utilization\noption.dtype=bf16",
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
                "dtype": "bfloat16",
            },
        ),
        (
            "option.rolling_batch=tnx\noption.tensor_parallel_degree=4\noption.n_positions=1024\n"
            "option.max_rolling_batch_size=4\noption.dtype=bf16",
            NEURON,
            "neuron",
            {"tp_degree": 4, "n_positions": 1024, "batch_size": 4},
        ),
    ],
)
def test_arguments(model_dir, explained, properties, host, backend, expected):
    (model,) = explained(model_dir(properties, config=LLAMA), host=host).models
    assert model.backend == backend
    found = dict(model.adapter_settings)
    assert {name: found.get(name) for name in expected} == expected


def test_one_device_needs_no_degree(model_dir, explained):
    name = model_dir("option.rolling_batch=vllm\noption.tensor_parallel_degree=1", config=LLAMA)
    (model,) = explained(name, host=Host(packages=GPUS.packages)).models
    assert "tensor_parallel_size" not in model.adapter_settings
