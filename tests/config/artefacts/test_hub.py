"""Hub models: found in a cache laid out as the hub's client does, or downloaded by it."""

import sys

import pytest

from lmi_core.config.artefacts import hub as hub_module
from lmi_core.config.artefacts.fetch import fetch
from lmi_core.config.artefacts.hub import PATTERNS, fetch_from_hub, find_in_cache, hub_cache
from lmi_core.config.artefacts.model_source import ModelSource
from lmi_core.config.resolve import examine, resolve
from lmi_core.config.targets.host import Host
from lmi_core.config.targets.launch import prepare_model
from lmi_core.config.targets.server_config import ServerConfig
from lmi_core.errors import MissingExtraError, ModelError
from tests.checkpoints import cached_checkpoint
from tests.gguf_files import llama_metadata, llama_tensors, write_gguf
from tests.server.configured import server_of

from .fake_hub import FakeHub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def has_address(monkeypatch):
    """Whatever the names of tests' hubs are."""
    monkeypatch.setattr(hub_module, "_is_known", lambda environ: True)


@pytest.fixture
def cache(tmp_path, write_model):
    """A hub cache that holds org/m at one commit: blobs, links to them, and a reference."""
    root = tmp_path / "hub"
    repository = root / "models--org--m"
    blobs = write_model(repository / "blobs")
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for blob in list(blobs.iterdir()):
        (snapshot / blob.name).symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return root


def test_a_snapshot_is_found_by_branch_and_by_commit(cache):
    snapshot = cache / "models--org--m" / "snapshots" / COMMIT
    assert find_in_cache("org/m", None, cache) == snapshot
    assert find_in_cache("org/m", "main", cache) == snapshot
    assert find_in_cache("org/m", COMMIT, cache) == snapshot
    assert find_in_cache("org/m", "other", cache) is None
    assert find_in_cache("org/absent", None, cache) is None


@pytest.mark.parametrize("revision", ["../refs/main", "/etc/hostname", "a/../main", ""])
def test_a_revision_cannot_leave_the_cache(cache, revision):
    found = find_in_cache("org/m", revision, cache)
    assert found is None or (revision == "" and found.name == COMMIT)


def test_a_reference_that_is_no_commit_is_not_followed(cache):
    (cache / "models--org--m" / "refs" / "main").write_text("../../..")
    assert find_in_cache("org/m", None, cache) is None


def test_a_snapshot_with_a_missing_blob_is_not_whole(cache):
    (cache / "models--org--m" / "blobs" / "model.safetensors").unlink()
    assert find_in_cache("org/m", None, cache) is None
    with pytest.raises(ModelError, match="not whole"):
        fetch_from_hub("org/m", None, cache, {}, offline=True)


def test_offline_and_fixed_commits_need_no_client(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    source = ModelSource("hub", "org/m")
    server = server_of("offline=true", f"huggingface_hub_cache={cache}")
    assert fetch(source, server, environ={}).name == COMMIT
    assert fetch_from_hub("org/m", COMMIT, cache, {}).name == COMMIT
    assert fetch_from_hub("org/m", None, cache, {}).name == COMMIT
    with pytest.raises(MissingExtraError, match=r"lmi-core\[hub\]"):
        fetch_from_hub("org/absent", None, cache, {})


def test_an_explanation_reads_what_is_in_the_cache(cache):
    report = examine(["org/m"], {"HF_HUB_CACHE": str(cache)}, Host())
    assert report.models[0].files.architecture == "LlamaForCausalLM"
    (cache / "models--org--m" / "blobs" / "config.json").write_text('{"architectures": ["X"]}')
    report = examine(["org/m"], {"HF_HUB_CACHE": str(cache)}, Host())
    assert "no description of X" in str(report.errors[0])


def test_the_cache_is_where_the_hubs_client_keeps_it():
    assert str(hub_cache({"HF_HOME": "/h"})) == "/h/hub"
    assert str(hub_cache({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"})) == "/c"
    assert str(hub_cache({"XDG_CACHE_HOME": "/x"})) == "/x/huggingface/hub"


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def no_entry(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    with pytest.raises(OSError, match="Not a directory"):
        hub_cache({}).mkdir(parents=True)
    assert examine(["org/m"], {}, Host()).models[0].source.kind == "hub"


def test_revision_token_and_endpoint_reach_the_client(cache, monkeypatch):
    calls = []

    def snapshot_download(model_id, **arguments):
        calls.append((model_id, arguments))
        return str(cache / "models--org--m" / "snapshots" / COMMIT)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    environ = {"HF_TOKEN": "t", "HF_ENDPOINT": "http://h"}
    deployment = resolve(
        ("org/m", "-o", "revision=v2", "--huggingface-hub-cache", str(cache)), environ, Host()
    )
    fetch(deployment.models[0].source, deployment.server, environ=environ)
    ((model_id, arguments),) = calls
    assert model_id == "org/m"
    assert arguments["revision"] == "v2"
    assert arguments["token"] == "t"
    assert arguments["endpoint"] == "http://h"
    assert arguments["cache_dir"] == cache
    assert "*.py" not in PATTERNS
    assert arguments["allow_patterns"] == list(PATTERNS)


@pytest.mark.parametrize("name", ["HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_a_token_may_have_the_names_that_launchers_know(cache, monkeypatch, name):
    tokens = []

    def download(model_id, *, token, **arguments):
        tokens.append(token)
        return cache / "models--org--m" / "snapshots" / COMMIT

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    fetch_from_hub("org/m", None, cache, {name: "t"})
    fetch_from_hub("org/m", None, cache, {name: "t", "HF_TOKEN": "stronger"})
    assert tokens == ["t", "stronger"]


def test_a_hub_without_an_address_is_not_asked_again_and_again(cache, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.snapshot_download", pytest.fail)
    environ = {"HF_ENDPOINT": "http://hub.invalid"}
    with pytest.raises(ModelError, match="neither in the cache nor a directory here"):
        fetch_from_hub("org/absent", None, cache, environ)
    assert fetch_from_hub("org/m", None, cache, environ).name == COMMIT
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"http": "http://proxy"})
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: str(cache))
    assert fetch_from_hub("org/absent", None, cache, environ) == cache


def test_an_unreachable_hub_is_an_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    environ = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    with pytest.raises(ModelError, match="hub can't be reached, and model org/absent"):
        fetch_from_hub("org/absent", None, tmp_path, environ)


@pytest.fixture
def hub(tmp_path, write_model):
    """A hub over HTTP that has org/m, with Python code and pickled weights beside the model."""
    directory = write_model(tmp_path / "published")
    (directory / "modeling.py").write_text("raise SystemExit")
    (directory / "pytorch_model.bin").write_bytes(b"pickle")
    hub = FakeHub(directory, COMMIT)
    with hub.running() as address:
        yield hub, {"HF_ENDPOINT": address}


def test_a_model_is_downloaded_once_without_its_code(hub, tmp_path):
    server, environ = hub
    source = ModelSource("hub", "org/m")
    config = server_of(f"huggingface_hub_cache={tmp_path}/cache")
    directory = fetch(source, config, environ=environ)
    assert directory.name == COMMIT
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert len(server.downloads) == 3
    assert fetch(source, config, environ=environ) == directory
    assert len(server.downloads) == 3
    offline = ServerConfig(values={}, hub_cache=tmp_path / "cache", offline=True)
    assert fetch(source, offline, environ={}) == directory


def test_pickled_weights_are_fetched_where_there_are_no_others(hub, tmp_path):
    server, environ = hub
    (server.directory / "model.safetensors").unlink()
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.ones(2)}, server.directory / "pytorch_model.bin")
    torch.save({}, server.directory / "optimizer.bin")
    config = ServerConfig(values={}, hub_cache=tmp_path / "cache")
    directory = fetch(ModelSource("hub", "org/m"), config, environ=environ)
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json",
        "pytorch_model.bin",
        "tokenizer.json",
    ]


def test_an_interrupted_download_is_continued(hub, tmp_path):
    """What arrived whole is kept, by its version; what didn't is fetched again."""
    server, environ = hub
    config = ServerConfig(values={}, hub_cache=tmp_path / "cache")
    directory = fetch(ModelSource("hub", "org/m"), config, environ=environ)
    weights = directory / "model.safetensors"
    weights.resolve().unlink()
    weights.unlink()
    assert fetch(ModelSource("hub", "org/m"), config, environ=environ) == directory
    assert [name for name, _ in server.downloads].count("model.safetensors") == 2
    assert len(server.downloads) == 4


@pytest.mark.parametrize(
    ("refusal", "revision", "message"),
    [
        ((401, "GatedRepo"), None, "is gated"),
        ((404, "RepoNotFound"), None, "doesn't exist on the hub"),
        ((404, "RevisionNotFound"), "v9", "has no revision v9"),
    ],
)
def test_the_hubs_refusal_is_explained(hub, tmp_path, refusal, revision, message):
    server, environ = hub
    server.refuse = refusal
    with pytest.raises(ModelError, match=message):
        fetch_from_hub("org/m", revision, tmp_path / "cache", environ)


@pytest.fixture
def gguf_hub(tmp_path, monkeypatch):
    """A repository of two models in GGUF, one of them in two parts."""
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = tmp_path / "files"
    files.mkdir()
    source = cached_checkpoint("llama2")
    tensors, metadata = llama_tensors(source, "Q8_0"), llama_metadata(source)
    write_gguf(files / "m-q8_0.gguf", metadata, tensors)
    for number in range(2):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": len(tensors)}
        part = {name: tensors[name] for name in [*tensors][number::2]}
        write_gguf(files / f"m-F16-0000{number + 1}-of-00002.gguf", metadata | split, part)
    return FakeHub(files, COMMIT)


@pytest.mark.parametrize(
    ("file", "count"),
    [("Q8_0", 1), ("m-q8_0.gguf", 1), ("f16", 2), ("m-F16-00001-of-00002.gguf", 2)],
)
def test_one_gguf_file_of_a_repository_is_fetched(gguf_hub, tmp_path, file, count):
    cache = tmp_path / "hub"
    with gguf_hub.running() as url:
        environ = {"HF_ENDPOINT": url, "HF_HUB_CACHE": str(cache)}
        deployment = resolve((f"org/m:{file}",), environ, Host())
        (model,) = deployment.models
        assert model.source == ModelSource("hub", "org/m", None, file)
        launch = prepare_model(model, deployment.server, environ=environ)
    assert launch.model.backend == "lmi"
    assert len({name for name, _ in gguf_hub.downloads}) == count
    assert len(list(launch.engine.model.glob("*.gguf"))) == count
    offline = resolve((f"org/m:{file}", "-o", "offline=true"), environ, Host())
    assert offline.models[0].files.architecture == "LlamaForCausalLM"


def test_a_repository_without_such_a_file_says_what_it_has(gguf_hub, tmp_path):
    source = ModelSource("hub", "org/m", None, "q5")
    server = server_of(f"huggingface_hub_cache={tmp_path}")
    with gguf_hub.running() as url, pytest.raises(ModelError, match="0 GGUF files named 'q5'"):
        fetch(source, server, environ={"HF_ENDPOINT": url})
