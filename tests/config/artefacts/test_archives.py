"""Models in archives: fetched from a server of the test, unpacked once, remembered."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi_core.config.artefacts.archives import Archives
from lmi_core.config.artefacts.lock import locked
from lmi_core.config.artefacts.unpack import Limits
from lmi_core.config.resolve import examine, resolve
from lmi_core.errors import ConfigError, ModelError
from tests.config.artefacts.test_unpack import tar_of, zip_of
from tests.config.artefacts.web import Web, serving_files
from tests.config.cases import CPU, LLAMA, NO_CACHE

FILES = {"config.json": json.dumps(LLAMA).encode(), "serving.properties": b"job_queue_size=9\n"}


@pytest.fixture
def web() -> Iterator[Web]:
    with serving_files() as given:
        yield given


def packed(directory: Path, files: dict[str, bytes], name: str = "m.tar.gz") -> bytes:
    path = directory / f"made-{name}"
    if name.endswith(".tar"):
        return tar_of(path, files, "w").read_bytes()
    return (zip_of if name.endswith("zip") else tar_of)(path, files).read_bytes()


def archives(root: Path, web: Web, **fields: object) -> Archives:
    return Archives(root / "cache", rf"{web.url}/.*", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["m.zip", "m.tar.gz"])
@pytest.mark.parametrize("prefix", ["", "model/"])
def test_fetched_and_unpacked(tmp_path: Path, web: Web, name: str, prefix: str) -> None:
    files = {prefix + file: content for file, content in FILES.items()}
    web.files[f"/{name}"] = packed(tmp_path, files, name)
    directory = archives(tmp_path, web).directory(f"{web.url}/{name}?token=1")
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == FILES
    assert directory.name == ("model" if prefix else directory.name)
    # Nothing of the download is left beside the memory of it and the locks.
    kept = {path.suffix for path in (tmp_path / "cache" / "archive").iterdir()}
    assert kept == {"", ".json", ".lock"}


def test_fetched_again_only_when_it_changed(tmp_path: Path, web: Web) -> None:
    url = f"{web.url}/m.zip"
    web.files["/m.zip"] = packed(tmp_path, FILES, "m.zip")
    web.headers["/m.zip"] = {"ETag": '"1"'}
    having = archives(tmp_path, web)
    first = having.directory(url)
    assert having.directory(url) == first
    assert [status for _, status in web.asked] == [200, 304]
    # The same content under another name is the same directory.
    web.files["/other.zip"] = web.files["/m.zip"]
    assert having.directory(f"{web.url}/other.zip") == first
    web.files["/m.zip"] = packed(tmp_path, {**FILES, "new": b"1"}, "m.zip")
    web.headers["/m.zip"] = {"ETag": '"2"'}
    second = having.directory(url)
    assert (second / "new").exists()
    assert not (first / "new").exists()


def test_without_the_network(tmp_path: Path, web: Web) -> None:
    url = f"{web.url}/m.zip"
    web.files["/m.zip"] = packed(tmp_path, FILES, "m.zip")
    for fields, words in (({"offline": True}, "offline mode"), ({"fetches": False}, "lmi serve")):
        with pytest.raises(ModelError, match=words):
            archives(tmp_path, web, **fields).directory(url)
    assert not web.asked
    directory = archives(tmp_path, web).directory(url)
    assert len(web.asked) == 1
    for fields in ({"offline": True}, {"fetches": False}):
        assert archives(tmp_path, web, **fields).directory(url) == directory
    assert len(web.asked) == 1


def test_only_what_the_pattern_allows(tmp_path: Path, web: Web) -> None:
    web.files["/m.zip"] = packed(tmp_path, FILES, "m.zip")
    for pattern in (None, f"{web.url}/other/.*", f"{web.url}/m"):
        with pytest.raises(ModelError, match="does not match model_url_pattern"):
            Archives(tmp_path / "cache", pattern).directory(f"{web.url}/m.zip")
    assert not web.asked


@pytest.mark.parametrize("target", ["http://127.0.0.1:1/m.zip", "ftp://h/m.zip", "file:///m.zip"])
def test_redirects_elsewhere_are_not_followed(tmp_path: Path, web: Web, target: str) -> None:
    web.statuses["/m.zip"] = 302
    web.headers["/m.zip"] = {"Location": target}
    with pytest.raises(ModelError, match=r"redirects elsewhere: |can't be fetched: HTTP 302"):
        archives(tmp_path, web).directory(f"{web.url}/m.zip")


def test_redirects_to_what_is_allowed(tmp_path: Path, web: Web) -> None:
    web.statuses["/m.zip"] = 302
    web.headers["/m.zip"] = {"Location": "/there"}
    web.files["/there"] = packed(tmp_path, FILES, "m.zip")
    assert (archives(tmp_path, web).directory(f"{web.url}/m.zip") / "config.json").exists()


def test_faults_of_fetching(tmp_path: Path, web: Web) -> None:
    whole = packed(tmp_path, FILES, "m.zip")
    web.files = {"/short.zip": whole, "/long.zip": whole, "/said.zip": whole, "/evil.zip": whole}
    web.files["/evil.zip"] = packed(tmp_path, {"../x": b""}, "m.zip")
    web.headers["/short.zip"] = {"Content-Length": str(len(whole) + 5)}
    web.headers["/said.zip"] = {"Content-Length": str(1 << 62)}
    web.statuses["/gone.zip"] = 410
    small = Limits(max_archive_bytes=100)
    for path, limits, words in (
        ("/none.zip", Limits(), "can't be fetched: HTTP 404"),
        ("/gone.zip", Limits(), "can't be fetched: HTTP 410"),
        ("/short.zip", Limits(), rf"ended after {len(whole)} of {len(whole) + 5} bytes"),
        ("/long.zip", small, "is longer than 100 bytes"),
        ("/said.zip", Limits(), "is longer than "),
        ("/evil.zip", Limits(), "would leave the model's directory"),
        ("/m.html", Limits(), "is not an archive"),
    ):
        with pytest.raises(ModelError, match=words):
            archives(tmp_path, web, limits=limits).directory(web.url + path)
    with pytest.raises(ModelError, match=r"can't be fetched: .*refused"):
        Archives(tmp_path / "cache", ".*").directory("http://127.0.0.1:1/m.zip")
    # What failed leaves nothing that a later start would take for a model.
    assert {path.suffix for path in (tmp_path / "cache" / "archive").iterdir()} == {".lock"}


def left(root: Path) -> set[str]:
    return {path.suffix for path in (root / "cache" / "archive").iterdir()}


def test_what_is_announced_must_fit_before_anything_is_written(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(range(256)) * 400
    web.files["/m.zip"] = packed(tmp_path, {"a": content}, "m.zip")
    web.files["/m.tar"] = packed(tmp_path, {"a": content}, "m.tar")

    def refuse(*given: object) -> None:
        raise AssertionError("unpacked although it doesn't fit")

    limits = Limits(max_unpacked_bytes=1000)
    with monkeypatch.context() as patched:
        patched.setattr("lmi_core.config.artefacts.archives.unpack", refuse)
        with pytest.raises(ModelError, match=r"holds 102400 bytes at least, .* room for 1000:"):
            archives(tmp_path, web, limits=limits).directory(f"{web.url}/m.zip")
    small, large = (1_000_000, 100_500), (1 << 40, (1 << 30) + 500)
    for total, free in (small, large):
        usage = shutil.disk_usage(tmp_path)._replace(total=total, free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda place, usage=usage: usage)
        with pytest.raises(ModelError, match=r"longer than 250 bytes, .* half of the room on"):
            archives(tmp_path, web).directory(f"{web.url}/m.tar")
    assert left(tmp_path) == {".lock"}


def test_content_much_longer_than_its_archive_is_no_model(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmi_core.config.artefacts.archives._ALWAYS_ALLOWED_BYTES", 1 << 10)
    web.files["/m.tar.gz"] = packed(tmp_path, {"a": bytes(1 << 20)})
    with pytest.raises(ModelError, match="50 times the archive's length"):
        archives(tmp_path, web).directory(f"{web.url}/m.tar.gz")
    assert left(tmp_path) == {".lock"}


def test_what_a_killed_server_has_left_is_removed(tmp_path: Path, web: Web) -> None:
    web.files["/m.zip"] = packed(tmp_path, FILES, "m.zip")
    place = tmp_path / "cache" / "archive"
    (place / "aa.partial" / "sub").mkdir(parents=True)
    (place / "bb.json.fetched").write_bytes(b"half")
    (place / "cc.partial").mkdir()
    with locked(place / "cc"):
        archives(tmp_path, web).directory(f"{web.url}/m.zip")
    assert {path.name for path in place.iterdir() if path.suffix in (".partial", ".fetched")} == {
        "cc.partial"
    }


def test_the_limit_is_the_configurations(tmp_path: Path, web: Web) -> None:
    web.files["/m.zip"] = packed(tmp_path, FILES, "m.zip")
    variables = environ(tmp_path, web, f"{web.url}/m.zip")
    with pytest.raises(ConfigError, match="longer than 100 bytes, which is max_archive_size"):
        resolve([], {**variables, "SERVING_MAX_ARCHIVE_SIZE": "100"}, CPU)
    assert resolve([], {**variables, "SERVING_MAX_ARCHIVE_SIZE": "100000"}, CPU).models


def environ(root: Path, web: Web, text: str) -> dict[str, str]:
    return {
        **NO_CACHE,
        "SERVING_LOAD_MODELS": text,
        "SERVING_MODEL_URL_PATTERN": f"{web.url}/.*",
        "SERVING_DOWNLOAD_DIR": str(root / "cache"),
    }


def test_load_models_names_an_archive(tmp_path: Path, web: Web) -> None:
    web.files["/a-b.tar.gz"] = packed(tmp_path, FILES)
    variables = environ(tmp_path, web, f"{web.url}/a-b.tar.gz,own:v1={web.url}/a-b.tar.gz")
    report = examine([], variables, CPU)
    assert "lmi serve fetches it" in str(report.errors[0])
    assert not web.asked
    first, second = resolve([], variables, CPU).models
    assert (first.name, second.name, second.version) == ("a_b", "own", "v1")
    assert first.archive_url == f"{web.url}/a-b.tar.gz"
    assert first.get("job_queue_size") == 9
    assert first.backend == "lmi"
    assert not examine([], variables, CPU).errors


@pytest.mark.parametrize("code", ["model.py", "trust_remote_code"])
def test_downloaded_code_needs_leave(tmp_path: Path, web: Web, code: str) -> None:
    extra = {"model.py": b"def handle(inputs): ...\n"}
    if code != "model.py":
        extra = {"serving.properties": b"option.trust_remote_code=true\n"}
    web.files["/m.zip"] = packed(tmp_path, {**FILES, **extra}, "m.zip")
    variables = environ(tmp_path, web, f"m={web.url}/m.zip")
    with pytest.raises(ConfigError, match=rf"downloaded with code .*{code}.*--allow-custom-code"):
        resolve([], variables, CPU)
    variables["SERVING_ALLOW_CUSTOM_CODE"] = "true"
    assert resolve([], variables, CPU).models[0].name == "m"


def test_archives_of_the_model_store(tmp_path: Path, web: Web) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "one.zip").write_bytes(packed(tmp_path, FILES, "m.zip"))
    (store / "two.tar.gz").write_bytes(packed(tmp_path, {**FILES, "x": b""}))
    variables = environ(tmp_path, web, "ALL")
    variables["SERVING_MODEL_STORE"] = str(store)
    assert "not unpacked yet" in str(examine([], variables, CPU).errors[0])
    models = resolve([], variables, CPU).models
    assert [(model.name, model.get("job_queue_size")) for model in models] == [
        ("one", 9),
        ("two", 9),
    ]
    assert not examine([], variables, CPU).errors
