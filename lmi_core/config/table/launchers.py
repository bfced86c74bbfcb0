"""What other servers' command lines call our options, and their flags that are no option elsewhere.

Source: ``vllm serve --help`` and ``llama-server --help``.
"""

from lmi_core.config.table.option import Action, Option, honoured, mapped, no_effect, refused
from lmi_core.config.table.value_type import (
    Bool,
    Choice,
    Float,
    Int,
    Json,
    ScaledInt,
    Text,
    ValueType,
)

SYNONYMS = {
    "--api": "api",
    "--admin-key": "admin_key",
    "--allow-custom-code": "allow_custom_code",
    "--host": "option.hostname",
    "--threads": "option.num_threads",
    "--served-model-name": "option.modelName",
    "--max-queue-size": "job_queue_size",
    "--max-request-size": "max_request_size",
    "--drain-timeout": "option.graceful_termination_timeout",
    "--log-format": "log_format",
    "--request-timeout": "request_timeout",
    "--ui": "ui",
    "--strict-requests": "strict_requests",
    "--verbose": "verbose",
    "-v": "verbose",
    "--metric-aliases": "metric_aliases",
    "--no-prefix-caching": "option.enable_prefix_caching",
    "--model": "option.model_id",
    # vLLM
    "--download-dir": "download_dir",
    "--lora-modules": "option.lora_adapters",
    "--ssl-certfile": "certificate_file",
    "--ssl-keyfile": "private_key_file",
    "--uvicorn-log-level": "log_level",
    "--disable-log-requests": "option.disable_log_requests",
    "--enable-log-requests": "option.enable_log_requests",
    "--disable-log-stats": "option.disable_log_stats",
    "--otlp-traces-endpoint": "option.otlp_endpoint",
    "-tp": "option.tensor_parallel_degree",
    "-dp": "option.data_parallel_size",
    "-pp": "option.pipeline_parallel_degree",
    "-q": "option.quantize",
    "-O": "option.compilation_config",
    "--optimization-level": "option.compilation_config",
    "-cc": "option.compilation_config",
    # llama-server
    "-c": "option.ctx_size",
    "-np": "option.max_rolling_batch_size",
    "--parallel": "option.max_rolling_batch_size",
    "-ngl": "option.n_gpu_layers",
    "--gpu-layers": "option.n_gpu_layers",
    "-t": "option.num_threads",
    "-b": "option.max_rolling_batch_prefill_tokens",
    "-ub": "option.ubatch_size",
    "-a": "option.modelName",
    "--alias": "option.modelName",
    "-fa": "option.flash_attn",
    "-ctk": "option.cache_type_k",
    "-ctv": "option.cache_type_v",
    "-cb": "option.cont_batching",
    "-hf": "option.model_id",
    "-hfr": "option.model_id",
    "--hf-repo": "option.model_id",
    "-n": "option.n_predict",
    "--predict": "option.n_predict",
}
"""Flags whose names differ from their option's: our own, vLLM's, llama-server's."""

_LLAMA_CACHE = {"f32": "fp32", "f16": "bf16", "bf16": "bf16", "q8_0": "int8"}


def _of(system: str, name: str, kind: ValueType, doc: str, native: Action, vllm: str) -> Option:
    actions = {"lmi": native, **({"vllm": mapped(vllm)} if vllm else {})}
    return Option(key=f"option.{name}", type=kind, doc=doc, systems=(system,), actions=actions)


def _vllm(
    name: str, kind: ValueType, doc: str, native: Action, *, passed_on: bool = True
) -> Option:
    return _of("vllm", name, kind, doc, native, name if passed_on else "")


def _llama(name: str, kind: ValueType, doc: str, native: Action) -> Option:
    return _of("llama_cpp", name, kind, doc, native, "")


def _server(name: str, kind: ValueType, doc: str, action: Action) -> Option:
    return Option(
        key=f"option.{name}",
        type=kind,
        doc=doc,
        systems=("vllm",),
        scope="server",
        actions={"server": action},
    )


def _quiet(name: str, kind: ValueType, doc: str) -> Option:
    why = "a request is one line without its text; --log-level sets which"
    return _server(name, kind, doc, no_effect(why))


_TEXT_ONLY = no_effect("the lmi engine takes text only")


_CACHE_TYPE = mapped(
    "kv_dtype",
    "K and V have one data type",
    convert=_LLAMA_CACHE,
    by_value=dict.fromkeys(
        ("q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"),
        refused("there is no such KV cache: write f16, bf16, f32 or q8_0"),
    ),
)
_CACHE_TYPES = Choice((*_LLAMA_CACHE, "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"))

OPTIONS = (
    _vllm(
        "tokenizer",
        Text("path or hub id"),
        "Tokenizer from elsewhere than the model.",
        refused("put its tokenizer.json into the model's directory"),
    ),
    _vllm(
        "tokenizer_mode",
        Text("auto, slow or another library's"),
        "Which library reads the tokenizer.",
        no_effect("tokenizer.json is read by the tokenizers library"),
    ),
    _vllm(
        "scheduling_policy",
        Choice(("fcfs", "priority")),
        "Whether requests run in the order of arrival, or by their priority.",
        honoured(
            "scheduling_policy",
            test="tests/config/test_honoured_limits.py::test_whether_requests_have_priorities",
        ),
    ),
    _vllm(
        "kv_cache_memory_bytes",
        ScaledInt(),
        "Bytes of the KV cache; 2g is 2000000000, 2G a power of 1024.",
        honoured(
            "kv_cache_bytes", test="tests/config/test_honoured_limits.py::test_bytes_of_the_cache"
        ),
    ),
    _vllm(
        "swap_space",
        Float(0),
        "GiB of host memory for blocks of preempted sequences.",
        no_effect("preempted sequences are computed again"),
        passed_on=False,
    ),
    _vllm(
        "data_parallel_size",
        Int(1),
        "Copies of the model.",
        mapped(None, "copies on GPUs of their own"),
    ),
    _vllm(
        "enable_expert_parallel",
        Bool(),
        "Experts spread over devices.",
        no_effect("ranks have a part of each expert"),
    ),
    _vllm(
        "distributed_executor_backend",
        Text("mp, ray or another"),
        "What starts the processes of a copy.",
        no_effect("the lmi engine starts its processes itself"),
    ),
    _vllm(
        "disable_sliding_window",
        Bool(),
        "Full attention in layers that have a window.",
        refused("windows stay: shorten max_model_len to the window", idle=(False,)),
    ),
    _vllm(
        "hf_overrides",
        Json(of_object=True),
        "Keys of config.json to be replaced.",
        honoured(
            None,
            "rotary settings (rope_parameters, rope_scaling, rope_theta); others are refused",
            test="tests/config/test_honoured.py::test_rotary_settings",
        ),
    ),
    _vllm(
        "compilation_config",
        Text("level or JSON"),
        "What is compiled and captured.",
        no_effect("nothing is compiled at start"),
    ),
    _vllm(
        "max_seq_len_to_capture",
        Int(0),
        "Longest sequence of captured CUDA graphs.",
        no_effect("graphs depend on no length"),
        passed_on=False,
    ),
    _vllm(
        "guided_decoding_backend",
        Text("library"),
        "Library of structured output.",
        no_effect("llguidance compiles grammars"),
        passed_on=False,
    ),
    _vllm(
        "async_scheduling",
        Bool(),
        "Plan a step while the one before runs.",
        no_effect("option.overlap, which is on by default, does"),
    ),
    _vllm(
        "attention_backend",
        Text("name"),
        "Attention kernels.",
        no_effect("the lmi engine has kernels of its own; lmi doctor names them"),
    ),
    _vllm(
        "disable_custom_all_reduce",
        Bool(),
        "Sums over devices by NCCL alone.",
        no_effect("each device has one way for it"),
    ),
    _vllm("language_model_only", Bool(), "Take no images and audio.", _TEXT_ONLY),
    _vllm("mm_processor_kwargs", Json(of_object=True), "Settings of image processors.", _TEXT_ONLY),
    _vllm("mm_processor_cache_gb", Float(0), "GiB of processed images.", _TEXT_ONLY),
    _server(
        "enable_prompt_tokens_details",
        Bool(),
        "Say in usage how many of the prompt's tokens were cached.",
        no_effect("usage always does"),
    ),
    _quiet("disable_uvicorn_access_log", Bool(), "Log no requests of HTTP."),
    _quiet("max_log_len", Int(0), "Most characters of a prompt in the log."),
    _quiet("disable_log_requests", Bool(), "Log no requests."),
    _quiet("enable_log_requests", Bool(), "Log requests."),
    _quiet("disable_log_stats", Bool(), "Log no statistics."),
    _llama(
        "ctx_size",
        Int(0),
        "Tokens of the context; 0: the model's own.",
        mapped(
            "max_model_len",
            "of each sequence; llama-server divides it among its slots",
            by_value={0: no_effect("the model's own length is the default")},
        ),
    ),
    _llama(
        "n_predict",
        Int(-2),
        "Tokens of an answer where its request doesn't say; -1: as many as fit.",
        refused("send max_tokens, or max_new_tokens, with each request", idle=(-1,)),
    ),
    _llama(
        "temp",
        Float(0),
        "Temperature where a request doesn't say.",
        refused("send temperature with each request"),
    ),
    _llama(
        "n_gpu_layers",
        Int(-1, words=("auto", "all")),
        "Layers on the GPU.",
        no_effect("all layers are on one device, a visible GPU unless --device cpu is written"),
    ),
    _llama(
        "ubatch_size",
        Int(1),
        "Rows that are computed at once.",
        no_effect("the kernels choose it; --max-num-batched-tokens bounds a step"),
    ),
    _llama(
        "flash_attn",
        Choice(("on", "off", "auto", "1", "0")),
        "Attention that keeps no matrix of scores.",
        no_effect("attention never keeps a matrix of scores"),
    ),
    _llama("cache_type_k", _CACHE_TYPES, "Data type of K in the cache.", _CACHE_TYPE),
    _llama("cache_type_v", _CACHE_TYPES, "Data type of V in the cache.", _CACHE_TYPE),
    _llama(
        "cont_batching",
        Bool(),
        "Batch requests as they come.",
        no_effect("the lmi engine always batches continuously"),
    ),
    _llama(
        "mmap",
        Bool(),
        "Map the weights' file.",
        no_effect("packed weights that are kept on disk are mapped"),
    ),
    _llama("mlock", Bool(), "Lock the weights in memory.", no_effect("the system may page them")),
    _llama(
        "jinja",
        Bool(),
        "Render chats by the model's own template.",
        no_effect("the model's own template renders chats"),
    ),
    _llama("metrics", Bool(), "Serve /metrics.", no_effect("/metrics is always served")),
    _llama("slots", Bool(), "Serve /slots.", no_effect("/metrics has the running sequences")),
    _llama("webui", Bool(), "Serve a page.", no_effect("--ui serves our own")),
)
