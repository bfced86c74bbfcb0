"""LMI-Dist keys; most are shared with vLLM."""

from lmi_core.config.table.common import LONG_DTYPES
from lmi_core.config.table.option import Flag, Option, honoured, mapped, needs, no_effect
from lmi_core.config.table.value_type import Bool, Choice, Float, Int, ScaledInt, Text

_BOTH = ("lmi_dist", "vllm")
_SYSTEMS = ("lmi_dist",)
_DRAFT = "speculation.draft_model"
_TRT_DRAFT = no_effect("TensorRT-LLM's is option.speculative_config, with a decoding_type")
_AUTO_LENGTH = mapped(None, "the model's own length, as far as the KV cache holds it")

OPTIONS = (
    Option(
        key="option.max_rolling_batch_prefill_tokens",
        type=ScaledInt(),
        doc="Tokens that one step may process.",
        systems=(*_BOTH, "tgi"),
        spellings=("option.max_num_batched_tokens",),
        env=("MAX_BATCH_PREFILL_TOKENS",),
        flag=Flag("--max-batch-prefill-tokens", "MAX_BATCH_PREFILL_TOKENS"),
        actions={
            "lmi": honoured(
                "max_num_batched_tokens",
                test="tests/config/test_honoured_limits.py::test_tokens_of_a_step",
            ),
            "vllm": mapped("max_num_batched_tokens"),
            "trtllm": mapped("max_num_tokens"),
        },
    ),
    Option(
        key="option.paged_attention",
        type=Bool(),
        doc="Keep the KV cache in blocks.",
        systems=_SYSTEMS,
        default=True,
        deprecated="since 0.26: attention is always paged",
        actions={"lmi": no_effect("attention is always paged")},
    ),
    Option(
        key="option.max_model_len",
        type=ScaledInt(has_auto=True),
        doc="Most tokens of one sequence, prompt and answer together; auto, the default: what "
        "the model has positions and the KV cache has room for.",
        systems=(*_BOTH, "lmi"),
        actions={
            "lmi": honoured(
                "max_model_len",
                test="tests/config/test_honoured_limits.py::test_length_of_a_sequence",
                by_value={"auto": _AUTO_LENGTH},
            ),
            "vllm": mapped("max_model_len", convert={"auto": -1}),
            "trtllm": mapped("max_seq_len", by_value={"auto": _AUTO_LENGTH}),
        },
    ),
    Option(
        key="option.load_format",
        type=Text("auto, safetensors, pt, ..."),
        doc="Format of the weight files.",
        systems=_BOTH,
        default="auto",
        actions={
            "lmi": no_effect(
                "safetensors are read, and pytorch_model.bin where there are none",
                by_value={
                    "dummy": needs("weights.dummy", idle=()),
                },
            ),
            "vllm": mapped("load_format"),
        },
    ),
    Option(
        key="option.enforce_eager",
        type=Bool(),
        doc="Run kernel by kernel instead of replaying a recorded graph.",
        systems=_BOTH,
        default=False,
        env=("ENABLE_CUDA_GRAPHS",),
        actions={
            "lmi": mapped("enforce_eager", "with option.device=cuda"),
            "vllm": mapped("enforce_eager"),
        },
    ),
    Option(
        key="option.gpu_memory_utilization",
        type=Float(0, 1, above=True),
        doc="Share of device memory for weights and KV cache.",
        systems=(*_BOTH, "tgi"),
        default=0.9,
        env=("CUDA_MEMORY_FRACTION",),
        flag=Flag("--cuda-memory-fraction", "CUDA_MEMORY_FRACTION"),
        actions={
            "lmi": mapped("gpu_memory_utilization", "with option.device=cuda"),
            "vllm": mapped("gpu_memory_utilization"),
            "trtllm": mapped("kv_cache_config.free_gpu_memory_fraction"),
        },
    ),
    Option(
        key="option.speculative_draft_model",
        type=Text("hub id, s3:// prefix or path"),
        doc="Draft model of speculative decoding.",
        spellings=("option.speculative_model",),
        systems=_SYSTEMS,
        actions={
            "lmi": honoured(
                "speculation.draft_model",
                "and by n-gram; tokens are the same",
                test="tests/config/test_speculation.py::test_a_draft_model_drafts",
                capability=_DRAFT,
                tuning=True,
            ),
            "vllm": mapped("speculative_config.model"),
            "trtllm": _TRT_DRAFT,
        },
    ),
    Option(
        key="option.speculative_length",
        type=Int(1),
        doc="Tokens drafted per step.",
        spellings=("option.num_speculative_tokens",),
        systems=_SYSTEMS,
        default=5,
        actions={
            "lmi": honoured(
                "speculation.max_draft_tokens",
                "and fewer where so many don't pay",
                test="tests/config/test_speculation.py::test_how_many_tokens_a_model_drafts",
                capability=_DRAFT,
                tuning=True,
            ),
            "vllm": mapped("speculative_config.num_speculative_tokens"),
            "trtllm": _TRT_DRAFT,
        },
    ),
    Option(
        key="option.draft_model_tp_size",
        type=Int(1),
        doc="Tensor parallel degree of the draft model.",
        systems=_SYSTEMS,
        default=1,
        actions={
            "lmi": no_effect("both models' steps run on the same threads"),
            "vllm": mapped("speculative_config.draft_tensor_parallel_size"),
            "trtllm": _TRT_DRAFT,
        },
    ),
    Option(
        key="option.record_acceptance_rate",
        type=Bool(),
        doc="Report the share of drafted tokens that were accepted.",
        systems=_SYSTEMS,
        default=False,
        actions={
            "lmi": mapped(
                None, "/metrics always has lmi_draft_tokens and lmi_accepted_draft_tokens"
            )
        },
    ),
    Option(
        key="option.lora_dtype",
        type=Choice(("auto", "fp16", "bf16", "fp32", "float16", "bfloat16", "float32")),
        doc="Data type of LoRA weights.",
        systems=_BOTH,
        actions={
            "lmi": mapped(
                None, "adapters have the type of the activations (option.dtype)", capability="lora"
            ),
            "vllm": mapped("lora_dtype", capability="lora", idle=("auto",), convert=LONG_DTYPES),
        },
    ),
)
