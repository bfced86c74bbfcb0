"""What is known of the processor, beside what the system says of it."""

import platform

import pytest

from lmi_core import _native
from lmi_core.config.table.native import INSTRUCTION_SETS


def test_machine_facts_fit_together() -> None:
    info = _native.cpu_info()
    assert 1 <= _native.num_physical_cores() == info["num_physical_cores"]
    assert info["num_physical_cores"] <= info["num_logical_cores"]
    assert 0 < info["memory_limit_bytes"] <= info["memory_bytes"]
    assert set(info["cache_bytes"]) == {"l1d", "l2", "l3"}
    assert info["flags"] == sorted(info["flags"])


_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
# By processor, in rising order: what of /proc/cpuinfo each level is made of.
_LEVELS = {
    "x86_64": {
        "scalar": set(),
        "avx2": _AVX2,
        "avx2_vnni": _AVX2 | {"avx_vnni"},
        "avx512": _AVX512,
        "avx512_vnni": _AVX512 | {"avx512_vnni"},
        "amx": _AVX512 | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
        "avx512_bf16": _AVX512 | {"avx512_vnni", "avx512_bf16"},
    },
    "aarch64": {
        "scalar": set(),
        "neon": {"asimd"},
        "neon_dotprod": {"asimd", "asimddp"},
        "neon_bf16": {"asimd", "asimddp", "i8mm", "bf16"},
    },
}


def test_instruction_sets_match_the_cpu_flags() -> None:
    flags = set(_native.cpu_info()["flags"])
    if not flags & {"sse2", "asimd"}:
        pytest.skip("an emulator that hands on another machine's /proc/cpuinfo")
    wanted = [name for name, needs in _LEVELS[platform.machine()].items() if needs <= flags]
    assert _native.instruction_sets() == wanted


def test_every_level_can_be_named_in_a_configuration() -> None:
    built = {name for levels in _LEVELS.values() for name in levels}
    assert built | {"auto"} == set(INSTRUCTION_SETS)
