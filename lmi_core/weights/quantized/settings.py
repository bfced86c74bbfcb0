"""What a model directory says of its checkpoint's quantisation, in any of the files in use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmi_core.errors import ModelError
from lmi_core.regular_file import read_json_object
from lmi_core.weights.hf_config import HfConfig

KEY = "quantization_config"
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Older tools' files, read where config.json says nothing, and the method where they don't name
it."""
_MODELOPT_FILE = "hf_quant_config.json"
_OLD_KEYS = {"w_bit": "bits", "q_group_size": "group_size"}


@dataclass(frozen=True, slots=True)
class QuantizationSettings(HfConfig):
    """The settings of a quantisation, with checked access; ``method`` is "" if it isn't named."""

    prefix: str = ""
    """Of keys, in errors: where in the file they are."""

    def error(self, key: str, problem: str) -> ModelError:
        return HfConfig.error(self, f"{self.prefix}{key}", problem)

    @property
    def method(self) -> str:
        return self.string("quant_method", "")

    @property
    def group_size(self) -> int | None:
        """Inputs per scale; None (written -1): all of them."""
        if self.values.get("group_size") == -1:
            return None
        return self.optional_integer("group_size")


def read_settings(config: HfConfig) -> QuantizationSettings | None:
    """The quantisation that config.json or a file beside it describes; None: there is none.

    Raises ModelError for what isn't an object.
    """
    values = config.values.get(KEY)
    if isinstance(values, dict):
        return QuantizationSettings(config.path, values, prefix=f"{KEY}.")
    if values is not None:
        raise config.error(KEY, f"is {str(values)[:80]}, but must be an object")
    path = config.path.parent / _MODELOPT_FILE
    if path.exists():
        values = read_json_object(path).get("quantization")
        if not isinstance(values, dict):
            raise ModelError(f"{path} has no object quantization", field=_MODELOPT_FILE)
        return QuantizationSettings(
            path, {"quant_method": "modelopt", **values}, prefix="quantization."
        )
    for name, method in _FILES.items():
        path = config.path.parent / name
        if path.exists():
            return QuantizationSettings(path, _in_new_keys(path, method))
    return None


def _in_new_keys(path: Path, method: str) -> dict[str, Any]:
    values = {_OLD_KEYS.get(key, key): value for key, value in read_json_object(path).items()}
    if str(values.get("version")).lower() == "gemm":
        method = "awq"
    return {"quant_method": method} | values
