"""Keys of the native engine that no other system has."""

from lmi_core.config.option import Action, Flag, Option, honoured, mapped, needs, no_effect
from lmi_core.config.value_type import Bool, Bytes, Choice, Int, ValueType


def _native(
    name: str,
    kind: ValueType,
    doc: str,
    default: object = None,
    native: Action | None = None,
    flag: Flag | None = None,
    spellings: tuple[str, ...] = (),
) -> Option:
    return Option(
        key=f"option.{name}",
        type=kind,
        doc=doc,
        spellings=spellings,
        systems=("native", "tgi") if flag else ("native",),
        default=default,
        flag=flag,
        actions={"native": native or mapped(name)},
    )


OPTIONS = (
    _native(
        "block_size", Int(16, 4096), "Tokens in a block of the KV cache, a multiple of 16.", 32
    ),
    _native("kv_cache_bytes", Bytes(), "Bytes of the KV cache."),
    _native(
        "kv_cache_dtype",
        Choice(("auto", "bf16", "fp32", "int8", "fp8_e4m3fn", "fp8_e5m2")),
        "Data type of the KV cache.",
        "auto",
        mapped(
            "kv_dtype",
            by_value={
                "int8": needs("kv.int8", "write bf16", setting="kv_dtype", idle=()),
                "fp8_e4m3fn": needs("kv.fp8", "write int8 or bf16", idle=()),
                "fp8_e5m2": needs("kv.fp8", "write int8 or bf16", idle=()),
            },
        ),
        Flag("--kv-cache-dtype", "KV_CACHE_DTYPE", choices=("fp8_e4m3fn", "fp8_e5m2")),
        spellings=("option.kv_dtype",),
    ),
    _native("num_threads", Int(1, 4096), "Threads of the CPU engine."),
    _native(
        "seed",
        Int(0),
        "Seed of requests that bring none.",
        0,
        honoured("seed", test="tests/engine/test_engine.py::test_seeds_are_derived_and_reported"),
    ),
    _native(
        "overlap",
        Bool(),
        "Deliver a step's tokens while the next step runs.",
        True,
        honoured(
            "overlap",
            test="tests/engine/test_loop.py::test_overlapped_and_plain_loops_give_the_same_events",
        ),
    ),
    _native(
        "instruction_set",
        Choice(("auto", "scalar", "avx2", "avx512", "avx512_bf16")),
        "Instruction set of the kernels.",
        "auto",
    ),
    _native(
        "deterministic",
        Bool(),
        "The same tokens whatever else is in the batch.",
        None,
        honoured(
            None,
            "always so on the CPU engine",
            test="tests/engine/test_invariance.py::test_bits_do_not_depend_on_company",
            capability="batch.invariant",
            idle=(False,),
            by_value={False: no_effect("always so on the CPU engine, at no cost")},
        ),
    ),
    _native(
        "guaranteed_no_evict",
        Bool(),
        "Admit a sequence only when its whole possible length fits.",
        False,
        honoured(
            "guaranteed_no_evict",
            test="tests/engine/test_engine.py::test_preemption_changes_no_token",
        ),
    ),
)
