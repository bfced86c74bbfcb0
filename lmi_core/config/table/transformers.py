"""What a Transformers model in our engine does with the keys of a model."""

from collections.abc import Mapping
from dataclasses import replace

from lmi_core.config.table.common import LONG_DTYPES, TEXT_TASKS
from lmi_core.config.table.option import (
    Action,
    Option,
    Outcome,
    honoured,
    mapped,
    needs,
    no_effect,
    refused,
)
from lmi_core.config.table.shared import shared

_MERGED = "models whose state is more than keys and values run one sequence per call"
_TESTS = "tests/runners/transformers/test_transformers_config.py"
_DEVICES = mapped(None, "how many GPUs a copy's layers are spread over")
_CONTINUOUS = no_effect("requests are batched continuously, without waiting for a batch to fill")
_NO_SHARING = no_effect("sequences share no keys and values")
_CHECKPOINT = no_effect("the checkpoint's own quantisation is used")
_BITSANDBYTES = {
    "int8": "int8",
    "int4": "nf4",
    "bitsandbytes": "int8",
    "bitsandbytes8": "int8",
    "bitsandbytes4": "fp4",
    "bitsandbytes-nf4": "nf4",
    "bitsandbytes-fp4": "fp4",
}
_AT_LOAD = honoured(
    "bitsandbytes",
    "at load, by the library of that name",
    test=f"{_TESTS}::test_weights_quantised_by_bitsandbytes",
    convert=_BITSANDBYTES,
)
_ROTARY = refused("write the rotary settings into the model's config.json")
_LENGTH = honoured("max_model_len", test=f"{_TESTS}::test_lengths")
_TOKENS = honoured("max_num_batched_tokens", test=f"{_TESTS}::test_sizes_of_steps")
_ROWS = honoured("max_num_seqs", test=f"{_TESTS}::test_sizes_of_steps")

ACTIONS: Mapping[str, Action] = {
    "option.task": needs("task.other", idle=TEXT_TASKS),
    "option.model_id": honoured("model", test=f"{_TESTS}::test_the_model_may_be_elsewhere"),
    "option.dtype": honoured(
        "torch_dtype",
        convert=LONG_DTYPES,
        test=f"{_TESTS}::test_data_types",
        by_value={"int8": refused("write fp32, fp16 or bf16")},
    ),
    "option.trust_remote_code": honoured(
        "trust_remote_code", test=f"{_TESTS}::test_code_that_comes_with_the_model"
    ),
    "option.revision": mapped("revision", "of the files that are fetched"),
    "option.tensor_parallel_degree": _DEVICES,
    "option.pipeline_parallel_degree": _DEVICES,
    "option.rolling_batch": mapped(
        None,
        "padded batches, by the max-sparsity rule",
        by_value={"disable": no_effect("requests are always batched; answers are the same")},
    ),
    "option.force_padded": honoured(
        None,
        "Transformers computes the model, whether the lmi engine knows it or not",
        test=f"{_TESTS}::test_padded_batches_of_a_model_that_the_engine_knows",
    ),
    "option.max_sparsity": honoured("max_sparsity", _MERGED, test=f"{_TESTS}::test_padding"),
    "option.max_splits": honoured("max_splits", _MERGED, test=f"{_TESTS}::test_padding"),
    "option.max_rolling_batch_size": _ROWS,
    "option.max_num_sequences": _ROWS,
    "option.max_rolling_batch_prefill_tokens": _TOKENS,
    "option.max_num_tokens": _TOKENS,
    "option.max_model_len": replace(
        _LENGTH, by_value={"auto": mapped(None, "the model's own length")}
    ),
    "option.max_tokens": _LENGTH,
    "option.n_positions": _LENGTH,
    "option.max_total_tokens": _LENGTH,
    "option.seed": honoured("seed", test=f"{_TESTS}::test_the_seed_decides_what_is_sampled"),
    "option.device": mapped(
        "device",
        convert={"torch-cpu": "cpu"},
        by_value={"auto": mapped(None, "the GPUs that are visible, else the CPU")},
    ),
    "option.device_id": mapped(None, "the GPU that a copy runs on"),
    "option.device_map": mapped("device_map"),
    "option.low_cpu_mem_usage": no_effect("weights are never held twice"),
    "option.disable_flash_attn": mapped(
        "attn_implementation",
        convert={False: "flash_attention_2"},
        by_value={True: no_effect("Transformers chooses among the others")},
    ),
    "option.quantize": refused(
        "give a checkpoint that is quantised, or leave it out",
        by_value={
            "awq": _CHECKPOINT,
            "gptq": _CHECKPOINT,
            **dict.fromkeys(_BITSANDBYTES, _AT_LOAD),
        },
    ),
    "option.load_format": no_effect(
        "safetensors are read, and pytorch_model.bin where there are none"
    ),
    "option.enforce_eager": mapped(None, "models always run eagerly"),
    "option.enable_prefix_caching": _NO_SHARING,
    "option.enable_kv_cache_reuse": _NO_SHARING,
    "option.kv_cache_dtype": refused(
        "keys and values have the model's data type; leave it out", idle=("auto",)
    ),
    "option.deterministic": refused(
        "padding and company change roundings; only the CPU engine's tokens don't depend on them",
        idle=(False,),
    ),
    "option.hf_overrides": refused("write it into the model's config.json"),
    "option.rope_scaling": _ROTARY,
    "option.rope_factor": _ROTARY,
    "option.rotary_base": _ROTARY,
    "option.rotary_scaling_type": _ROTARY,
    "option.rotary_scaling_factor": _ROTARY,
    "option.instruction_set": no_effect("torch chooses its kernels"),
    "batch_size": _CONTINUOUS,
    "max_batch_delay": _CONTINUOUS,
}
"""Where it differs from the lmi engine, or has tests of its own."""

_LOOP = frozenset(
    {
        "job_queue_size",
        "option.batch_scheduler_policy",
        "option.block_size",
        "option.enable_chunked_prefill",
        "option.enable_trt_overlap",
        "option.gpu_memory_utilization",
        "option.guaranteed_no_evict",
        "option.kv_cache_bytes",
        "option.load_in_4bit",
        "option.load_in_8bit",
        "option.max_input_len",
        "option.max_logprobs",
        "option.max_output_len",
        "option.max_queue_s",
        "option.num_threads",
        "option.overlap",
        "option.scheduling_policy",
        "option.tokens_per_block",
        "option.waiting_steps",
    }
)
"""Keys of our engine's loop, which drives these models as it does the native ones."""


def transformers_action(option: Option) -> Action | None:
    """The action for a model's key; None: there is no such setting."""
    if option.key in ACTIONS:
        return ACTIONS[option.key]
    native = option.actions["lmi"]
    waits = native.outcome is Outcome.REFUSED or native.capability is not None
    return shared(option) if option.key in _LOOP or waits else None
