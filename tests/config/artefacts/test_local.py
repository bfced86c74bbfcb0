"""A model directory is checked before anything is loaded from it."""

import json
import os

import pytest

from lmi_core.config.artefacts.cache import download_root
from lmi_core.config.artefacts.fetch import fetch
from lmi_core.config.artefacts.local import check_model
from lmi_core.config.artefacts.model_source import ModelSource
from lmi_core.config.targets.server_config import ServerConfig
from lmi_core.errors import ModelError

SERVER = ServerConfig(values={})


def test_a_whole_model_is_returned_as_it_is(tmp_path, write_model):
    directory = write_model(tmp_path / "m")
    assert fetch(ModelSource("local", str(directory)), SERVER, environ={}) == directory


def test_an_index_lists_the_shards(tmp_path, write_model):
    directory = write_model(tmp_path)
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    with pytest.raises(ModelError, match=r"lacks 1 of 2 shards: b\.safetensors"):
        check_model(directory)


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": {"x": "../a"}}', '{"weight_map": {"x": 1}}']
)
def test_a_broken_index_is_named(tmp_path, write_model, index):
    directory = write_model(tmp_path)
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        check_model(directory)


def test_a_file_that_libraries_would_wait_for(tmp_path, write_model):
    directory = write_model(tmp_path)
    (directory / "notes.txt").symlink_to("nowhere")
    check_model(directory)
    os.mkfifo(directory / "vocab.txt")
    with pytest.raises(ModelError, match=r"vocab\.txt can't be read: it is a FIFO, not a regular"):
        check_model(directory)


def test_every_cut_of_a_weight_file_is_found(tmp_path, write_model):
    path = write_model(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            check_model(tmp_path)
    path.write_bytes(whole + b"x")
    with pytest.raises(ModelError, match="at the end are unused"):
        check_model(tmp_path)


def test_missing_pieces_are_named(tmp_path, write_model):
    with pytest.raises(ModelError, match="does not exist"):
        check_model(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        check_model(tmp_path)
    directory = write_model(tmp_path)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: .*; the file is damaged"):
        check_model(directory)


def test_a_directory_that_may_not_be_read(tmp_path, write_model, monkeypatch):
    directory = write_model(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ModelError, match="can't be read: Permission denied"):
        check_model(directory)


def test_a_model_without_files_is_refused():
    with pytest.raises(ModelError, match="has no files"):
        fetch(ModelSource("none", ""), SERVER, environ={})


def test_downloads_have_a_place(tmp_path):
    server = ServerConfig(values={}, download_dir=tmp_path)
    assert download_root(server, {}) == tmp_path
    assert str(download_root(SERVER, {"DJL_CACHE_DIR": "/c"})) == "/c"
    assert str(download_root(SERVER, {"XDG_CACHE_HOME": "/x"})) == "/x/lmi"
