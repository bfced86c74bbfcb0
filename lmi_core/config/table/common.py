"""Keys that every system reads (djl_python/properties_manager/properties.py)."""

from lmi_core.config.table.option import (
    Flag,
    Option,
    honoured,
    mapped,
    needs,
    no_effect,
    refused,
)
from lmi_core.config.table.value_type import Bool, Choice, Int, Text

_COMMON = ("common",)
_PIPELINES = "tests/server/dialects/lmi/test_pipelines.py"
_PIPELINE = f"{_PIPELINES}::test_answers_without_a_rolling_batch"
_CHOICE = mapped(None, "takes part in the choice of the backend")
_INT8 = needs("quant.int8", "leave it out to serve the model in bf16", setting="quantize")

DTYPES = {
    "auto": "auto",
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "fp16": "bf16",
    "float16": "bf16",
    "half": "bf16",
    "bf16": "bf16",
    "bfloat16": "bf16",
}
"""Written dtype to the one the CPU engine computes in; fp16 has no fast CPU path."""

_AUTO = honoured("dtype", test="tests/config/test_honoured.py::test_data_types")
_FP32 = honoured("dtype", convert=DTYPES, test="tests/config/test_honoured.py::test_data_types")
_BF16 = honoured(
    "dtype",
    convert=DTYPES,
    test="tests/config/test_honoured.py::test_data_types",
)

LONG_DTYPES = {
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}

TEXT_TASKS = ("text-generation", "generate", "auto", "conversational")
TASKS = {
    **dict.fromkeys(TEXT_TASKS, "generate"),
    "auto": "auto",
    **dict.fromkeys(("text_embedding", "text-embedding", "embedding", "embed"), "embed"),
    **dict.fromkeys(("feature-extraction", "sentence-similarity"), "embed"),
    **dict.fromkeys(("rerank", "reranking", "text-ranking", "score"), "rerank"),
}
"""What our engine calls the tasks that it has."""
_POOLED = honoured(
    "task",
    capability="task.pooling",
    convert=TASKS,
    test="tests/config/test_honoured.py::test_embeddings",
)

ROLLING_BATCHES = (
    "auto",
    "scheduler",
    "lmi-dist",
    "vllm",
    "trtllm",
    "deepspeed",
    "tnx",
    "neuron",
    "disable",
)

OPTIONS = (
    Option(
        key="engine",
        type=Choice(("Python", "MPI", "DeepSpeed", "FasterTransformer"), exact=True),
        doc="Runtime engine; MPI, DeepSpeed and FasterTransformer are aliases of Python.",
        systems=_COMMON,
        env=("OPTION_ENGINE",),
        actions={
            "lmi": _CHOICE,
            "vllm": _CHOICE,
            "trtllm": _CHOICE,
        },
    ),
    Option(
        key="option.model_dir",
        type=Text("path"),
        doc="Directory of the model; used when no model id is given.",
        systems=_COMMON,
        actions={"lmi": mapped("model", "used when option.model_id is absent")},
    ),
    Option(
        key="option.model_id",
        type=Text("hub id, s3:// prefix or path"),
        doc="Model to serve: Hugging Face Hub id, s3:// prefix, or local path.",
        systems=(*_COMMON, "tgi"),
        env=("HF_MODEL_ID",),
        flag=Flag("--model-id", "MODEL_ID"),
        actions={
            "lmi": honoured(
                "model",
                test="tests/cli/test_options.py::test_name_log_and_size",
            ),
            "vllm": mapped("model"),
            "trtllm": mapped("model"),
        },
    ),
    Option(
        key="option.s3url",
        type=Text("s3:// prefix"),
        doc="S3 prefix of the model.",
        systems=_COMMON,
        deprecated="since 0.27",
        replaced_by="option.model_id",
        actions={"lmi": mapped("option.model_id")},
    ),
    Option(
        key="option.dtype",
        type=Choice((*DTYPES, "int8")),
        doc="Data type the weights are cast to.",
        systems=(
            *_COMMON,
            "accelerate",
            "lmi_dist",
            "vllm",
            "deepspeed",
            "fastertransformer",
            "neuronx",
            "tgi",
        ),
        default="auto",
        defaults={"neuronx": "fp16", "fastertransformer": "fp32"},
        flag=Flag("--dtype", "DTYPE"),
        choices={
            "vllm": (*DTYPES,),
            "neuronx": ("fp32", "fp16", "bf16", "float32", "float16", "bfloat16"),
        },
        actions={
            "lmi": mapped(
                "dtype",
                convert=DTYPES,
                by_value={"int8": _INT8, "auto": _AUTO}
                | dict.fromkeys(("fp32", "float32", "float"), _FP32)
                | dict.fromkeys(("bf16", "bfloat16"), _BF16),
            ),
            "vllm": mapped("dtype", convert=LONG_DTYPES),
            "trtllm": mapped(
                "dtype",
                convert=LONG_DTYPES,
                by_value={"int8": refused("TensorRT-LLM quantises nothing at load")},
            ),
        },
    ),
    Option(
        key="option.data_type",
        type=Choice((*DTYPES, "int8")),
        doc="Older name of option.dtype, which wins when both are given.",
        systems=("accelerate",),
        deprecated="since 0.25",
        replaced_by="option.dtype",
        actions={"lmi": mapped("option.dtype")},
    ),
    Option(
        key="option.tensor_parallel_degree",
        type=Int(-1, words=("max",)),
        doc="Devices that share one copy of the model; max means all visible devices.",
        systems=(*_COMMON, "accelerate", "vllm", "fastertransformer", "tgi"),
        default="max",
        defaults={"deepspeed": 1, "neuronx": 1, "accelerate": -1, "scheduler": -1},
        spellings=("option.tensor_parallel_size",),
        env=("TENSOR_PARALLEL_DEGREE", "SM_NUM_GPUS"),
        flag=Flag("--num-shard", "NUM_SHARD"),
        actions={
            "lmi": honoured(
                None,
                "processes, or GPUs, that share a copy",
                test="tests/config/test_ranks.py::test_a_degree_on_the_cpu_is_a_number_of_ranks",
            ),
            "vllm": mapped("tensor_parallel_size"),
            "trtllm": mapped("tensor_parallel_size"),
        },
    ),
    Option(
        key="option.pipeline_parallel_degree",
        type=Int(1),
        doc="Pipeline stages of one copy of the model.",
        systems=(*_COMMON, "fastertransformer", "vllm"),
        default=1,
        spellings=("option.pipeline_parallel_size",),
        env=("PIPELINE_PARALLEL_DEGREE",),
        actions={
            "lmi": mapped(None, "how many GPUs share a copy; on the CPU there is nothing to share"),
            "vllm": mapped("pipeline_parallel_size"),
            "neuron": refused(
                "vLLM Neuron has no pipelines: raise option.tensor_parallel_degree", idle=(1,)
            ),
            "trtllm": mapped("pipeline_parallel_size"),
        },
    ),
    Option(
        key="option.cluster_size",
        type=Int(1),
        doc="Hosts that serve one copy of the model together.",
        systems=_COMMON,
        default=1,
        env=("DJL_CLUSTER_SIZE",),
        actions={"lmi": needs("parallel.cluster", tuning=True, idle=(1,))},
    ),
    Option(
        key="option.rolling_batch",
        type=Choice(ROLLING_BATCHES),
        doc="Continuous batching and the library behind it.",
        systems=(*_COMMON, "deepspeed"),
        default="auto",
        defaults={"accelerate": "disable"},
        choices={
            "deepspeed": ("auto", "deepspeed", "disable"),
            "trtllm": ("auto", "trtllm", "disable"),
        },
        actions={
            "lmi": mapped(
                None,
                "the lmi engine always batches continuously",
                by_value={
                    "scheduler": mapped(
                        None,
                        "batches have no padding to be bounded: each sequence's keys and values "
                        "are in blocks of its own, and none is copied when others come or go, "
                        "for 4.7 times the tokens of a processor second (bench/results); "
                        "option.force_padded=true runs the padded path",
                    ),
                    "disable": honoured(
                        None,
                        "LMI's routes answer a list with the prompts in front; the lmi engine "
                        "batches continuously all the same",
                        test=_PIPELINE,
                    ),
                },
            ),
            "vllm": _CHOICE,
            "trtllm": _CHOICE,
        },
    ),
    Option(
        key="option.max_rolling_batch_size",
        type=Int(1),
        doc="Sequences in the running batch of one copy of the model.",
        systems=(*_COMMON, "deepspeed", "vllm", "tgi"),
        default=32,
        defaults={"deepspeed": 4, "vllm": 256, "lmi_dist": 256, "trtllm": 256, "tgi": 128},
        spellings=("option.max_num_seqs",),
        env=("MAX_BATCH_SIZE",),
        flag=Flag("--max-batch-size", "MAX_BATCH_SIZE"),
        actions={
            "lmi": honoured(
                "max_num_seqs",
                test="tests/config/test_honoured_limits.py::test_sequences_of_the_batch",
            ),
            "vllm": mapped("max_num_seqs"),
            "trtllm": mapped("max_batch_size"),
        },
    ),
    Option(
        key="option.trust_remote_code",
        type=Bool(),
        doc="Run Python code that comes with the model.",
        systems=(*_COMMON, "accelerate", "tgi"),
        default=False,
        env=("HF_MODEL_TRUST_REMOTE_CODE", "HF_TRUST_REMOTE_CODE"),
        flag=Flag("--trust-remote-code", "TRUST_REMOTE_CODE", switch=True),
        actions={
            "lmi": no_effect("families of ours never run code from a model"),
            "vllm": mapped("trust_remote_code"),
            "trtllm": mapped("trust_remote_code"),
        },
    ),
    Option(
        key="option.revision",
        type=Text("branch, tag or commit"),
        doc="Revision of a hub model.",
        systems=(*_COMMON, "accelerate", "tgi"),
        env=("HF_REVISION", "HF_MODEL_REVISION"),
        flag=Flag("--revision", "REVISION"),
        actions={
            "lmi": honoured(
                "revision",
                test="tests/config/artefacts/test_hub.py::test_revision_token_and_endpoint_reach_the_client",
            ),
            "vllm": mapped("revision"),
            "trtllm": mapped("revision"),
        },
    ),
    Option(
        key="option.entryPoint",
        type=Text("module, file name or URL"),
        doc="Handler: a built-in djl_python module, a .py file of the model, or a URL of one.",
        systems=_COMMON,
        env=("OPTION_ENTRYPOINT", "DJL_ENTRY_POINT"),
        actions={
            "lmi": _CHOICE,
            "vllm": _CHOICE,
            "trtllm": _CHOICE,
        },
    ),
    Option(
        key="option.mpi_mode",
        type=Bool(),
        doc="Start one process per device with MPI; set by engine=MPI and DeepSpeed.",
        systems=_COMMON,
        default=False,
        actions={
            "lmi": no_effect(
                "the lmi engine starts its ranks itself, or has them in the processes that mpirun, "
                "srun or torchrun started"
            ),
            "trtllm": no_effect("TensorRT-LLM starts its own processes"),
        },
    ),
    Option(
        key="option.async_mode",
        type=Bool(),
        doc="Serve through the asynchronous handlers of later releases.",
        systems=_COMMON,
        actions={"lmi": no_effect("the lmi engine is always asynchronous")},
    ),
    Option(
        key="option.parallel_loading",
        type=Bool(),
        doc="Load several copies of the model at the same time.",
        systems=(*_COMMON, "deepspeed"),
        default=False,
        actions={"lmi": no_effect("copies load together once the first has packed the weights")},
    ),
    Option(
        key="option.model_loading_timeout",
        type=Int(1),
        doc="Seconds a model may take to load.",
        systems=_COMMON,
        default=1800,
        env=("MODEL_LOADING_TIMEOUT", "SAGEMAKER_STARTUP_TIMEOUT"),
        actions={
            "lmi": honoured(
                "loading_timeout_s",
                "where it is given",
                test="tests/server/http/test_answer_deadline.py::test_loading_has_a_limit",
            )
        },
    ),
    Option(
        key="option.predict_timeout",
        type=Int(1),
        doc="Seconds one step (or one call of a handler) may take.",
        systems=_COMMON,
        default=120,
        env=("PREDICT_TIMEOUT", "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS"),
        actions={
            "lmi": honoured(
                "limits",
                "where it is given: for a place in the batch, as max_queue_s, and between two "
                "tokens of an answer",
                test="tests/server/http/test_answer_deadline.py::test_silence_ends_an_answer",
            )
        },
    ),
    Option(
        key="option.task",
        type=Text("Hugging Face pipeline task"),
        doc="Task of the model.",
        systems=("accelerate", "deepspeed", "neuronx", "vllm", "common"),
        env=("HF_TASK",),
        actions={
            "lmi": mapped(
                "task",
                capability="task.other",
                by_value={
                    name: _POOLED if task in ("embed", "rerank") else mapped("task", convert=TASKS)
                    for name, task in TASKS.items()
                },
            ),
            "vllm": needs("task.other", idle=TEXT_TASKS),
        },
    ),
)
