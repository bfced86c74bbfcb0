"""A model directory: its settings, and its weight files as one table of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from lmi_core.errors import ModelError
from lmi_core.files import read_json_object
from lmi_core.weights.content_digest import FileState
from lmi_core.weights.gguf.names import PATTERN as GGUF_PATTERN
from lmi_core.weights.hf_config import read_hf_config, read_quantization
from lmi_core.weights.safetensors_file import TensorInfo, read_header
from lmi_core.weights.torch_file import read_torch_file

NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
PICKLED_NAME, PICKLED_INDEX_NAME = "pytorch_model.bin", "pytorch_model.bin.index.json"
_CONVERT_PICKLE = (
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('{path}', torch_dtype='auto').save_pretrained('{path}')\""
)


class Checkpoint:
    """A model directory, opened once: whoever needs its settings or headers is given it.

    Raises ModelError for settings that can't be read, and for tensors as ``read_checkpoint`` does
    when they are first asked for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._states: dict[Path, FileState] = {}
        for file in weight_files(path):
            with suppress(OSError):  # reading it says why
                self._states[file] = FileState.of(file)
        self.config = read_hf_config(path)
        gguf = self.config.values.get("gguf")
        settings = gguf if isinstance(gguf, dict) else {}
        self.gguf_architecture = str(settings["architecture"]) if settings else None
        """What a GGUF file calls its architecture; None: the model isn't in one."""
        notes = settings.get("notes")
        self.gguf_notes = tuple(map(str, notes)) if isinstance(notes, list) else ()
        """What its GGUF file doesn't say, or says in vain."""
        self.quantization = read_quantization(self.config)
        """What its files say of how it is quantised; None: it isn't."""

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By the names that the files have."""
        return read_checkpoint(self.path)

    @property
    def files(self) -> tuple[FileState, ...]:
        """Those that hold the tensors, as they were before anything was read."""
        used = {tensor.path for tensor in self.tensors.values()}
        return tuple(state for path, state in self._states.items() if path in used)

    @property
    def stored_bytes(self) -> int:
        """Of these files."""
        return sum(file.num_bytes for file in self.files)


def read_checkpoint(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of a model directory by name.

    That is model.safetensors; without it, the shards that model.safetensors.index.json lists, or
    the only ``*.safetensors`` file there is. Where there is none, it is pytorch_model.bin, or the
    shards of its index, or a GGUF file. A whole file comes before an index, as in Transformers.
    Raises ModelError when there is neither, when a shard is missing or when the index and the
    shards disagree.
    """
    files = sorted(directory.glob("*.safetensors"))
    if (directory / NAME) in files:
        return read_header(directory / NAME)
    if (directory / INDEX_NAME).exists():
        return _read_sharded(directory / INDEX_NAME, "safetensors", read_header)
    if not files and (directory / PICKLED_NAME).exists():
        return read_torch_file(directory / PICKLED_NAME)
    if not files and (directory / PICKLED_INDEX_NAME).exists():
        return _read_sharded(directory / PICKLED_INDEX_NAME, "bin", read_torch_file)
    if not files and any(directory.glob(GGUF_PATTERN)):
        return _read_gguf(directory)
    if not files:
        raise no_safetensors(directory)
    if len(files) > 1:
        raise ModelError(
            f"{directory} holds {len(files)} safetensors files but no {INDEX_NAME} that says which "
            "belong to the model; fetch the index",
            field=INDEX_NAME,
        )
    return read_header(files[0])


def _read_gguf(directory: Path) -> dict[str, TensorInfo]:
    from lmi_core.weights.gguf.file import gguf_of, read_gguf

    file = gguf_of(directory)
    if file is None:
        raise no_safetensors(directory)
    return dict(read_gguf(file).tensors)


def weight_files(directory: Path) -> list[Path]:
    """Those that may hold weights which ``read_checkpoint`` reads: safetensors, else pickled ones,
    else GGUF; empty: there are none."""
    patterns = ("*.safetensors", "pytorch_model*.bin", GGUF_PATTERN)
    return next((found for name in patterns if (found := sorted(directory.glob(name)))), [])


def _read_sharded(
    index: Path, suffix: str, read: Callable[[Path], dict[str, TensorInfo]]
) -> dict[str, TensorInfo]:
    weight_map = _read_weight_map(index, suffix)
    files = sorted(set(weight_map.values()))
    missing = [name for name in files if not (index.parent / name).exists()]
    if missing:
        raise ModelError(
            f"{index.parent} lacks {len(missing)} of {len(files)} shards: {', '.join(missing)}; "
            "fetch them",
            field=index.name,
        )
    shards = {name: read(index.parent / name) for name in files}
    tensors = {name: tensor for shard in shards.values() for name, tensor in shard.items()}
    for name, file_name in weight_map.items():
        if name not in shards[file_name]:
            raise ModelError(
                f"{index} says that {name!r} is in {file_name}, but it isn't", field=index.name
            )
        tensors[name] = shards[file_name][name]
    return tensors


def _read_weight_map(index: Path, suffix: str) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map from tensor to file", field=index.name)
    for file_name in weight_map.values():
        is_name = isinstance(file_name, str) and Path(file_name).name == file_name
        if not is_name or not file_name.endswith(f".{suffix}"):
            raise ModelError(
                f"{index}: {file_name!r} must be the name of a {suffix} file beside it",
                field=index.name,
            )
    return weight_map


def no_safetensors(directory: Path) -> ModelError:
    """The error for a directory without weights that can be read; it says how to convert others."""

    if not directory.is_dir():
        what = "is a file, not a directory" if directory.exists() else "doesn't exist"
        return ModelError(f"the model directory {directory} {what}", field="model")

    def first(pattern: str) -> str | None:
        return next((path.name for path in sorted(directory.glob(pattern))), None)

    if name := first("*.bin") or first("*.pt") or first("*.pth") or first("*.ckpt"):
        hint = f"found {name}, convert it: " + _CONVERT_PICKLE.format(path=directory)
    elif (directory / "serving.properties").is_file():
        hint = "lmi serve reads its serving.properties; here name the directory of the weights"
    else:
        hint = "it needs model.safetensors, or shards with " + INDEX_NAME
    return ModelError(f"{directory} holds no *.safetensors; {hint}", field="model")
