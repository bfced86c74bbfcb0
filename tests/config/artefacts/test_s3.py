"""Models under an S3 prefix, against a real server of the S3 protocol."""

import io
import json
import os
import socket
import stat
import subprocess
import sys
import time
from contextlib import contextmanager

import boto3
import pytest

from lmi_core.config.artefacts.cache import cached_directory
from lmi_core.config.artefacts.fetch import fetch, fetch_config
from lmi_core.config.artefacts.model_source import ModelSource
from lmi_core.config.artefacts.progress import Progress
from lmi_core.config.artefacts.s3 import MANIFEST, fetch_from_s3
from lmi_core.config.artefacts.s3_url import split_url
from lmi_core.config.targets.server_config import ServerConfig
from lmi_core.errors import MissingExtraError, ModelError
from tests.ports import reserved_port
from tests.server.configured import server_of

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
NO_PATH = {"PATH": ""}


@pytest.fixture(scope="module")
def endpoint():
    """An S3 server in a process of its own."""
    with reserved_port() as port, serving(port):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def serving(port):
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1"]
    server = subprocess.Popen(
        [*command, "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **CREDENTIALS},
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    yield
    server.terminate()
    server.wait()


@pytest.fixture
def bucket(endpoint, monkeypatch, tmp_path, write_model):
    """A bucket with a small model under ``models/m``; the client finds it by the environment."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    client = boto3.client("s3")
    name = f"bucket-{tmp_path.name}".replace("_", "-").lower()[:60].rstrip("-")
    client.create_bucket(Bucket=name)
    directory = write_model(tmp_path / "source", num_bytes=200)
    for path in directory.iterdir():
        client.upload_file(str(path), name, f"models/m/{path.name}")
    client.put_object(Bucket=name, Key="models/m/sub/extra.json", Body=b"{}")
    client.put_object(Bucket=name, Key="models/m/sub/", Body=b"")
    client.put_object(Bucket=name, Key="models/mother/config.json", Body=b"{}")
    yield client, name
    client.close()


def quiet():
    return Progress("test", io.StringIO())


def test_a_prefix_is_downloaded_checked_and_reused(bucket, tmp_path, monkeypatch):
    _, name = bucket
    out = io.StringIO()
    server = server_of(f"download_dir={tmp_path}/cache")
    source = ModelSource("s3", f"s3://{name}/models/m")
    directory = fetch(source, server, environ=NO_PATH, progress=Progress("m", out))
    assert {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "sub/extra.json",
        MANIFEST,
    }
    assert (directory / "model.safetensors").read_bytes() == (
        tmp_path / "source" / "model.safetensors"
    ).read_bytes()
    assert "MiB to fetch" in out.getvalue()
    assert "complete" in out.getvalue()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert fetch(source, server, environ=NO_PATH) == directory


def test_an_interrupted_download_is_continued(bucket, tmp_path, monkeypatch):
    client, name = bucket
    url, root = f"s3://{name}/models/m", tmp_path / "cache"
    directory = fetch_from_s3(url, root, NO_PATH, quiet())
    whole = (directory / "model.safetensors").read_bytes()
    partial = directory.with_name(directory.name + ".partial")
    directory.rename(partial)
    etag = client.head_object(Bucket=name, Key="models/m/model.safetensors")["ETag"].strip('"')
    (partial / "model.safetensors").unlink()
    (partial / f"model.safetensors.{etag[:16]}.part").write_bytes(whole[:100])
    asked = []
    monkeypatch.setattr("boto3.client", lambda _: client)
    client.meta.events.register(
        "provide-client-params.s3.GetObject",
        lambda params, **_: asked.append((params["Key"], params.get("Range"))),
    )
    assert fetch_from_s3(url, root, NO_PATH, quiet()) == directory
    assert asked == [("models/m/model.safetensors", "bytes=100-")]
    assert (directory / "model.safetensors").read_bytes() == whole


def test_a_part_that_went_bad_is_found_and_dropped(bucket, tmp_path):
    client, name = bucket
    url, root = f"s3://{name}/models/m", tmp_path / "cache"
    directory = fetch_from_s3(url, root, NO_PATH, quiet())
    partial = directory.with_name(directory.name + ".partial")
    directory.rename(partial)
    etag = client.head_object(Bucket=name, Key="models/m/model.safetensors")["ETag"].strip('"')
    (partial / "model.safetensors").unlink()
    (partial / f"model.safetensors.{etag[:16]}.part").write_bytes(b"x" * 100)
    with pytest.raises(ModelError, match="arrived broken"):
        fetch_from_s3(url, root, NO_PATH, quiet())
    assert fetch_from_s3(url, root, NO_PATH, quiet()) == directory


def test_a_lost_file_is_fetched_again(bucket, tmp_path):
    _, name = bucket
    url, root = f"s3://{name}/models/m/", tmp_path / "cache"
    directory = fetch_from_s3(url, root, NO_PATH, quiet())
    (directory / "config.json").unlink()
    assert (fetch_from_s3(url, root, NO_PATH, quiet()) / "config.json").is_file()


@pytest.mark.parametrize("name", ["", "absent-bucket-of-nobody"])
def test_what_is_not_there_is_named(bucket, tmp_path, name):
    url = f"s3://{name or bucket[1]}/absent"
    with pytest.raises(ModelError, match=f"{url}"):
        fetch_from_s3(url, tmp_path / "cache", NO_PATH, quiet())


def test_an_object_cannot_leave_the_directory(bucket, tmp_path):
    client, name = bucket
    client.put_object(Bucket=name, Key="evil/../../x", Body=b"x")
    with pytest.raises(ModelError, match="would leave"):
        fetch_from_s3(f"s3://{name}/evil", tmp_path / "cache", NO_PATH, quiet())


def test_offline_downloads_nothing(tmp_path):
    with pytest.raises(ModelError, match="offline"):
        fetch_from_s3("s3://b/m", tmp_path, NO_PATH, offline=True)


def test_without_a_client_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(MissingExtraError, match=r"lmi-core\[hub\]"):
        fetch_from_s3("s3://b/m", tmp_path, NO_PATH, quiet())


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://b/p/q", ("b", "p/q/")),
        ("s3://b/p/", ("b", "p/")),
        ("s3://b/p/*", ("b", "p/")),
        ("s3://b", ("b", "")),
    ],
)
def test_urls(url, expected):
    assert split_url(url) == expected


@pytest.mark.parametrize("url", ["s3://", "s3:///p", "http://b/p"])
def test_impossible_urls(url):
    with pytest.raises(ModelError, match="is not s3"):
        split_url(url)


@pytest.fixture
def s5cmd(tmp_path):
    """A stand-in for s5cmd on the path: it notes its arguments and copies a local directory."""
    tool = tmp_path / "bin" / "s5cmd"
    tool.parent.mkdir()
    tool.write_text(
        f"#!{sys.executable}\n"
        "import json, os, shutil, sys\n"
        "json.dump(sys.argv[1:], open(os.environ['S5CMD_LOG'], 'w'))\n"
        "if 'S5CMD_FAIL' in os.environ:\n"
        "    sys.exit(os.environ['S5CMD_FAIL'])\n"
        "shutil.copytree(os.environ['S5CMD_SOURCE'], sys.argv[-1], dirs_exist_ok=True)\n"
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return {"PATH": str(tool.parent), "S5CMD_LOG": str(tmp_path / "log")}


def test_s5cmd_on_the_path_does_the_copying(s5cmd, tmp_path, write_model):
    environ = {**s5cmd, "S5CMD_SOURCE": str(write_model(tmp_path / "source"))}
    directory = fetch_from_s3("s3://b/m", tmp_path / "cache", environ, quiet())
    arguments = json.loads((tmp_path / "log").read_text())
    assert arguments[:4] == ["--retry-count", "3", "sync", "s3://b/m/*"]
    assert (directory / "config.json").is_file()
    (tmp_path / "log").unlink()
    assert fetch_from_s3("s3://b/m", tmp_path / "cache", environ, quiet()) == directory
    assert not (tmp_path / "log").exists()


def test_what_s5cmd_says_is_passed_on(s5cmd, tmp_path):
    environ = {**s5cmd, "S5CMD_FAIL": "ERROR no such bucket"}
    with pytest.raises(ModelError, match="s5cmd can't fetch s3://b/m: ERROR no such bucket"):
        fetch_from_s3("s3://b/m", tmp_path / "cache", environ, quiet())


def test_config_json_comes_before_the_rest(bucket, tmp_path):
    _, name = bucket
    root = tmp_path / "cache"
    server = ServerConfig(values={}, download_dir=root)
    source = ModelSource("s3", f"s3://{name}/models/m")
    absent = ModelSource("s3", f"s3://{name}/models/absent")
    for each in (source, absent):
        fetch_config(each, server, NO_PATH)
    assert [path.name for path in root.rglob("*") if path.is_file()] == ["config.json"]
    directory = cached_directory(source, server, NO_PATH)
    assert (directory / "config.json").is_file()
    assert cached_directory(ModelSource("s3", f"s3://{name}/models"), server, NO_PATH) is None
    assert cached_directory(source, server, NO_PATH) != fetch(source, server, environ=NO_PATH)
