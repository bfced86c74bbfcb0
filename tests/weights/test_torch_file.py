"""Files of torch.save: the same tensors as torch reads, and nothing of a pickle is run."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.errors import ModelError
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.weights.checkpoint import PICKLED_INDEX_NAME, read_checkpoint
from lmi_core.weights.float_tensors import read_array
from lmi_core.weights.torch_file import read_torch_file
from tests.checkpoints import cached_checkpoint

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")


def state() -> dict[str, Any]:
    table = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    return {
        "table": table,
        "tied": table,
        "second_row": table[1:3],
        "half": torch.randn(5, 2).half(),
        "bf16": torch.randn(3, 3).bfloat16(),
        "ids": torch.arange(4),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "scalar": torch.tensor(2.0),
        "empty": torch.zeros(0, 4),
    }


def bits(array: Any) -> bytes:
    return bytes(array.tobytes())


@pytest.fixture(params=["archive", "before 1.6"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Writes a file as torch of today or as it once did."""

    def write(value: object, name: str = "pytorch_model.bin") -> Path:
        is_archive = request.param == "archive"
        torch.save(value, tmp_path / name, _use_new_zipfile_serialization=is_archive)
        return tmp_path / name

    return write


def test_tensors_are_those_that_torch_reads(saved: Any) -> None:
    tensors = read_torch_file(saved(state()))
    assert tensors.keys() == state().keys()
    for name, wanted in torch.load(tensors["table"].path, weights_only=True).items():
        assert tensors[name].shape == tuple(wanted.shape)
        array = read_array(tensors[name])
        assert bits(array) == bits(
            wanted.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        )
    assert tensors["tied"].offset == tensors["table"].offset


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "module"])
def test_tensors_of_training_programs(saved: Any, wrapper: str) -> None:
    path = saved({"epoch": 3, wrapper: collections.OrderedDict(a=torch.ones(2))})
    assert list(read_torch_file(path)) == ["a"]


def test_every_cut_is_found(saved: Any) -> None:
    path = saved({"a": torch.ones(300), "b": torch.ones(2)})
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
            read_torch_file(path)


def test_columns_first_are_refused(saved: Any) -> None:
    with pytest.raises(ModelError, match=r"a \[3, 2\] isn't stored row by row"):
        read_torch_file(saved({"a": torch.ones(2, 3).T}))


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def test_what_is_no_tensor_is_not_run(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = saved({"a": torch.ones(2), "b": Harmful()})
    with pytest.raises(ModelError, match=r"it holds posix\.mkdir, which isn't a tensor"):
        read_torch_file(path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "objects",
    [
        b"\x80\x02r\xff\xff\xff\xffK\x01.",
        pickle.dumps({"a": 1}),
        pickle.dumps([1, 2]),
        b"\x80\x02ctorch\nFloatStorage\n)R.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x02K\x03K\x04tR.",
        b"\x80\x02U\x03abcQ.",
        b"no pickle",
    ],
)
def test_objects_made_to_do_harm(tmp_path: Path, objects: bytes) -> None:
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data.pkl", objects)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        read_torch_file(path)


def test_compressed_archives_are_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2)}, buffer)
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(ModelError, match="is compressed"):
        read_torch_file(path)


def as_pickles(source: Path, target: Path, *, num_shards: int = 1) -> Path:
    """The checkpoint with torch's files in the place of safetensors."""
    shutil.copytree(source, target)
    tensors = safetensors_torch.load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    if num_shards == 1:
        torch.save(tensors, target / "pytorch_model.bin")
        return target
    weight_map = {
        name: f"pytorch_model-{i % num_shards + 1:05}-of-{num_shards:05}.bin"
        for i, name in enumerate(tensors)
    }
    for file in set(weight_map.values()):
        own = {name: tensors[name] for name in tensors if weight_map[name] == file}
        torch.save(own, target / file)
    (target / PICKLED_INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return target


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_model_of_them_says_the_same(tmp_path: Path, num_shards: int) -> None:
    source = cached_checkpoint("llama2", dtype="bfloat16")
    pickled = as_pickles(source, tmp_path / "model", num_shards=num_shards)
    said = []
    for model in (source, pickled):
        with Engine(EngineConfig(model=model, num_threads=1), own_loop=True) as engine:
            said.append(engine.complete_sync("a fox", max_new_tokens=8, temperature=0))
    assert said[0].token_ids == said[1].token_ids


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    pickled = as_pickles(cached_checkpoint("llama2"), tmp_path / "model", num_shards=3)
    (pickled / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(ModelError, match=r"lacks 1 of 3 shards: pytorch_model-00002-of-00003\.bin"):
        read_checkpoint(pickled)
