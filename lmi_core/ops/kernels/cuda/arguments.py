"""The C interface of csrc/cuda as its headers have it: structs for ctypes, functions, numbers.

The library has its headers' text with it, so what it takes and what Python gives can't differ.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any

_NUMBERS: dict[str, type[Any]] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
}
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_STRUCT = re.compile(r"typedef struct \{(.*?)\} (\w+);", re.DOTALL)
_KERNEL = re.compile(r"int32_t lmi_cuda_(\w+)\((?:const )?(Lmi\w+)\* \w+, void\* stream\);")
_NUMBER = re.compile(r"(?:#define |\b)(LMI_\w+) (?:= )?(\d+)\b")


@dataclass(frozen=True, slots=True)
class Interface:
    """What headers declare."""

    structs: dict[str, type[ctypes.Structure]]
    """By name, without ``Lmi``."""
    kernels: dict[str, type[ctypes.Structure]]
    """What each function that takes a struct and a stream takes, by name without ``lmi_cuda_``."""
    numbers: dict[str, int]
    """Of enumerations and definitions, by name without ``LMI_``."""


def parse(text: str) -> Interface:
    """Headers in the style of csrc/cuda/lmi_cuda.h. ValueError for a field that isn't."""
    text = _COMMENT.sub("", text)
    structs: dict[str, type[ctypes.Structure]] = {}
    for body, name in _STRUCT.findall(text):
        fields = [_field(field.strip(), structs) for field in body.split(";")[:-1]]
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return Interface(
        structs={name.removeprefix("Lmi"): struct for name, struct in structs.items()},
        kernels={name: structs[struct] for name, struct in _KERNEL.findall(text)},
        numbers={name.removeprefix("LMI_"): int(value) for name, value in _NUMBER.findall(text)},
    )


def _field(declaration: str, structs: dict[str, type[ctypes.Structure]]) -> tuple[str, type[Any]]:
    kind, _, name = declaration.removeprefix("const ").rpartition(" ")
    if "(*" in declaration:
        return declaration.partition("(*")[2].partition(")")[0], ctypes.c_void_p
    if kind == "char*":
        return name, ctypes.c_char_p
    if kind.endswith("*"):
        return name, ctypes.c_void_p
    known = {**_NUMBERS, **structs}
    if kind not in known or not name.isidentifier():
        raise ValueError(
            f"the CUDA headers have a field {declaration!r}; known types are {', '.join(known)}"
        )
    return name, known[kind]
