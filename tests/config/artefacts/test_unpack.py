"""Archives that are what they seem, and those that aren't."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from lmi_core.config.artefacts.unpack import Limits, unpack
from lmi_core.errors import ModelError

FILES = {"config.json": b"{}", "sub/a.bin": bytes(range(256)) * 20, "./b": b""}
LIMITS = Limits()


def tar_of(path: Path, files: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            add(tar, name, content)
    return path


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", **fields: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(content))


def zip_of(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, content in files.items():
            zipped.writestr(name, content)
    return path


def unpacked(archive: Path, target: Path, limits: Limits = LIMITS) -> dict[str, bytes]:
    target.mkdir()
    unpack(archive, archive.name, target, limits)
    files = (path for path in target.rglob("*") if path.is_file())
    return {str(path.relative_to(target)): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", ["m.tar.gz", "m.TGZ", "m.tar.Z", "m.tar", "m.zip", "m.jar"])
def test_what_was_packed_comes_out(tmp_path: Path, name: str) -> None:
    archive = tmp_path / name
    if name.lower().endswith(("zip", "jar")):
        zip_of(archive, {**FILES, "empty/": b""})
    else:
        with tarfile.open(archive, "w" if name == "m.tar" else "w:gz") as tar:
            add(tar, "empty", type=tarfile.DIRTYPE)
            for file, content in FILES.items():
                add(tar, file, content, mode=0o7777)
    expected = {str(Path(file)): content for file, content in FILES.items()}
    assert unpacked(archive, tmp_path / "out") == expected
    assert (tmp_path / "out" / "empty").is_dir()
    # An archive's modes are not taken over.
    assert not (tmp_path / "out" / "b").stat().st_mode & (stat.S_ISUID | stat.S_IXUSR)


def test_what_compress_packed_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "m.tar.Z"
    archive.write_bytes(b"\x1f\x9d\x90" + bytes(100))
    with pytest.raises(ModelError, match=r"packed by compress\(1\); pack it by gzip"):
        unpacked(archive, tmp_path / "out")


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "a\\..\\x", "..", "/"])
@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_names_that_leave_the_directory(tmp_path: Path, name: str, kind: str) -> None:
    make = zip_of if kind == "zip" else tar_of
    archive = make(tmp_path / f"m.{kind}", {"good": b"1", name + ("x" if name == "/" else ""): b""})
    with pytest.raises(ModelError, match="which would leave the model's directory"):
        unpacked(archive, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {archive.name, "out"}


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (tarfile.SYMTYPE, "link"),
        (tarfile.LNKTYPE, "link"),
        (tarfile.FIFOTYPE, "device"),
        (tarfile.CHRTYPE, "device"),
    ],
)
def test_what_is_no_file_is_refused(tmp_path: Path, kind: bytes, word: str) -> None:
    archive = tmp_path / "m.tar"
    with tarfile.open(archive, "w") as tar:
        add(tar, "odd", type=kind, linkname="/etc/passwd")
        add(tar, "odd/below", b"1")
    with pytest.raises(ModelError, match=f"holds 'odd', which is a {word}"):
        unpacked(archive, tmp_path / "out")


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "m.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        info = zipfile.ZipInfo("odd")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        zipped.writestr(info, "/etc")
    with pytest.raises(ModelError, match="holds 'odd', which is a link"):
        unpacked(archive, tmp_path / "out")


@pytest.mark.parametrize("make", [tar_of, zip_of])
def test_limits(tmp_path: Path, make: object) -> None:
    suffix = "zip" if make is zip_of else "tar.gz"
    archive = make(tmp_path / f"m.{suffix}", {"a": b"x" * 600, "b": b"y" * 600})  # type: ignore[operator]
    with pytest.raises(ModelError, match="more than 1000 bytes"):
        unpacked(archive, tmp_path / "bytes", Limits(max_unpacked_bytes=1000))
    with pytest.raises(ModelError, match="more than 1 files"):
        unpacked(archive, tmp_path / "files", Limits(max_files=1))
    assert unpacked(archive, tmp_path / "fits", Limits(max_unpacked_bytes=1200, max_files=2))


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_name_given_twice(tmp_path: Path, kind: str) -> None:
    archive = tmp_path / f"m.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as zipped:
            zipped.writestr("a", b"1")
            zipped.writestr("a", b"2")
    else:
        with tarfile.open(archive, "w") as tar:
            add(tar, "a", b"1")
            add(tar, "./a", b"2")
    with pytest.raises(ModelError, match="holds 'a' twice"):
        unpacked(archive, tmp_path / "out")


@pytest.mark.parametrize("name", ["m.zip", "m.tar.gz", "m.tar"])
def test_broken_archives(tmp_path: Path, name: str) -> None:
    whole = tmp_path / f"whole-{name}"
    (zip_of if name == "m.zip" else tar_of)(whole, {"a": bytes(range(256)) * 400})
    for number, data in enumerate((b"", b"no archive", whole.read_bytes()[:-200])):
        archive = tmp_path / name
        archive.write_bytes(data)
        with pytest.raises(ModelError, match="can't be unpacked"):
            unpacked(archive, tmp_path / f"out{number}")
