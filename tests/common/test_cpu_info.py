from lmi_core import _native


def test_machine_facts_fit_together() -> None:
    info = _native.cpu_info()
    assert 1 <= _native.num_physical_cores() == info["num_physical_cores"]
    assert info["num_physical_cores"] <= info["num_logical_cores"]
    assert 0 < info["memory_limit_bytes"] <= info["memory_bytes"]
    assert set(info["cache_bytes"]) == {"l1d", "l2", "l3"}
    assert info["flags"] == sorted(info["flags"])


def test_instruction_sets_match_the_cpu_flags() -> None:
    levels = _native.instruction_sets()
    flags = _native.cpu_info()["flags"]
    assert levels[0] == "scalar"
    assert ("avx2" in levels) == {"avx2", "fma", "f16c"}.issubset(flags)
    assert ("avx512_bf16" in levels) == {"avx512_bf16", "avx512_vnni", "avx512vl"}.issubset(flags)
