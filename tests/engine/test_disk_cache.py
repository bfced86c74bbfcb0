"""Prefixes that outlast memory and the process: the same bits, and faults cost only the cache."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmi_core.config.explain import as_json
from lmi_core.config.resolve import examine, resolve
from lmi_core.config.targets.host import Host
from lmi_core.engine.disk_blocks import DiskBlocks
from lmi_core.engine.engine import Engine
from lmi_core.engine.fingerprint import build_digest
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.lora_config import LoraConfig
from lmi_server.http import tenants
from tests.checkpoints import cached_checkpoint
from tests.engine.harness import until
from tests.engine.numbered_blocks import blocks_in
from tests.lora_adapters import cached_adapter

PROMPT = [4 + number * 7 % 50 for number in range(100)]
NUM_HASHED = 6
"""Blocks of the prompt that may be found: the seventh isn't full."""
PARAMS = SamplingParams(max_new_tokens=8, temperature=0.9, seed=5, ignore_eos=True, logprobs=2)


def config_of(directory: Path | None, model: str = "llama2", **changes: Any) -> EngineConfig:
    settings = {"max_model_len": 160, "block_size": 16, "num_threads": 1, **changes}
    return EngineConfig(model=cached_checkpoint(model), prefix_cache_dir=directory, **settings)


async def ask(engine: Engine, prompt: Sequence[int] = PROMPT, **fields: Any) -> list[TokenEvent]:
    return [event async for event in engine.generate(list(prompt), PARAMS, **fields)]


def start(config: EngineConfig, **fields: Any) -> tuple[int, list[Any]]:
    """In a fresh engine, how many tokens of the prompt come from a cache; tokens and bits."""

    async def run() -> tuple[int, list[Any]]:
        async with Engine(config, check_integrity=True) as engine:
            events = await ask(engine, **fields)
        outcome = [(event.token_id, event.logprob, event.top) for event in events]
        return events[0].num_cached_tokens, outcome

    return asyncio.run(run())


CACHED = NUM_HASHED * 16


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8"])
def test_a_restored_prefix_gives_the_same_bits(tmp_path: Path, kv_dtype: str) -> None:
    plain = start(config_of(None, kv_dtype=kv_dtype))
    assert plain[0] == 0
    assert start(config_of(tmp_path, kv_dtype=kv_dtype)) == plain
    assert len(blocks_in(tmp_path)) == NUM_HASHED
    assert start(config_of(tmp_path, kv_dtype=kv_dtype)) == (CACHED, plain[1])
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


def test_a_prefix_that_memory_lost_comes_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with Engine(config_of(tmp_path), check_integrity=True) as engine:
            first = await ask(engine)
            assert engine._parts is not None
            disk = engine._parts.disk
            assert disk is not None
            await until(lambda: disk.num_blocks == NUM_HASHED)
            engine._parts.runner.pool.clear_cache()
            both = await asyncio.gather(ask(engine), ask(engine))
            for events in both:
                assert events[0].num_cached_tokens == CACHED
                assert [e.logprob for e in events] == [e.logprob for e in first]
            core = engine._core
            assert core is not None
            assert core._restore is not None
            assert core._restore.num_restored == NUM_HASHED

    asyncio.run(run())


def test_two_may_stop_an_engine_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        engine = Engine(config_of(tmp_path))
        await engine.start()
        await ask(engine)
        await asyncio.gather(*(engine.stop() for _ in range(4)))
        assert len(blocks_in(tmp_path)) == NUM_HASHED

    for _ in range(3):
        asyncio.run(run())
    assert start(config_of(tmp_path))[0] == CACHED


@pytest.mark.parametrize(
    "other",
    [
        config_of(None, "qwen2"),
        config_of(None, quantize="int8"),
        config_of(None, kv_dtype="bf16"),
        config_of(None, block_size=32),
        config_of(None, rope_theta=5000.0),
    ],
    ids=["weights", "formats", "cache", "blocks", "rope"],
)
def test_another_model_shares_nothing(tmp_path: Path, other: EngineConfig) -> None:
    start(config_of(tmp_path))
    object.__setattr__(other, "prefix_cache_dir", tmp_path)
    assert start(other)[0] == 0
    assert start(config_of(tmp_path))[0] == CACHED


def test_another_build_is_another_model(tmp_path: Path) -> None:
    """Be it in sources alone, of whatever decides numbers."""
    extension, seen = tmp_path / "native.so", set()
    extension.write_bytes(b"1")
    for path in ("weights/scales.py", "models/family/one.py", "engine/loop.py"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("1")
        seen.add(build_digest(extension, tmp_path))
    (tmp_path / "weights/scales.py").write_text("2")
    seen.add(build_digest(extension, tmp_path))
    extension.write_bytes(b"2")
    seen.add(build_digest(extension, tmp_path))
    assert len(seen) == 4


def test_another_secret_shares_nothing(tmp_path: Path) -> None:
    start(config_of(tmp_path))
    (tmp_path / "secret").unlink()
    assert start(config_of(tmp_path))[0] == 0


def test_salts_share_nothing(tmp_path: Path) -> None:
    start(config_of(tmp_path), cache_salt="a")
    assert start(config_of(tmp_path), cache_salt="b")[0] == 0
    assert start(config_of(tmp_path), cache_salt="a")[0] == CACHED


def test_tenants_keep_their_salts_over_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "_secret", b"0" * 32)
    of_process = tenants.salt_of(b"key")
    tenants.keep_salts(tmp_path)
    kept = tenants.salt_of(b"key")
    assert kept != of_process
    monkeypatch.setattr(tenants, "_secret", b"1" * 32)
    tenants.keep_salts(tmp_path)
    assert tenants.salt_of(b"key") == kept


def test_adapters_are_known_by_their_content(tmp_path: Path) -> None:
    def lora(seed: int) -> EngineConfig:
        adapters = (("a", cached_adapter("llama2", seed)),)
        return config_of(tmp_path, lora=LoraConfig(adapters=adapters))

    start(lora(0), adapter="a")
    assert start(lora(1), adapter="a")[0] == 0
    assert start(lora(0))[0] == 0
    assert start(lora(0), adapter="a")[0] == CACHED


def flipped(data: bytes, position: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 4
    return bytes(changed)


@pytest.mark.parametrize(
    "damage",
    [
        *(partial(flipped, position=position) for position in (0, -20, -1)),
        *(lambda data: data[:-1], lambda data: data + b"x", lambda data: b""),
    ],
    ids=["content", "padding", "digest", "shorter", "longer", "empty"],
)
def test_damaged_blocks_are_computed_again(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    _, outcome = start(config_of(tmp_path))
    path = blocks_in(tmp_path)[2]
    path.write_bytes(damage(path.read_bytes()))
    num_cached, again = start(config_of(tmp_path))
    assert num_cached < CACHED
    assert again == outcome
    assert len(blocks_in(tmp_path)) == NUM_HASHED
    assert start(config_of(tmp_path)) == (CACHED, outcome)
    assert caplog.text.count("is damaged; it is computed again") <= 1


def test_a_directory_that_cannot_be_costs_the_cache_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = start(config_of(None))
    directory = tmp_path / "file"
    directory.write_text("no directory")
    assert start(config_of(directory)) == plain
    assert f"no prefixes are kept in {directory}: " in caplog.text


def test_a_directory_that_is_only_read_still_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, outcome = start(config_of(tmp_path))
    monkeypatch.setattr(DiskBlocks, "_take_lock", lambda self: None)
    assert start(config_of(tmp_path)) == (CACHED, outcome)


@pytest.mark.parametrize("stops", [False, True])
def test_who_waits_for_a_disk_can_leave(
    tmp_path: Path, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others run meanwhile."""
    start(config_of(tmp_path))
    goes_on = threading.Event()
    read = DiskBlocks.read

    def slow(self: DiskBlocks, hashes: Any) -> list[bytes]:
        goes_on.wait()
        return read(self, hashes)

    monkeypatch.setattr(DiskBlocks, "read", slow)

    async def run() -> None:
        async with Engine(config_of(tmp_path), check_integrity=True) as engine:
            waiting = asyncio.create_task(ask(engine))
            core = engine._core
            assert core is not None
            await until(lambda: core._scheduler.num_restoring == 1)
            assert engine.stats().num_waiting == 1
            assert len(await ask(engine, PROMPT[:5])) == 8
            assert not waiting.done()
            if stops:
                asyncio.get_running_loop().call_later(0.05, goes_on.set)
                await engine.stop()
                assert len(await waiting) == 8
                return
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert core._scheduler.num_restoring == engine.stats().num_waiting == 0
            goes_on.set()
            assert (await ask(engine))[0].num_cached_tokens == CACHED
            assert engine.stats().num_used_blocks == 0

    asyncio.run(run())


def configured(*options: str) -> EngineConfig:
    arguments = [str(cached_checkpoint("llama2")), "--prefer-native"]
    for option in ("max_model_len=160", "block_size=16", *options):
        arguments += ["--option", option]
    (model,) = resolve(arguments, {}, Host()).models
    return model.engine_config(cached_checkpoint("llama2"))


def test_the_directory_is_the_one_configured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        start(configured(f"prefix_cache_dir={tmp_path}"))
        assert start(configured(f"prefix_cache_dir={tmp_path}"))[0] == CACHED
    assert f"{NUM_HASHED} blocks of prefixes are in {tmp_path}" in caplog.text
    start(configured(f"prefix_cache_dir={tmp_path}", "prefix_cache_bytes=1k"))
    assert blocks_in(tmp_path) == []


def test_it_is_explained_as_json(tmp_path: Path) -> None:
    argv = [str(cached_checkpoint("llama2")), "--option", f"prefix_cache_dir={tmp_path}"]
    assert f'"prefix_cache_dir": "{tmp_path}"' in json.dumps(as_json(examine(argv)))


def test_other_devices_have_no_such_cache(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="prefix_cache_dir needs device=cpu"):
        config_of(tmp_path, device="torch-cpu")
