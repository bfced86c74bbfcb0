"""From a PEFT directory to what an adapter adds to each of the decoder's linears.

Format: ``base_model.model.<module>.lora_A.weight`` [rank, inputs] and ``.lora_B.weight`` [outputs,
rank]; the module's result grows by scale * B A x.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmi_core.adapters.adapter_config import AdapterConfig, read_adapter_config
from lmi_core.errors import ModelError
from lmi_core.models.lora_linears import LoraModule, linear_shapes, lora_modules
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.float_tensors import FLOAT_DTYPES, read_array, to_float32
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.safetensors_file import TensorInfo, read_header
from lmi_core.weights.tensor_faults import tensor_faults
from lmi_core.weights.torch_file import read_torch_file

FILE_NAME = "adapter_model.safetensors"
_PICKLE_NAME = "adapter_model.bin"
_PREFIX = "base_model.model."
_SUFFIXES = {"A": ".lora_A.weight", "B": ".lora_B.weight"}


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """What is added to the outputs from ``first_output`` on of a fused matrix."""

    a: FloatArray
    """[rank, inputs]"""
    b: FloatArray
    """[outputs, rank], times the scale."""
    first_output: int


Adapter = list[list[AdapterPart]]
"""Parts by linear id, see ``linears``."""


def read_adapter(directory: Path, spec: DecoderSpec, *, max_rank: int) -> Adapter:
    """Read and check an adapter for a model; raises ModelError naming every faulty tensor."""
    path, config, pairs = _checked_pairs(directory, spec, max_rank)
    adapter: Adapter = [[] for _ in linear_shapes(spec)]
    problems = _Problems(path)
    for pair in pairs:
        module = pair.module
        a, b = _read(pair.a, problems), _read(pair.b, problems)
        scaled = b * np.float32(config.scale_of(pair.name))
        scaled = scaled if module.rows is None else scaled[module.rows]
        adapter[module.linear_id].append(AdapterPart(a, scaled, module.first_output))
    problems.check()
    return adapter


def check_adapter_fits(directory: Path, spec: DecoderSpec, *, max_rank: int) -> None:
    """Raise ModelError for an adapter that ``read_adapter`` refuses, as far as headers tell."""
    _checked_pairs(directory, spec, max_rank)


def _checked_pairs(
    directory: Path, spec: DecoderSpec, max_rank: int
) -> tuple[Path, AdapterConfig, list[_Pair]]:
    config = read_adapter_config(directory)
    path = _tensors_file(directory)
    read = read_torch_file if path.name == _PICKLE_NAME else read_header
    pairs = _pair(path, read(path), lora_modules(spec))
    _check(path, config, pairs, max_rank)
    return path, config, pairs


def _tensors_file(directory: Path) -> Path:
    path = directory / FILE_NAME
    if path.is_file():
        return path
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if (directory / _PICKLE_NAME).is_file():
        return directory / _PICKLE_NAME
    raise ModelError(f"{directory} has no {FILE_NAME}; fetch it", field=FILE_NAME)


class _Problems:
    """Faults of a file's tensors, raised together."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []

    def add(self, kind: str, tensor: TensorInfo, what: str) -> None:
        self._lines.append(f"{kind}: {tensor.name} {what}")

    def check(self) -> None:
        """Raise ModelError if there are any."""
        if self._lines:
            what = "can't be served"
            raise tensor_faults(self._path, what, self._lines, field=self._path.name)


@dataclass(frozen=True, slots=True)
class _Pair:
    name: str
    """The module's in the file."""
    module: LoraModule
    a: TensorInfo
    b: TensorInfo


def _pair(
    path: Path, tensors: Mapping[str, TensorInfo], modules: Mapping[str, LoraModule]
) -> list[_Pair]:
    """The tensors of every adapted module, in the model's order."""
    problems = _Problems(path)
    found: dict[str, dict[str, TensorInfo]] = {}
    known = {alias: name for name in modules for alias in _aliases(name)}
    for name, tensor in tensors.items():
        module, matrix = _split(name)
        if matrix and module in known:
            found.setdefault(module, {})[matrix] = tensor
        else:
            problems.add("unexpected", tensor, _why_unexpected(module, matrix))
    for module, pair in found.items():
        for matrix, suffix in _SUFFIXES.items():
            if matrix not in pair:
                (other,) = pair.values()
                problems.add("incomplete", other, f"has no {_PREFIX}{module}{suffix} beside it")
    problems.check()
    if not found:
        raise ModelError(f"{path} holds no tensors", field=path.name)
    pairs = {
        known[name]: _Pair(name, modules[known[name]], pair["A"], pair["B"])
        for name, pair in found.items()
    }
    if len(pairs) < len(found):
        raise ModelError(f"{path} names a module twice", field=path.name)
    return [pairs[name] for name in modules if name in pairs]


def _aliases(module: str) -> tuple[str, ...]:
    """What a module is called in the files of adapters, which were trained on the model, on the
    multimodal one that it is a part of, or on the model without its head."""
    prefix, _, rest = module.partition(".")
    part = "language_model"
    return module, f"{prefix}.{part}.{rest}", f"{part}.{module}", rest


def _split(name: str) -> tuple[str, str]:
    """A tensor's module, and whether it is its A or B; "" if neither."""
    module = name.removeprefix(_PREFIX)
    for matrix, suffix in _SUFFIXES.items():
        if module != name and module.endswith(suffix):
            return module.removesuffix(suffix), matrix
    return module, ""


def _why_unexpected(module: str, matrix: str) -> str:
    if "lora_magnitude_vector" in module:
        return "is of DoRA, which isn't served"
    if any(part in module for part in ("lm_head", "embed_tokens", "lora_embedding")):
        return "is of the embedding or the output head, whose adapters aren't served"
    if ".experts" in module:
        return f"is of {module}: adapters of a mixture's experts aren't served"
    if matrix:
        return f"is of {module}, which the model hasn't, or which takes no adapter"
    return "is neither A nor B of a module: only LoRA's own tensors are served"


def _check(path: Path, config: AdapterConfig, pairs: list[_Pair], max_rank: int) -> None:
    problems = _Problems(path)
    for pair in pairs:
        rank, shape = config.rank_of(pair.name), pair.module.shape
        for tensor, expected in (
            (pair.a, (rank, shape.num_inputs)),
            (pair.b, (shape.num_outputs, rank)),
        ):
            if tensor.shape != expected:
                problems.add(
                    "wrong shape",
                    tensor,
                    f"is {list(tensor.shape)}, expected {list(expected)} for rank {rank}",
                )
            elif tensor.dtype not in FLOAT_DTYPES:
                problems.add("wrong dtype", tensor, f"is {tensor.dtype}, must be F32, F16 or BF16")
        if rank > max_rank:
            problems.add(
                "rank", pair.a, f"is of rank {rank}; allowed are up to {max_rank} (max_lora_rank)"
            )
    problems.check()


def _read(tensor: TensorInfo, problems: _Problems) -> FloatArray:
    floats = to_float32(read_array(tensor), tensor.dtype)
    if not np.isfinite(floats).all():
        problems.add("damaged", tensor, "holds numbers that aren't finite")
    return floats
