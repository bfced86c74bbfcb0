"""A model that doesn't fit is refused with the numbers before it is loaded."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import replace

import pytest

from lmi_core import _native
from lmi_core.config.explain import main
from lmi_core.config.targets.host import Host
from lmi_core.doctor import examine
from lmi_core.errors import InsufficientMemoryError, ModelError
from lmi_core.models.found_model import find_model
from lmi_core.runners.cpu import memory_needs
from lmi_core.runners.cpu.cpu_model import check_heads, find_cpu_model
from lmi_core.runners.cpu.cpu_runner import load_cpu_runner
from lmi_core.runners.cpu.memory_needs import check_memory, estimate, memory_errors
from lmi_core.settings.engine_config import EngineConfig
from tests.checkpoints import cached_checkpoint

LIMIT: int = _native.cpu_info()["memory_limit_bytes"]


@pytest.fixture
def config() -> EngineConfig:
    model = cached_checkpoint("llama2", dtype="bfloat16")
    return EngineConfig(model=model, kv_cache_bytes=1 << 20, num_threads=1)


@pytest.fixture
def allow(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Return a function that bounds what the process may use, as a control group does."""

    def bound(num_bytes: int) -> None:
        info = {**_native.cpu_info(), "memory_limit_bytes": num_bytes}
        monkeypatch.setattr(_native, "cpu_info", lambda: info)

    return bound


def test_the_estimate_is_what_is_taken(config: EngineConfig) -> None:
    needs = estimate(find_model(config))
    runner, _ = load_cpu_runner(config)
    info = runner.info
    runner.close()
    assert needs.weights == pytest.approx(info.weight_bytes, rel=0.1)
    assert needs.kv_cache == info.kv_cache_bytes
    assert info.arena_bytes / 4 < needs.workspace < 8 * info.arena_bytes


def test_latent_attention_keeps_a_token_once() -> None:
    config = EngineConfig(model=cached_checkpoint("deepseek_v2"), max_num_seqs=2, num_threads=1)
    needs = estimate(find_model(config))
    runner, _ = load_cpu_runner(config)
    info = runner.info
    runner.close()
    row_bytes = 3 * (8 + 24) * 4  # layers, rotary part and latent, fp32
    assert needs.kv_cache == info.kv_cache_bytes == info.num_blocks * info.block_size * row_bytes


def test_what_does_not_fit_is_refused(config: EngineConfig, allow) -> None:  # type: ignore[no-untyped-def]
    needs = estimate(find_model(config))
    allow(needs.total)
    check_memory(find_model(config))
    allow(needs.total - 1)
    words = r"needs about .* \(weights .*, KV cache up to .*, steps .*\); this process may use"
    with pytest.raises(InsufficientMemoryError, match=words):
        load_cpu_runner(config)
    check_memory(find_model(replace(config, quantize="int4")))


@pytest.mark.parametrize(
    ("variant", "num_q_heads", "num_kv_heads", "head_dim", "is_refused"),
    [
        ("llama2", 112, 112, 128, False),
        ("llama2", 232, 8, 64, False),
        ("deepseek_v2", 128, 1, 576, False),
        ("deepseek_v2", 512, 1, 576, True),
        ("llama2", 2048, 1, 64, True),
        ("llama2", 800, 800, 128, True),
    ],
)
def test_heads_must_fit_into_a_threads_memory(
    variant: str, num_q_heads: int, num_kv_heads: int, head_dim: int, is_refused: bool
) -> None:
    found = find_model(EngineConfig(model=cached_checkpoint(variant), num_threads=1))
    heads = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    attention = replace(found.spec.attention, **heads)  # type: ignore[arg-type]
    found = replace(found, spec=replace(found.spec, attention=attention))
    if not is_refused:
        return check_heads(found)
    with pytest.raises(ModelError, match=f"num_attention_heads is {num_q_heads} over"):
        check_heads(found)


def test_other_models_count(config: EngineConfig) -> None:
    needs = estimate(find_model(config))
    check_memory(find_model(config), LIMIT - needs.total)
    with pytest.raises(InsufficientMemoryError, match="other models have taken"):
        check_memory(find_model(config), LIMIT - needs.total + 1)


def test_others_may_come_after_it_was_found(config: EngineConfig) -> None:
    found = find_cpu_model(config)
    with pytest.raises(InsufficientMemoryError, match=r"is left|other models have taken"):
        check_memory(found, LIMIT - 1)


def test_explain_refuses_it_too(
    config: EngineConfig, allow, capsys: pytest.CaptureFixture[str]
) -> None:  # type: ignore[no-untyped-def]
    arguments = [str(config.model), "--kv-cache-bytes", str(1 << 20)]
    assert main(arguments, environ={}, host=Host()) == 0
    allow((1 << 20) + 4096)
    assert main(arguments, environ={}, host=Host()) == 2
    assert "this process may use" in " ".join(capsys.readouterr().out.split())


def test_addresses_are_counted(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = estimate(find_model(config))
    monkeypatch.setattr(memory_needs, "free_address_bytes", lambda: needs.total + needs.stored)
    check_memory(find_model(config))
    monkeypatch.setattr(memory_needs, "free_address_bytes", lambda: needs.total)
    with pytest.raises(InsufficientMemoryError, match="ulimit -v leaves"):
        check_memory(find_model(config))


def test_a_limit_on_addresses_ends_the_start_in_one_line(config: EngineConfig) -> None:
    def few_addresses() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    command = [sys.executable, "-m", "lmi_core", "serve", str(config.model), "--port", "0"]
    done = subprocess.run(
        [*command, "--kv-cache-bytes", str(1 << 30)],
        preexec_fn=few_addresses,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 2, done.stderr
    assert "ulimit -v leaves" in done.stderr
    assert "internal" not in done.stderr


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        _native.NativeError("can't reserve 9 bytes: Cannot allocate memory"),
        RuntimeError("can't start new thread"),
    ],
)
def test_memory_that_runs_out_while_loading_is_named(error: Exception) -> None:
    with pytest.raises(InsufficientMemoryError, match="memory ran out while"), memory_errors():
        raise error
    with pytest.raises(RuntimeError, match="another"), memory_errors():
        raise RuntimeError("another")


def test_doctor_says_what_ulimit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 30, 8 << 30))
    (memory,) = [finding for finding in examine() if finding.topic == "memory"]
    assert "ulimit -v allows 8" in memory.text
