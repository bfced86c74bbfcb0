"""Flags and variables of the text-generation-inference launcher that have no LMI key."""

from lmi_core.config.table.option import (
    Action,
    Flag,
    Option,
    honoured,
    mapped,
    no_effect,
    refused,
)
from lmi_core.config.table.value_type import (
    Bool,
    Choice,
    Float,
    Int,
    Items,
    Json,
    Text,
    ValueType,
)
from lmi_core.config.table.vllm import CHAT_TEMPLATE

_ROPE = "tests/config/test_honoured.py::test_rotary_settings"
_VLLM_ROPE = refused('vLLM has it as option.hf_overrides={"rope_parameters": {...}}')
_MIXED = no_effect(
    "prompts are chunked and mixed with decoding, so none waits for decoding to pause; TGI ignores "
    "it then, too"
)
_OWN_KERNELS = no_effect("the engine has kernels of its own; lmi doctor names them")
_WATERMARK = honoured(
    None,
    "of requests with watermark: true on TGI's and LMI's routes",
    capability="request.watermark",
    tuning=True,
    test="tests/server/dialects/tgi/test_tgi_http.py::test_watermarks",
)
_LIMITS = "tests/cli/test_options.py::test_limits_of_a_launcher"


def tgi_flag(
    flag: str,
    kind: ValueType,
    doc: str,
    action: Action,
    default: object = None,
    *,
    aliases: tuple[str, ...] = (),
    switch: bool = False,
    secret: bool = False,
    server: bool = False,
    legacy_env: str | None = None,
    vllm: Action | None = None,
    env: tuple[str, ...] = (),
) -> Option:
    name = flag.removeprefix("--").replace("-", "_")
    return Option(
        key=f"option.{name}",
        type=kind,
        doc=doc,
        systems=("tgi",),
        default=default,
        env=env,
        flag=Flag(flag, name.upper(), legacy_env, aliases, switch),
        scope="server" if server else "model",
        actions={"server" if server else "lmi": action, **({"vllm": vllm} if vllm else {})},
        secret=secret,
    )


def tgi_variable(
    name: str, kind: ValueType, doc: str, action: Action, *, server: bool = False
) -> Option:
    """What the launcher and its worker read of the environment alone; here it is a flag, too."""
    return tgi_flag(f"--{name.lower().replace('_', '-')}", kind, doc, action, server=server)


OPTIONS = (
    tgi_flag(
        "--sharded",
        Choice(("true", "false"), exact=True),
        "Shard the model over all visible devices.",
        mapped(None, "true: all visible GPUs share a copy, unless --num-shard says how many"),
    ),
    tgi_flag(
        "--speculate",
        Int(0),
        "Tokens drafted per step by n-gram or the model's extra heads.",
        honoured(
            "speculation.max_draft_tokens",
            "by n-gram, and fewer where so many don't pay; tokens are the same",
            test="tests/config/test_speculation.py::test_how_many_tokens_are_drafted",
            capability="speculation.ngram",
            tuning=True,
            idle=(0,),
            by_value={0: mapped(None, "nothing is drafted")},
        ),
    ),
    tgi_flag(
        "--max-input-tokens",
        Int(1),
        "Most tokens of a prompt.",
        honoured("max_input_tokens", "limit of prompts on TGI's routes", test=_LIMITS),
        aliases=("--max-input-length",),
        legacy_env="MAX_INPUT_LENGTH",
    ),
    tgi_flag(
        "--max-total-tokens",
        Int(1),
        "Most tokens of one sequence, prompt and answer together.",
        honoured(
            "max_model_len",
            test="tests/config/test_honoured_limits.py::test_length_of_a_sequence",
        ),
    ),
    tgi_flag(
        "--waiting-served-ratio",
        Float(0),
        "Waiting to running ratio at which prefill interrupts decoding.",
        _MIXED,
        0.3,
    ),
    tgi_flag(
        "--max-batch-total-tokens",
        Int(1),
        "Token budget of the running batch.",
        honoured(
            "max_batch_total_tokens",
            "the size of the KV cache, where memory has room for it",
            test="tests/config/test_honoured_limits.py::test_tokens_of_the_batch",
        ),
    ),
    tgi_flag(
        "--max-waiting-tokens",
        Int(0),
        "Decode steps until waiting requests are let in.",
        _MIXED,
        20,
    ),
    tgi_flag(
        "--disable-custom-kernels",
        Bool(),
        "Avoid custom CUDA kernels.",
        no_effect("there are no such kernels; option.enforce_eager runs the plain path"),
        False,
        switch=True,
    ),
    tgi_flag(
        "--rope-scaling",
        Json(of_object=True, words=("linear", "dynamic")),
        "Rotary scaling: a word, whose factor is --rope-factor, or an object as in config.json and "
        'in vLLM: {"rope_type": "yarn", "factor": 2}.',
        honoured("rope_scaling", test=_ROPE),
        vllm=_VLLM_ROPE,
    ),
    tgi_flag(
        "--rope-factor",
        Float(1),
        "Factor of rotary scaling.",
        honoured("rope_factor", test=_ROPE),
        vllm=_VLLM_ROPE,
    ),
    tgi_flag(
        "--tokenizer-config-path",
        Text("path"),
        "File that supplies the chat template and special tokens.",
        honoured(None, "its chat template and special tokens are used", test=CHAT_TEMPLATE),
    ),
    tgi_flag(
        "--lora-adapters",
        Items(Text("id, id=path, id@revision or id=path@revision")),
        "LoRA adapters to load.",
        honoured(
            None,
            "registered at load",
            test="tests/config/test_lora_settings.py::test_adapters_that_a_launcher_names_answer",
            capability="lora",
        ),
        vllm=mapped(None, "registered at load", capability="lora"),
    ),
    tgi_flag(
        "--cuda-graphs",
        Items(Int(0)),
        "Batch sizes captured as CUDA graphs; 0 for none.",
        no_effect("the lmi engine replays its own recorded graph"),
    ),
    tgi_flag(
        "--watermark-gamma",
        Float(0, 1),
        "Share of the vocabulary favoured by the watermark.",
        _WATERMARK,
        0.5,
    ),
    tgi_flag(
        "--watermark-delta",
        Float(),
        "Bias of the watermark.",
        _WATERMARK,
        2.0,
    ),
    tgi_variable("ATTENTION", Text("kernel"), "Attention kernels.", _OWN_KERNELS),
    tgi_variable("USE_FLASH_ATTENTION", Text("true or false"), "Flash attention.", _OWN_KERNELS),
    tgi_variable("EXLLAMA_VERSION", Int(1), "ExLlama kernels for GPTQ.", _OWN_KERNELS),
    tgi_variable("DISABLE_EXLLAMA", Text("True"), "No ExLlama kernels.", _OWN_KERNELS),
    tgi_variable("USE_CUTLASS_W8A8", Text("1"), "CUTLASS kernels for 8 bits.", _OWN_KERNELS),
    tgi_variable(
        "PREFILL_CHUNKING",
        Bool(),
        "Split long prompts over steps.",
        no_effect("prompts are always chunked; tokens are the same"),
    ),
    tgi_variable(
        "TGI_WIGGLE_ROOM",
        Float(0),
        "Share of the device memory that is used.",
        no_effect("option.gpu_memory_utilization is that share"),
    ),
)
