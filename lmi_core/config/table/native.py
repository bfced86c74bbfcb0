"""Keys of the lmi engine that no other system has."""

from lmi_core.config.table.option import Action, Flag, Option, honoured, mapped, refused
from lmi_core.config.table.value_type import Bool, Bytes, Choice, Float, Int, Text, ValueType
from lmi_core.settings.placement import MAX_WORKERS

_TESTS = "tests/config/test_honoured.py"
_LIMITS = "tests/config/test_honoured_limits.py"
_DISK = "tests/engine/test_disk_cache.py"
_CACHE = "tests/weights/test_repack_cache.py"
_DEVICES = f"{_TESTS}::test_devices_give_the_same_greedy_tokens"
# The kernels' levels on every processor, each processor's in rising order.
INSTRUCTION_SETS = (
    *("auto", "scalar", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "amx", "avx512_bf16"),
    *("neon", "neon_dotprod", "neon_bf16"),
)
_ACTIVATIONS = f"{_TESTS}::test_what_quantized_weights_are_multiplied_with"
_FP8_CACHE = honoured(
    "kv_dtype",
    "scales of the checkpoint, else 1",
    test=f"{_TESTS}::test_fp8_caches",
    capability="kv.fp8",
)
_FP8_CACHE_OF_VLLM = mapped(
    "kv_dtype",
    "vLLM's name of fp8_e4m3fn",
    convert=dict.fromkeys(("fp8", "fp8_e4m3"), "fp8_e4m3fn"),
    capability="kv.fp8",
)


def _native(
    name: str,
    kind: ValueType,
    doc: str,
    default: object = None,
    native: Action | None = None,
    *env: str,
    vllm: Action | None = None,
) -> Option:
    return Option(
        key=f"option.{name}",
        type=kind,
        doc=doc,
        systems=("lmi",),
        default=default,
        env=env,
        actions={"lmi": native or mapped(name)} | ({"vllm": vllm} if vllm else {}),
    )


OPTIONS = (
    _native(
        "speculation",
        Choice(("ngram", "off")),
        "Draft tokens from the request's text, earlier texts and grammars; tokens are the same.",
        "off",
        honoured(
            "speculation",
            "up to 16 tokens a step, where that pays",
            test="tests/config/test_speculation.py::test_how_many_tokens_are_drafted",
            by_value={"off": mapped(None, "nothing is drafted")},
        ),
    ),
    Option(
        key="option.device",
        type=Choice(("auto", "cpu", "cuda", "torch-cpu")),
        doc="Device: GPUs through torch where there are any, else the CPU engine (auto); one of "
        "the two; or torch on the CPU (for tests).",
        systems=("lmi",),
        default="auto",
        actions={
            "lmi": honoured(
                "device",
                test=_DEVICES,
                by_value={
                    "auto": mapped(None, "the GPUs that are visible, else the CPU"),
                    "cuda": mapped(
                        "device", "torch and Triton kernels, one by one", capability="device.cuda"
                    ),
                },
            ),
            **dict.fromkeys(
                ("vllm", "trtllm", "neuron"), mapped(None, "the library takes what it sees")
            ),
        },
    ),
    _native(
        "block_size",
        Int(16, 4096),
        "Tokens in a block of the KV cache, a multiple of 16.",
        32,
        honoured("block_size", test=f"{_TESTS}::test_reuse_of_prefixes_in_blocks"),
        vllm=mapped("block_size"),
    ),
    _native(
        "kv_cache_bytes",
        Bytes(),
        "Bytes of the KV cache.",
        None,
        honoured("kv_cache_bytes", test=f"{_LIMITS}::test_bytes_of_the_cache"),
        "VLLM_CPU_KVCACHE_SPACE",
    ),
    Option(
        key="option.kv_cache_dtype",
        type=Choice(
            ("auto", "bf16", "fp32", "int8", "fp8_e4m3fn", "fp8_e5m2", "fp8", "fp8_e4m3"),
        ),
        doc="Data type of the KV cache.",
        spellings=("option.kv_dtype",),
        systems=("vllm", "tgi", "lmi"),
        default="auto",
        flag=Flag("--kv-cache-dtype", "KV_CACHE_DTYPE"),
        actions={
            "lmi": honoured(
                "kv_dtype",
                test=f"{_TESTS}::test_data_types",
                by_value={
                    "int8": honoured(
                        "kv_dtype",
                        "a scale per token and head",
                        test=f"{_TESTS}::test_devices_have_the_same_data_types",
                        capability="kv.int8",
                    ),
                    "fp8_e4m3fn": _FP8_CACHE,
                    "fp8_e5m2": _FP8_CACHE,
                    "fp8": _FP8_CACHE_OF_VLLM,
                    "fp8_e4m3": _FP8_CACHE_OF_VLLM,
                },
            ),
            "vllm": mapped(
                "kv_cache_dtype",
                convert={"bf16": "bfloat16", "fp8_e4m3fn": "fp8_e4m3"},
                by_value=dict.fromkeys(
                    ("fp32", "int8"), refused("vLLM has no such KV cache: write auto or fp8")
                ),
            ),
            "trtllm": mapped(
                "kv_cache_config.dtype",
                convert=dict.fromkeys(("fp8_e4m3", "fp8_e4m3fn"), "fp8"),
                by_value=dict.fromkeys(
                    ("bf16", "fp32", "int8", "fp8_e5m2"),
                    refused("TensorRT-LLM has no such KV cache here: write auto or fp8"),
                ),
            ),
        },
    ),
    _native(
        "activations",
        Choice(("auto", "int8", "bf16")),
        "What weights in integers, GGUF's blocks, nf4 and fp4 are multiplied with; auto: int8 rows "
        "with their outliers in 16 bits, or what the checkpoint's scheme says.",
        "auto",
        honoured(
            "activations",
            test=_ACTIVATIONS,
            by_value={
                "int8": honoured(
                    "activations", "rows in int8, outliers too: faster", test=_ACTIVATIONS
                ),
                "bf16": honoured(
                    "activations",
                    "rows as they are, in sums of fp32, on the CPU engine: 2 to 4 times slower",
                    test=_ACTIVATIONS,
                ),
            },
        ),
    ),
    _native(
        "calibration_file",
        Text("file"),
        "Text on which option.quantize=smoothquant measures activations; by default a short one of "
        "many kinds.",
        None,
        honoured(
            "calibration_file",
            "its first 8192 tokens",
            test="tests/config/test_smoothquant.py::test_alpha_and_text_change_what_is_rounded",
        ),
    ),
    _native(
        "num_threads",
        Int(1, 4096),
        "Threads of the CPU engine.",
        native=honoured("num_threads", test=f"{_TESTS}::test_data_types"),
    ),
    _native(
        "num_copies",
        Int(1, MAX_WORKERS),
        "Copies of the model, each in a process of its own, on the CPU with its part of the cores, "
        "or with a GPU; requests of one that dies go on in the others. Unset: a copy on each GPU, "
        "or one engine within the server.",
        native=honoured(
            None,
            "processes behind one server; packed weights are shared, KV caches are not",
            test="tests/server/models/test_copies.py::test_copies_behind_one_server",
        ),
    ),
    Option(
        key="option.on",
        type=Choice(("here", "ray")),
        doc="Machines on which the copies of the model run: this one, or the nodes of the Ray "
        "cluster of which it is one.",
        systems=("lmi",),
        default="here",
        actions={
            "lmi": honoured(
                None,
                "copies on the nodes' CPUs, with option.device=cuda on their GPUs; models and lmi "
                "are on every node, at the same paths",
                test="tests/server/models/test_copies.py::test_copies_on_other_machines",
                by_value={"here": mapped(None, "this machine")},
            ),
            **dict.fromkeys(
                ("transformers", "vllm", "trtllm", "neuron"),
                refused("Ray places the lmi engine's copies alone: leave it out", idle=("here",)),
            ),
        },
    ),
    _native(
        "ray_address",
        Text("host:port of the cluster's head, or auto"),
        "The Ray cluster of option.on=ray; auto: that of RAY_ADDRESS, else the one of which this "
        "machine is a node.",
        "auto",
        honoured(
            None,
            "the cluster that places the copies",
            test="tests/server/models/test_copies.py::test_copies_on_other_machines",
        ),
    ),
    _native(
        "cpu_binding",
        Choice(("auto", "nodes", "cores", "none")),
        "What each of several ranks or copies on the CPU is bound to: cores of its own, or their "
        "NUMA node; auto: nodes, where there are several.",
        "auto",
        honoured(
            "cpu_binding",
            "as far as the process' affinity allows",
            test="tests/config/test_ranks.py::test_ranks_are_bound_to_cores",
        ),
    ),
    _native(
        "tp_invariant",
        Bool(),
        "Answers with the same bits at every option.tensor_parallel_degree: sums over slices of "
        "weights go over a fixed number of them.",
        False,
        honoured(
            "tp_invariant",
            "on the CPU engine, at degrees 1, 2 and 4",
            test="tests/config/test_ranks.py::test_invariant_sums_are_asked_for",
        ),
    ),
    _native(
        "repack_cache_dir",
        Text("directory, auto or none"),
        "Where packed weights are kept for the next start; auto: lmi/packed in the user's cache.",
        "auto",
        honoured("repack_cache_dir", test=f"{_CACHE}::test_the_directory_is_where_it_is_written"),
    ),
    _native(
        "repack_cache_bytes",
        Bytes(),
        "Most bytes of packed weights that are kept.",
        32 << 30,
        honoured("repack_cache_bytes", test=f"{_CACHE}::test_the_limit_is_the_one_written"),
    ),
    _native(
        "prefix_cache_dir",
        Text("directory"),
        "Where KV blocks of prefixes are kept beyond memory and restarts; by default nowhere.",
        None,
        honoured(
            "prefix_cache_dir",
            "with option.device=cpu",
            test=f"{_DISK}::test_the_directory_is_the_one_configured",
        ),
    ),
    _native(
        "prefix_cache_bytes",
        Bytes(),
        "Most bytes of such blocks, of all models in the directory.",
        16 << 30,
        honoured("prefix_cache_bytes", test=f"{_DISK}::test_the_directory_is_the_one_configured"),
    ),
    _native(
        "seed",
        Int(0),
        "Seed of requests that bring none.",
        0,
        honoured("seed", test=f"{_TESTS}::test_the_seed_decides_what_is_sampled"),
        vllm=mapped("seed"),
    ),
    _native(
        "overlap",
        Bool(),
        "Deliver a step's tokens while the next step runs.",
        True,
        honoured(
            "overlap",
            test="tests/config/test_honoured_limits.py::test_loops",
        ),
    ),
    _native(
        "instruction_set",
        Choice(INSTRUCTION_SETS),
        "Instruction set of the kernels; `lmi doctor` names those of this machine. amx, which has "
        "not run on hardware, is never chosen by itself.",
        "auto",
        honoured("instruction_set", test=f"{_TESTS}::test_data_types"),
    ),
    _native(
        "deterministic",
        Bool(),
        "The same tokens whatever else is in the batch.",
        None,
        honoured(
            "deterministic",
            "always so on the CPU engine; slower kernels on others",
            test="tests/config/test_honoured.py::test_the_same_tokens_in_any_company",
            capability="batch.invariant",
            idle=(False,),
        ),
        "VLLM_BATCH_INVARIANT",
    ),
    _native(
        "max_queue_s",
        Float(0),
        "Seconds that a request may wait for its first step; then it is refused as if the queue "
        "were full. By default any number.",
        None,
        honoured("max_queue_s", test=f"{_LIMITS}::test_how_long_requests_may_wait"),
    ),
    _native(
        "guaranteed_no_evict",
        Bool(),
        "Admit a sequence only when its whole possible length fits.",
        False,
        honoured(
            "guaranteed_no_evict",
            test=f"{_LIMITS}::test_preemption_or_none",
        ),
    ),
)
