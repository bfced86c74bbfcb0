"""vLLM keys, with those that came after 0.27."""

from lmi_core.config.table.option import (
    Action,
    Flag,
    Option,
    honoured,
    mapped,
    needs,
    no_effect,
    refused,
)
from lmi_core.config.table.value_type import Bool, Choice, Float, Int, Json, Text, ValueType

_SYSTEMS = ("vllm",)
CHAT_TEMPLATE = "tests/cli/test_options.py::test_defaults_of_requests_and_the_chat_template"
TOOL_FORM = "tests/server/dialects/openai/test_answer_forms.py::test_configured_parsers"
REASONING_FORM = TOOL_FORM
TOOL_FORMS = [
    "cohere_command3",
    "command_r",
    "deepseek_v3",
    "deepseek_v31",
    "functiongemma",
    "gemma",
    "glm45",
    "gpt_oss",
    "granite",
    "granite-20b-fc",
    "hermes",
    "internlm",
    "jamba",
    "kimi_k2",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "mistral",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
]
"""As in ``lmi_core/tools/forms.py``, which explaining doesn't load."""
REASONING_FORMS = [
    "cohere",
    "deepseek_r1",
    "deepseek_v3",
    "glm45",
    "granite",
    "holo2",
    "internlm",
    "kimi_k2",
    "minimax_m2",
    "mistral",
    "openai_gptoss",
    "qwen3",
    "seed_oss",
]
"""As in ``lmi_core/tools/reasoning.py``."""


def _vllm(
    name: str,
    kind: ValueType,
    doc: str,
    native: Action,
    default: object = None,
    *,
    vllm: Action | None = None,
    trtllm: str | None = None,
    flag: Flag | None = None,
) -> Option:
    actions = {"lmi": native, "vllm": vllm or mapped(name)}
    if trtllm is not None:
        actions["trtllm"] = mapped(trtllm)
    return Option(
        key=f"option.{name}",
        type=kind,
        doc=doc,
        systems=_SYSTEMS,
        default=default,
        actions=actions,
        flag=flag,
    )


_SESSIONS = honoured(
    None,
    "a session's conversation stays cached until its next request",
    test="tests/server/dialects/lmi/test_sessions.py::test_the_options_of_a_configuration",
)

OPTIONS = (
    _vllm(
        "enable_prefix_caching",
        Bool(),
        "Reuse the KV cache of equal prefixes.",
        honoured(
            "enable_prefix_caching",
            test="tests/config/test_honoured.py::test_reuse_of_prefixes_in_blocks",
            capability="cache.prefix",
            idle=(False,),
        ),
        trtllm="kv_cache_config.enable_block_reuse",
        flag=Flag("--prefix-caching", "PREFIX_CACHING"),
    ),
    _vllm(
        "enable_chunked_prefill",
        Bool(),
        "Split long prompts over steps and mix them with decoding.",
        honoured(
            None,
            "prompts are always chunked",
            test="tests/config/test_honoured_limits.py::test_tokens_of_a_step",
            capability="batch.chunked_prefill",
            by_value={False: no_effect("prompts are always chunked; tokens are the same")},
        ),
        trtllm="enable_chunked_prefill",
    ),
    _vllm(
        "kv_transfer_config",
        Json(),
        "Transfer of KV caches between processes.",
        no_effect("one process computes whole requests; nothing is transferred"),
    ),
    _vllm(
        "lmcache_config_file",
        Text("path"),
        "Configuration of LMCache.",
        no_effect("prefixes are cached by the lmi engine itself"),
        vllm=no_effect("set LMCACHE_CONFIG_FILE, which LMCache reads in the server's process"),
    ),
    _vllm(
        "max_logprobs",
        Int(0),
        "Most log probabilities a request may ask for per token.",
        honoured("max_logprobs", test="tests/config/test_honoured.py::test_most_log_probabilities"),
        20,
    ),
    Option(
        key="option.generation_config",
        type=Text("auto, vllm or a directory"),
        doc="What requests on OpenAI's routes that leave sampling open get: what the model's "
        "generation_config.json says (auto), or that of a directory; vllm, which is the default "
        "unless a configuration is written for vLLM: the protocol's own.",
        systems=_SYSTEMS,
        default="vllm",
        defaults={"vllm": "auto"},
        actions={
            "lmi": honoured(
                None,
                "defaults of temperature, top_p, top_k, min_p, repetition_penalty, max_tokens",
                test="tests/server/models/test_sampling_defaults.py::test_requests_that_leave_sampling_open",
            ),
            "vllm": mapped("generation_config"),
        },
    ),
    Option(
        key="option.override_generation_config",
        type=Json(of_object=True),
        doc="The same as an object of generation_config.json's keys, which come before the file's.",
        systems=_SYSTEMS,
        actions={
            "lmi": honoured(
                None,
                "defaults of requests on OpenAI's routes, before those of the file",
                test="tests/server/models/test_sampling_defaults.py::test_an_object_comes_before_the_file",
            ),
        },
    ),
    Option(
        key="option.cpu_offload_gb_per_gpu",
        type=Float(0),
        doc="GiB of weights kept in host memory per device.",
        systems=(*_SYSTEMS, "lmi_dist"),
        default=0.0,
        spellings=("option.cpu_offload_gb",),
        actions={
            "lmi": no_effect("the CPU engine holds all weights in host memory"),
            "vllm": mapped("cpu_offload_gb"),
        },
    ),
    _vllm(
        "speculative_config",
        Json(),
        "Speculative decoding as the library's JSON.",
        mapped(
            "speculation",
            "by a draft model, Medusa or EAGLE heads and n-gram; prompt_lookup_min finds places in "
            "texts, prompt_lookup_max ranks them",
            capability="speculation.ngram",
            tuning=True,
        ),
        trtllm="speculative_config",
    ),
    _vllm(
        "limit_mm_per_prompt",
        Json(),
        "Images, videos and audio clips allowed in a prompt.",
        no_effect("the lmi engine takes text only"),
    ),
    _vllm(
        "enable_auto_tool_choice",
        Bool(),
        "Let the model call tools.",
        honoured(
            None,
            "calls are looked for wherever a request has tools",
            test="tests/server/dialects/openai/test_chat_tools.py::test_a_whole_answer_with_calls",
            capability="chat.tools",
            by_value={
                False: honoured(
                    None,
                    "tools need a tool_choice other than auto",
                    test="tests/server/dialects/openai/test_answer_forms.py::test_auto_choice_off",
                )
            },
        ),
        False,
    ),
    _vllm(
        "tool_call_parser",
        Text("parser name"),
        "Parser of tool calls in the model's text.",
        refused(
            f"write one of {', '.join(TOOL_FORMS)}, or leave it out: the chat template shows which",
            by_value=dict.fromkeys(
                TOOL_FORMS,
                honoured(None, "how calls are read, and enforced ones written", test=TOOL_FORM),
            ),
        ),
    ),
    _vllm(
        "enable_reasoning",
        Bool(),
        "Split reasoning from the answer.",
        honoured(
            None,
            "reasoning is split off where reasoning_parser or the chat template shows its form",
            test=REASONING_FORM,
            by_value={False: honoured(None, "reasoning stays in the content", test=REASONING_FORM)},
        ),
        False,
    ),
    _vllm(
        "reasoning_parser",
        Text("parser name"),
        "Parser of reasoning in the model's text.",
        refused(
            f"write one of {', '.join(REASONING_FORMS)}, or leave it out: the chat template "
            "shows which",
            by_value=dict.fromkeys(
                REASONING_FORMS, honoured(None, "marks of the reasoning", test=REASONING_FORM)
            ),
        ),
    ),
    _vllm(
        "chat_template",
        Text("path or Jinja text"),
        "Chat template used instead of the model's own.",
        honoured(None, "used instead of the model's own", test=CHAT_TEMPLATE),
    ),
    _vllm(
        "chat_template_content_format",
        Choice(("auto", "string", "openai")),
        "Shape of message contents handed to the chat template.",
        needs("chat.content_format", idle=("auto", "string")),
        "auto",
    ),
    _vllm(
        "normalize",
        Bool(),
        "Normalise embeddings.",
        honoured("normalize", test="tests/config/test_honoured.py::test_embeddings"),
        True,
        vllm=no_effect("models that generate text have no embeddings"),
    ),
    Option(
        key="option.enable_stateful_sessions",
        type=Bool(),
        doc="Stateful sessions (X-Amzn-SageMaker-Session-Id), with a directory each.",
        systems=_SYSTEMS,
        default=False,
        actions={"lmi": _SESSIONS},
    ),
    Option(
        key="option.sessions_path",
        type=Text("path"),
        doc="Directory of session files.",
        systems=_SYSTEMS,
        default="/dev/shm/djl_sessions",
        actions={"lmi": _SESSIONS},
    ),
    Option(
        key="option.sessions_expiration",
        type=Int(1),
        doc="Seconds a session lives.",
        systems=_SYSTEMS,
        default=1200,
        actions={"lmi": _SESSIONS},
    ),
    Option(
        key="option.sessions_s3url",
        type=Text("s3:// prefix"),
        doc="Where sessions are kept across restarts.",
        systems=_SYSTEMS,
        actions={"lmi": needs("server.sessions_in_s3", idle=())},
    ),
    Option(
        key="option.lmcache_auto_config",
        type=Bool(),
        doc="Configure LMCache for the model.",
        systems=_SYSTEMS,
        default=False,
        actions={"lmi": no_effect("the lmi engine has its own prefix cache")},
    ),
    Option(
        key="option.is_peft_model",
        type=Bool(),
        doc="The model directory is a LoRA adapter; set by detection.",
        systems=_SYSTEMS,
        default=False,
        actions={"lmi": refused("merge the adapter into its base model first", idle=(False,))},
    ),
)
