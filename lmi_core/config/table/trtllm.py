"""TensorRT-LLM keys, with SmoothQuant and AWQ."""

from lmi_core.config.table.option import (
    Action,
    Option,
    honoured,
    mapped,
    no_effect,
    refused,
)
from lmi_core.config.table.value_type import Bool, Choice, Float, Int, Text, ValueType

_SYSTEMS = ("trtllm",)
_BUILD = no_effect("chooses how TensorRT-LLM builds its engine; nothing is built here")
_ROPE = "tests/config/test_honoured.py::test_rotary_settings"
_MODEL_CONFIG = no_effect("the lmi engine reads it from the model's config.json")
_READ = no_effect("TensorRT-LLM reads it from the model's config.json")
_ROTARY = refused("write it into the model's config.json, where TensorRT-LLM reads it")
_AT_LOAD = no_effect("TensorRT-LLM quantises nothing at load")
_OWN_CHOICE = no_effect("TensorRT-LLM chooses its kernels itself")


def _trt(
    name: str,
    kind: ValueType,
    doc: str,
    default: object = None,
    native: Action = _BUILD,
    trtllm: Action | str | None = None,
) -> Option:
    """``trtllm``: its action, or what it becomes there; its own name if absent."""
    return Option(
        key=f"option.{name}",
        type=kind,
        doc=doc,
        systems=_SYSTEMS,
        default=default,
        actions={
            "lmi": native,
            "trtllm": trtllm if isinstance(trtllm, Action) else mapped(trtllm or name),
        },
    )


def _finer(what: str) -> Action:
    """Of SmoothQuant's scales, which are never one for a whole matrix."""
    return no_effect(
        f"a scale per {what} in any case, which loses less and costs nothing here",
        by_value={
            True: honoured(
                None,
                f"a scale per {what}",
                test="tests/config/test_smoothquant.py::test_every_spelling_smooths",
            )
        },
    )


OPTIONS = (
    _trt(
        "max_input_len",
        Int(1),
        "Most tokens of a prompt.",
        1024,
        honoured(
            None,
            "adds to option.max_output_len to give max_model_len",
            test="tests/config/test_honoured_limits.py::test_length_of_a_sequence",
        ),
        mapped(None, "adds to option.max_output_len to give max_seq_len"),
    ),
    _trt(
        "max_output_len",
        Int(1),
        "Most tokens of an answer.",
        512,
        honoured(
            None,
            "adds to option.max_input_len to give max_model_len",
            test="tests/config/test_honoured_limits.py::test_length_of_a_sequence",
        ),
        mapped(None, "adds to option.max_input_len to give max_seq_len"),
    ),
    _trt(
        "max_num_tokens",
        Int(1),
        "Tokens in a step.",
        None,
        honoured(
            "max_num_batched_tokens",
            test="tests/config/test_honoured_limits.py::test_tokens_of_a_step",
        ),
    ),
    _trt(
        "use_custom_all_reduce",
        Bool(),
        "All-reduce kernel for NVLink.",
        False,
        trtllm=mapped("allreduce_strategy", convert={True: "AUTO", False: "NCCL"}),
    ),
    _trt(
        "tokens_per_block",
        Int(1),
        "Tokens in a block of the KV cache.",
        64,
        honoured(
            "block_size", test="tests/config/test_honoured.py::test_reuse_of_prefixes_in_blocks"
        ),
        "kv_cache_config.tokens_per_block",
    ),
    _trt(
        "batch_scheduler_policy",
        Choice(("max_utilization", "guaranteed_no_evict")),
        "Whether running sequences may be preempted.",
        "max_utilization",
        honoured(
            "guaranteed_no_evict",
            test="tests/config/test_honoured_limits.py::test_preemption_or_none",
            convert={"max_utilization": False, "guaranteed_no_evict": True},
        ),
        mapped(
            "scheduler_config.capacity_scheduler_policy",
            convert={
                "max_utilization": "MAX_UTILIZATION",
                "guaranteed_no_evict": "GUARANTEED_NO_EVICT",
            },
        ),
    ),
    _trt(
        "kv_cache_free_gpu_mem_fraction",
        Float(0, 1),
        "Share of free device memory for the KV cache.",
        0.95,
        no_effect("option.kv_cache_bytes sizes the lmi engine's cache"),
        "kv_cache_config.free_gpu_memory_fraction",
    ),
    _trt(
        "max_num_sequences",
        Int(1),
        "Sequences in the running batch; option.max_rolling_batch_size if absent.",
        None,
        honoured(
            "max_num_seqs", test="tests/config/test_honoured_limits.py::test_sequences_of_the_batch"
        ),
        "max_batch_size",
    ),
    _trt(
        "enable_trt_overlap",
        Bool(),
        "Overlap the execution of batches.",
        False,
        honoured(
            "overlap",
            test="tests/config/test_honoured_limits.py::test_loops",
        ),
        mapped("disable_overlap_scheduler", convert={True: False, False: True}),
    ),
    _trt(
        "enable_kv_cache_reuse",
        Bool(),
        "Reuse the KV cache of equal prefixes.",
        False,
        honoured(
            "enable_prefix_caching",
            test="tests/config/test_honoured.py::test_reuse_of_prefixes_in_blocks",
            capability="cache.prefix",
            idle=(False,),
        ),
        "kv_cache_config.enable_block_reuse",
    ),
    _trt(
        "baichuan_model_version",
        Choice(("v1_7b", "v1_13b", "v2_7b", "v2_13b")),
        "Version of a Baichuan model.",
        "v1_13b",
        _MODEL_CONFIG,
        _READ,
    ),
    _trt(
        "chatglm_model_version",
        Text("version, such as chatglm3_6b"),
        "Version of a ChatGLM model, required for one.",
        None,
        _MODEL_CONFIG,
        _READ,
    ),
    _trt(
        "gpt_model_version",
        Choice(("gpt2", "santacoder", "starcoder")),
        "Version of a GPT-2 model.",
        "gpt2",
        _MODEL_CONFIG,
        _READ,
    ),
    _trt(
        "multi_block_mode",
        Bool(),
        "Split long KV sequences over blocks.",
        False,
        trtllm=_OWN_CHOICE,
    ),
    _trt("use_fused_mlp", Bool(), "Fuse the gated MLP.", False, trtllm=_OWN_CHOICE),
    Option(
        key="option.rotary_base",
        type=Float(0, above=True),
        doc="Base of the rotary embedding, instead of the model's own.",
        systems=("trtllm", "vllm"),
        defaults={"trtllm": 10000.0},
        spellings=("option.rope_theta",),
        actions={
            "lmi": honoured("rope_theta", test=_ROPE),
            "trtllm": _ROTARY,
            "vllm": refused('vLLM has it as option.hf_overrides={"rope_parameters": {...}}'),
        },
    ),
    _trt(
        "rotary_dim",
        Int(1),
        "Rotary dimensions of gptj.",
        64,
        no_effect("is for gptj; the lmi engine reads it from the model's config.json"),
        _READ,
    ),
    Option(
        key="option.rotary_scaling_type",
        type=Choice(("linear", "dynamic")),
        doc="Kind of rotary scaling.",
        systems=("trtllm",),
        actions={
            "lmi": honoured("rope_scaling", test=_ROPE),
            "trtllm": _ROTARY,
        },
    ),
    Option(
        key="option.rotary_scaling_factor",
        type=Float(1, above=True),
        doc="Factor of rotary scaling.",
        systems=("trtllm",),
        actions={
            "lmi": honoured("rope_factor", test=_ROPE),
            "trtllm": _ROTARY,
        },
    ),
    _trt(
        "smoothquant_per_token",
        Bool(),
        "A scale for each token's activations.",
        False,
        _finer("token"),
        _AT_LOAD,
    ),
    _trt(
        "smoothquant_per_channel",
        Bool(),
        "A scale for each output's weights.",
        False,
        _finer("output"),
        _AT_LOAD,
    ),
    _trt(
        "multi_query_mode",
        Bool(),
        "SmoothQuant of a multi-query model.",
        False,
        no_effect("the lmi engine reads the number of KV heads from the model's config.json"),
        _AT_LOAD,
    ),
    _trt(
        "awq_format", Choice(("int4_awq",)), "AWQ format of the build.", "int4_awq", trtllm=_AT_LOAD
    ),
    _trt("awq_block_size", Int(1), "Weights that share a scale.", 128, trtllm=_AT_LOAD),
    _trt("fp8_scheme", Text("scheme"), "How fp8 weights are scaled.", None, trtllm=_AT_LOAD),
    _trt(
        "max_draft_len",
        Int(0),
        "Tokens drafted per step.",
        None,
        mapped("speculation.max_draft_tokens", capability="speculation.draft_model", tuning=True),
        no_effect("TensorRT-LLM's is option.speculative_config, with a decoding_type"),
    ),
    _trt(
        "max_new_tokens",
        Int(1),
        "Tokens of an answer.",
        None,
        no_effect("requests say it, or get their protocol's default, as in LMI"),
        no_effect("requests say it, or get their protocol's default, as in LMI"),
    ),
    _trt("awq_calib_size", Int(1), "Calibration samples of AWQ.", 32, trtllm=_AT_LOAD),
    _trt(
        "trtllm_python_backend",
        Bool(),
        "Run through TensorRT-LLM's Python session; set by detection for T5.",
        False,
        refused("encoder-decoder models are not served by the lmi engine", idle=(False,)),
        refused("encoder-decoder models are not served here", idle=(False,)),
    ),
)
