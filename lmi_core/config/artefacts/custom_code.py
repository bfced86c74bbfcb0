"""Python code that comes with a model, and whether it may run."""

from __future__ import annotations

from lmi_core.config.model_config import ModelConfig
from lmi_core.config.problem import Problems


def custom_code(model: ModelConfig) -> str | None:
    """What of a model would run Python code that came with it, or None."""
    code = model.custom_code_config()
    if code is not None:
        function = code.function or code.input_formatter or code.output_formatter
        return f"{code.path.name}: {function}"
    if model.trust_remote_code:
        return "option.trust_remote_code=true"
    return None


def check_downloaded(model: ModelConfig, problems: Problems) -> None:
    """Note code that came from another machine with its model."""
    code = custom_code(model)
    if model.archive_url is not None and code is not None:
        problems.error(
            model.archive_url[:200],
            f"the model {model.name} was downloaded with code of its own ({code}), which runs only "
            "with --allow-custom-code (SERVING_ALLOW_CUSTOM_CODE)",
        )
