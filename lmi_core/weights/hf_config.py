"""What the settings of a model directory say, in every spelling in use: ``config.json``,
``generation_config.json``, and the files in which tools describe a quantisation."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lmi_core.errors import ModelError, UserError
from lmi_core.files import read_json, read_json_object

_MAX_INTEGER = 2**31 - 1
"""What the native code counts with."""
_SAVED_AS_LLAMA = {"exaone": "ExaoneForCausalLM"}
"""By ``model_type``: what Transformers computes and saves as a Llama, but for tensors' names."""
_MAX_LAYERS = 10_000
"""So that a slip of the keyboard is an error, not a list of names that fills the memory."""
QUANTIZATION_KEY = "quantization_config"
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Older tools' files, read where config.json says nothing, and the method where they don't name
it."""
_MODELOPT_FILE = "hf_quant_config.json"
_OLD_KEYS = {"w_bit": "bits", "q_group_size": "group_size"}

Task = Literal["generate", "embed", "rerank"]
PURPOSES: Mapping[Task, str] = {
    "generate": "text",
    "embed": "embeddings",
    "rerank": "scores of pairs of texts",
}
"""Tasks in words: what is served."""
GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ChatGLMModel")
"""Endings of architectures that do."""
CLASSIFIER = "ForSequenceClassification"


class UnsupportedSettingError(ModelError):
    """A setting that is right, and that our own engine doesn't have."""


@dataclass(frozen=True, slots=True)
class HfConfig:
    """A checkpoint's configuration with checked access; every fault is a ``ModelError``."""

    path: Path
    values: dict[str, Any]
    eos_token_ids: tuple[int, ...] = ()
    """Union of both files' ids, ascending."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """What the family calls a key, where that isn't what most do."""
    overridden: frozenset[str] = frozenset()
    """Keys whose values aren't the file's, but asked for instead."""

    def error(self, key: str, problem: str) -> ModelError:
        name = _gguf_key(self.values, key) or self.keys.get(key, key)
        is_asked = key.partition(".")[0] in self.overridden
        where = f"asked for in place of what {self.path} says" if is_asked else self.path
        return ModelError(f"{where}: {name} {problem}", field=name)

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is, by the family's name of the key or the usual one."""
        return self.values.get(self.keys.get(key, key), self.values.get(key, default))

    @property
    def architecture(self) -> str:
        names = self.values.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise self.error(
                "architectures",
                f'is {names!r}, but must list one class name, e.g. ["LlamaForCausalLM"]',
            )
        if names == ["LlamaForCausalLM"]:
            return _SAVED_AS_LLAMA.get(str(self.values.get("model_type")), names[0])
        return names[0]

    @property
    def num_layers(self) -> int:
        return self.integer("num_hidden_layers", maximum=_MAX_LAYERS)

    def head_dim(self, default: int | None = None) -> int:
        """``head_dim``, or ``default``, or the hidden size divided by the number of heads."""
        value = self.optional_integer("head_dim", default)
        if value is not None:
            return value
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        if hidden % heads != 0:
            raise self.error("head_dim", f"is absent, and {heads} heads don't divide {hidden}")
        return hidden // heads

    def integer(
        self,
        key: str,
        default: int | None = None,
        *,
        minimum: int = 1,
        maximum: int = _MAX_INTEGER,
    ) -> int:
        """An integer within bounds; absent or null: ``default``, if there is one."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, f"is {value!r}, but must be an integer >= {minimum}")
        if value > maximum:
            raise self.error(key, f"is {value}, but must be an integer <= {maximum}")
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """As ``integer``, but null is None; ``default`` stands for an absent key."""
        value = self.get(key, default)
        return None if value is None else self.integer(key, default)

    def number(self, key: str, default: float) -> float:
        return positive_number(self, key, self.get(key, default))

    def require(self, key: str, wanted: object) -> None:
        """Raise unless a setting that changes the model is absent, or as models here have it."""
        value = self.get(key, wanted)
        if value != wanted:
            error = self.error(key, f"is {value!r}; only {wanted!r} is supported")
            raise UnsupportedSettingError(str(error), field=error.field)

    def optional_number(self, key: str, default: float) -> float:
        """As ``number``, but null is 0; so may ``default`` be, which stands for an absent key."""
        value = self.get(key, default or None)
        return 0.0 if value is None else positive_number(self, key, value)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}, but must be true or false")
        return value

    def settings(self, key: str) -> dict[str, Any]:
        """An object; absent or null: without keys."""
        value = self.get(key)
        if not isinstance(value, dict | None):
            raise self.error(key, f"is {str(value)[:80]}, but must be an object")
        return value or {}

    def string(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {value!r}, but must be a string")
        return value


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


def _gguf_key(values: Mapping[str, Any], key: str) -> str | None:
    """What a GGUF file calls a key of the settings that were made of its metadata."""
    gguf = values.get("gguf")
    keys = gguf.get("keys") if isinstance(gguf, dict) else None
    name = keys.get(key) if isinstance(keys, dict) else None
    return name if isinstance(name, str) else None


def positive_number(config: HfConfig, key: str, value: object) -> float:
    """``value`` as a finite float above 0, named ``key`` in the error."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
        raise config.error(key, f"is {value!r}, but must be a number above 0")
    return float(value)  # type: ignore[arg-type]


def read_hf_config(directory: Path) -> HfConfig:
    """Read a model directory's configuration.

    Raises ModelError when the directory or config.json is missing, can't be read or isn't a JSON
    object.
    """
    check_directory(directory)
    path = directory / "config.json"
    values = read_json_object(path)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path)
    eos_ids: set[int] = set()
    for file, settings in ((path, values), (generation_path, generation)):
        value = settings.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise ModelError(
                    f"{file}: eos_token_id is {value!r}, but must be a token id >= 0 or a list of "
                    "them",
                    field="eos_token_id",
                )
        eos_ids.update(ids)
    return HfConfig(path, values, tuple(sorted(eos_ids)))


def check_directory(directory: Path) -> None:
    """Raise ModelError unless ``directory`` is one whose files can be read."""
    try:
        is_directory = stat.S_ISDIR(directory.stat().st_mode)
    except FileNotFoundError:
        what = "does not exist"
    except (OSError, ValueError) as error:
        what = f"can't be read: {getattr(error, 'strerror', None) or error}"
    else:
        if is_directory and os.access(directory, os.R_OK | os.X_OK):
            return
        what = "can't be read: Permission denied" if is_directory else "is not a directory"
    raise ModelError(
        f"model {directory} {what}; give a directory with config.json, *.safetensors and "
        "tokenizer.json",
        field="model",
    )


def task_of(directory: Path, architecture: str, asked: str = "auto") -> Task:
    """What a checkpoint is for. ``asked``: what it is to do, if that isn't auto. Raises UserError
    for text of an architecture that gives none."""
    if asked == "generate" and not architecture.endswith(GENERATES):
        raise UserError(
            f"{directory / 'config.json'}: {architecture} has no output of tokens, so it can't "
            "generate text: leave the task out, and it is served for what it has",
            field="task",
        )
    if asked != "auto":
        return asked  # type: ignore[return-value]
    if architecture.endswith(CLASSIFIER):
        return "rerank"
    if (directory / "modules.json").is_file() or not architecture.endswith(GENERATES):
        return "embed"
    return "generate"


def read_quantization(config: HfConfig) -> QuantizationSettings | None:
    """The quantisation that config.json or a file beside it describes; None: there is none.

    Raises ModelError for what isn't an object.
    """
    values = config.values.get(QUANTIZATION_KEY)
    if isinstance(values, dict):
        return QuantizationSettings(config.path, values, prefix=f"{QUANTIZATION_KEY}.")
    if values is not None:
        raise config.error(QUANTIZATION_KEY, f"is {str(values)[:80]}, but must be an object")
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
