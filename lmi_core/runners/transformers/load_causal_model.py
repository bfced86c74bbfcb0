"""Loading a model by Transformers, of the kind that its ``config.json`` says."""

from __future__ import annotations

import importlib
import logging
import warnings
from pathlib import Path
from typing import Any

from lmi_core.errors import MissingExtraError, ModelError
from lmi_core.runners.transformers.causal_model import DEFAULT_LENGTH, CausalModel
from lmi_core.runners.transformers.encoder_decoder import EncoderDecoderModel
from lmi_core.runners.transformers.peft_adapters import PeftAdapters
from lmi_core.settings.transformers_config import TransformersConfig

_log = logging.getLogger(__name__)


def load_causal_model(config: TransformersConfig) -> CausalModel:
    """Load the model's weights to the configured device.

    Raises MissingExtraError without the library, UserError for a device that isn't there,
    ModelError, with the library's reason, for a model that it can't load.
    """
    try:
        library: Any = importlib.import_module("transformers")
    except ImportError:
        raise MissingExtraError("serving a model with Transformers", "transformers") from None
    from lmi_core.adapters.text_models import check_bitsandbytes
    from lmi_core.files import read_json_object
    from lmi_core.runners.device.device_runner import find_device

    has_encoder = read_json_object(config.model / "config.json").get("is_encoder_decoder") is True
    loader = library.AutoModelForSeq2SeqLM if has_encoder else library.AutoModelForCausalLM
    library.utils.logging.disable_progress_bar()
    device = find_device(config)
    arguments: dict[str, Any] = {"dtype": config.torch_dtype}
    if config.attn_implementation is not None:
        arguments["attn_implementation"] = config.attn_implementation
    if config.device_map is not None:
        arguments["device_map"] = config.device_map
    if config.bitsandbytes is not None:
        check_bitsandbytes()
        arguments["quantization_config"] = _bitsandbytes(library, config.bitsandbytes)
        arguments.setdefault("device_map", {"": device})
    try:
        model = loader.from_pretrained(
            str(config.model),
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
            **arguments,
        )
    except Exception as error:  # the library raises every kind
        raise _load_error(config.model, error) from error
    model.eval()
    if "device_map" not in arguments:
        model.to(device)
    kind = EncoderDecoderModel if has_encoder else CausalModel
    causal = kind(model, model.device if config.device_map else device)
    if config.lora is not None:
        causal.adapters = PeftAdapters(model, max_rank=config.lora.max_rank)
    causal.quantize = config.bitsandbytes or ""
    if causal.max_positions is None and config.max_model_len is None:
        _log.warning(
            "config.json doesn't say how long a sequence may be; option.max_model_len raises or "
            "lowers the %d tokens that are taken",
            DEFAULT_LENGTH,
        )
    return causal


def _bitsandbytes(library: Any, format: str) -> Any:
    """4-bit weights are multiplied in the model's own data type."""
    warnings.filterwarnings("ignore", message="MatMul8bitLt: inputs will be cast")
    if format == "int8":
        return library.BitsAndBytesConfig(load_in_8bit=True)
    return library.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=format)


def _load_error(path: Path, error: Exception) -> ModelError:
    reason = " ".join(str(error).split())[:400]
    hint = ""
    if "trust_remote_code" in str(error):
        hint = "; option.trust_remote_code=true lets the model's own code run in the server"
        reason = "its architecture is defined by Python code that comes with it"
    return ModelError(
        f"{path}: Transformers can't load the model: {reason}{hint}", field="option.model_id"
    )
