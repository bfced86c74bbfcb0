"""Packed weights kept on disk: what is found again, and what nobody may rely on."""

import asyncio
import logging
import multiprocessing
import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from lmi_core import _native
from lmi_core.config.resolve import resolve
from lmi_core.config.targets.host import Host
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.runners.cpu.cpu_runner import load_cpu_runner
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.weights import packed_model, repack_cache
from lmi_core.weights.content_digest import ContentDigests, FileState
from lmi_core.weights.hf_config import QuantizationSettings
from lmi_core.weights.repack_cache import RepackCache
from tests.checkpoints import cached_checkpoint

PROMPT = list(range(10, 50))
PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=0)


@pytest.fixture(autouse=True)
def _small_checkpoints_count(monkeypatch):
    monkeypatch.setattr(repack_cache, "MIN_CHECKPOINT_BYTES", 0)


@pytest.fixture
def model(tmp_path):
    """A checkpoint of its own, old enough for its state to be trusted."""
    directory = tmp_path / "model"
    shutil.copytree(cached_checkpoint("llama2", dtype="bfloat16"), directory)
    return directory


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def config_of(model, cache, **more):
    more.setdefault("kv_cache_bytes", 1 << 20)
    return EngineConfig(model=model, repack_cache_dir=str(cache), num_threads=1, **more)


def start(config):
    """Load and leave once everything is written; the labels that had to be packed."""
    runner, _ = load_cpu_runner(config)
    [packed] = runner._packed
    packed.wait()
    runner.close()
    return packed._num_packed


def outputs(config):
    async def main():
        async with Engine(config) as engine:
            for packed in engine._parts.runner._packed:
                packed.wait()
            events = [event async for event in engine.generate(PROMPT, PARAMS)]
            return [(event.token_id, event.logprob) for event in events]

    return asyncio.run(main())


def files(cache):
    return sorted(cache.glob("*.packed"))


@contextmanager
def counting_digests(monkeypatch):
    """The files that were hashed."""
    from lmi_core.weights import content_digest

    hashed = []
    digest = content_digest._digest
    monkeypatch.setattr(
        content_digest, "_digest", lambda state, *rest: hashed.append(state) or digest(state, *rest)
    )
    yield hashed
    monkeypatch.undo()


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_the_second_start_packs_nothing_and_gives_the_same_bits(model, cache, quantize):
    config = config_of(model, cache, quantize=quantize)
    first = outputs(config)
    assert len(files(cache)) == 1
    assert start(config) == 0
    assert outputs(config) == first


def test_formats_and_instruction_sets_have_files_of_their_own(model, cache):
    for more in ({}, {"quantize": "int8"}, {"instruction_set": "scalar"}, {"dtype": "fp32"}):
        assert start(config_of(model, cache, **more)) > 0
        assert start(config_of(model, cache, **more)) == 0
    assert len(files(cache)) == 4


def test_fp8_files_of_before_scales_went_by_their_shape_are_not_found():
    settings = QuantizationSettings(Path("config.json"), {"quant_method": "fp8"})
    config = EngineConfig(model=Path("model"))
    assert packed_model._formats(config, settings) != packed_model._formats(config, None)


def test_a_copy_of_the_checkpoint_finds_the_same_file(model, cache, tmp_path):
    start(config_of(model, cache))
    copy = shutil.copytree(model, tmp_path / "copy")
    assert start(config_of(copy, cache)) == 0


def test_other_content_of_equal_size_and_time_is_packed_anew(model, cache):
    start(config_of(model, cache))
    weights = model / "model.safetensors"
    status = weights.stat()
    with weights.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(b"\x3c" * 64)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert start(config_of(model, cache)) > 0
    assert len(files(cache)) == 2


def test_a_settled_checkpoint_is_hashed_once(model, cache, monkeypatch):
    weights = FileState.of(model / "model.safetensors")
    now = weights.changed_ns + 10**10
    monkeypatch.setattr(time, "time_ns", lambda: now)
    digests = ContentDigests(cache)
    with counting_digests(monkeypatch) as hashed:
        monkeypatch.setattr(time, "time_ns", lambda: now)
        assert digests.of(weights, 1) == digests.of(weights, 2)
        assert len(hashed) == 1


def test_a_checkpoint_that_was_just_written_is_hashed_every_time(model, cache, monkeypatch):
    weights = FileState.of(model / "model.safetensors")
    digests = ContentDigests(cache)
    with counting_digests(monkeypatch) as hashed:
        monkeypatch.setattr(time, "time_ns", lambda: weights.changed_ns + 10**9)
        assert digests.of(weights, 1) == digests.of(weights, 1)
        assert len(hashed) == 2


@pytest.mark.parametrize("damage", ["truncated", "header", "matrix", "empty"])
def test_a_damaged_file_is_packed_again_with_a_warning(model, cache, caplog, damage):
    config = config_of(model, cache)
    expected = outputs(config)
    (path,) = files(cache)
    good = path.read_bytes()
    with path.open("r+b") as file:
        if damage == "truncated":
            file.truncate(len(good) - 1)
        elif damage == "empty":
            file.truncate(0)
        else:
            file.seek(20 if damage == "header" else len(good) // 2)
            file.write(b"\xff\xfe\xfd")
    with caplog.at_level(logging.WARNING):
        assert outputs(config) == expected
    assert str(path) in caplog.text
    assert "packed again" in caplog.text
    assert path.read_bytes() == good


def test_an_unwritable_directory_is_no_cache(model, tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with caplog.at_level(logging.DEBUG, logger="lmi_core"):
        assert start(config_of(model, blocked / "cache")) > 0
    lines = [record for record in caplog.records if "aren't kept" in record.message]
    assert [record.levelno for record in lines] == [logging.DEBUG]
    assert blocked.read_text() == "in the way"


def test_nothing_is_left_of_a_file_that_was_not_finished(model, cache, monkeypatch):
    runner, _ = load_cpu_runner(config_of(model, cache))
    runner.close()  # perhaps before, during or after
    assert [path for path in cache.glob("*") if "partial" in path.name] == []


def test_the_least_recently_used_file_goes_first(model, cache):
    start(config_of(model, cache))
    (oldest,) = files(cache)
    start(config_of(model, cache, quantize="int8"))
    middle = next(path for path in files(cache) if path != oldest)
    for age, path in ((30, middle), (20, oldest)):
        os.utime(path, (time.time() - age,) * 2)
    start(config_of(model, cache))  # which uses the oldest
    limit = oldest.stat().st_size + middle.stat().st_size
    start(config_of(model, cache, quantize="int4", repack_cache_bytes=limit))
    assert oldest in files(cache)
    assert middle not in files(cache)
    assert len(files(cache)) == 2
    assert sum(path.stat().st_size for path in files(cache)) <= limit


def test_stale_partial_files_are_swept(model, cache):
    cache.mkdir()
    stale, fresh = cache / "a.1.partial", cache / "b.2.partial"
    for path in (stale, fresh):
        path.write_bytes(b"x")
    os.utime(stale, (time.time() - 7200,) * 2)
    start(config_of(model, cache))
    assert not stale.exists()
    assert fresh.exists()


def _start_in_process(config):
    repack_cache.MIN_CHECKPOINT_BYTES = 0
    start(config)


def test_writers_of_one_model_do_not_meet(model, cache):
    config = config_of(model, cache)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_start_in_process, args=(config,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(files(cache)) == 1
    assert start(config) == 0


def configured(model, *options):
    arguments = [str(model), "--prefer-native"]
    for option in options:
        arguments += ["--option", option]
    deployment = resolve(arguments, {}, Host())
    return deployment.models[0].engine_config(model)


def test_the_directory_is_where_it_is_written(model, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    start(configured(model, f"repack_cache_dir={cache}"))
    assert len(files(cache)) == 1
    start(configured(model))
    assert len(files(tmp_path / "user" / "lmi" / "packed")) == 1
    runner, _ = load_cpu_runner(configured(model, "repack_cache_dir=none"))
    assert [packed._cache for packed in runner._packed] == [None]
    runner.close()


def test_the_limit_is_the_one_written(model, cache, caplog):
    options = (f"repack_cache_dir={cache}", "repack_cache_bytes=100k")
    with caplog.at_level(logging.INFO):
        assert start(configured(model, *options)) > 0
    assert files(cache) == []
    assert "repack_cache_bytes is 0 MiB" in caplog.text


def test_the_layout_of_packed_weights_has_its_version():
    """Fails where packing gives other bytes: then count kPackedLayoutVersion up, too."""
    numbers = np.arange(48 * 256, dtype=np.int64) * 2654435761 % 1000003
    matrix = (numbers.astype(np.float32) / 500000 - 1).reshape(48, 256)
    sums = [
        _native.LinearWeight.pack([matrix], format=format, group_size=group).checksum()
        for format, group in (("fp32", 0), ("bf16", 0), ("int8", 0), ("int4", 128))
    ]
    blocks = np.resize(np.arange(256, dtype=np.uint8), (48, 210))
    sums.append(_native.LinearWeight.pack([blocks], format="q6_k", group_size=16).checksum())
    sums.append(_native.LinearWeight.pack([matrix], format="nf4", group_size=16).checksum())
    floats = [55748063744970600, 15867424154063074395, 3527185909319626740, 13073272105080026782]
    blocks_sum, codes_sum = 7444541666059483920, 6839668418042595763
    version = _native.LinearWeight.layout_version
    assert (version, sums) == (3, [*floats, blocks_sum, codes_sum])


def test_reading_needs_the_very_bytes(tmp_path: Path):
    weight = _native.LinearWeight.pack([np.ones((20, 8), np.float32)], format="fp32")
    path = tmp_path / "bytes"
    path.write_bytes(bytes(64) + weight.packed().tobytes())
    where = {
        "file": _native.MappedFile(str(path)),
        "offset": 64,
        "num_bytes": weight.num_bytes,
        "checksum": weight.checksum(),
        "num_outputs": 20,
        "num_inputs": 8,
        "format": "fp32",
    }
    assert np.array_equal(_native.LinearWeight.read(**where).unpack(), weight.unpack())
    for wrong, message in (
        ({"checksum": 1}, "damaged"),
        ({"offset": 128}, "are not in"),
        ({"offset": 0}, "damaged"),
        ({"num_inputs": 9}, "bytes of a matrix"),
    ):
        with pytest.raises(_native.NativeError, match=message):
            _native.LinearWeight.read(**where | wrong)


def test_codes_are_kept_as_they_are_to_be_read(tmp_path, cache):
    """Settings beside the tensors say what these mean."""
    checkpoints = pytest.importorskip("tests.integer_checkpoints")
    path, _ = checkpoints.make_integer_checkpoint(tmp_path / "model", checkpoints.FORMS["gptq"])
    config = config_of(path, cache)
    assert start(config) > 0
    assert start(config_of(path, cache, quantize="gptq")) == 0
    first = outputs(config)
    settings = {**checkpoints.GPTQ, "checkpoint_format": "gptq_v2"}
    checkpoints.set_config(path, quantization_config=settings)
    assert start(config) > 0
    assert outputs(config) != first


def test_every_numa_node_has_a_file_of_its_own_where_there_is_room(model, cache):
    """Which its processes share; the first node's where there is none."""
    start(config_of(model, cache))
    [first] = cache.glob("*.packed")
    kept, num_bytes = RepackCache(cache, 1 << 30), first.stat().st_size
    for _ in range(2):
        assert kept.find(first.stem, 1) is not None
    [own] = cache.glob("*.node1.packed")
    assert own.read_bytes() == first.read_bytes()
    assert not list(cache.glob("*.partial"))
    state = own.stat().st_ino
    assert RepackCache(cache, 3 * num_bytes - 1).find(first.stem, 2) is not None
    assert sorted(cache.glob("*.packed")) == sorted([first, own])
    assert ": 1 models, " in kept.describe()
    first.unlink()
    assert kept.find(first.stem, 1) is not None
    assert own.stat().st_ino == state
    assert kept.find(first.stem, 2) is None


def test_processes_that_start_together_in_a_numa_node_copy_once(model, cache, tmp_path):
    start(config_of(model, cache))
    [first] = cache.glob("*.packed")
    context, made = multiprocessing.get_context("spawn"), tmp_path / "made"
    together = context.Barrier(2)
    processes = [
        context.Process(target=_copy_for_node_1, args=(cache, first.stem, together, made))
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert made.read_text() == "once\n"


def _copy_for_node_1(cache, name, together, made):
    copy = shutil.copyfileobj

    def copyfileobj(*files):
        with made.open("a") as file:
            file.write("once\n")
        time.sleep(0.2)  # in which the other would come
        copy(*files)

    shutil.copyfileobj = copyfileobj
    together.wait(60)
    assert RepackCache(cache, 1 << 30).find(name, 1) is not None


@pytest.mark.parametrize("damage", [20, -1000], ids=["header", "matrix"])
def test_a_damaged_copy_of_a_numa_node_heals(model, cache, caplog, damage):
    """By its first file, where that isn't damaged itself; the matrix is packed again."""
    start(config_of(model, cache))
    [first] = cache.glob("*.packed")
    config = config_of(model, cache, weight_nodes=(1,))
    assert start(config) == 0
    own = first.with_suffix(".node1.packed")
    good = own.read_bytes()
    with own.open("r+b") as file:
        file.seek(damage, os.SEEK_END if damage < 0 else os.SEEK_SET)
        file.write(b"\xff\xfe\xfd")
    assert start(config) == (0 if damage > 0 else 1)
    assert "can't be used" in caplog.text or "packed again" in caplog.text
    assert not own.exists()
    for _ in range(2):
        assert start(config) == 0
    assert own.read_bytes() == good == first.read_bytes()
