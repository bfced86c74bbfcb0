"""Which adapters a call to LMI's routes is for (DJL-Serving's adapters.md)."""

from __future__ import annotations

from lmi_core.errors import UserError
from lmi_server.dialects.base import Call
from lmi_server.dialects.lmi.release import Release
from lmi_server.models.stand_in import DecodingModel

_IDENTIFIER = "x-amzn-sagemaker-adapter-identifier"
_ALIAS = "x-amzn-sagemaker-adapter-alias"
_OLDER = "adapter"
_MAX_SHOWN = 80


def adapters_named(
    model: DecodingModel, in_body: str | list[str] | None, call: Call, num_prompts: int
) -> tuple[str, ...]:
    """The adapter of each prompt, "" for the base model.

    SageMaker's header wins over the header, custom attribute or query parameter of older
    releases, and those over the body; outside the body one name is for all prompts. Raises
    UserError for a wrong number of names and for an adapter that isn't there.
    """
    outside = _outside(call)
    if outside:
        adapters = (outside,) * num_prompts
    else:
        listed = (in_body,) if isinstance(in_body, str) else tuple(in_body or ())
        if listed and len(listed) != num_prompts:
            raise UserError(
                "Number of adapters is not equal to the number of inputs: "
                f"{len(listed)} for {num_prompts}",
                field="adapters",
            )
        adapters = listed or ("",) * num_prompts
    _check(model, adapters, call.headers.get(_ALIAS, ""))
    return adapters


def adapter_of_call(
    model: DecodingModel, in_body: str | list[str] | None, call: Call, name: str | None
) -> str:
    """The adapter of a chat or a completion, whose ``model`` may name it too."""
    (adapter,) = adapters_named(model, in_body, call, 1)
    options = model.options
    if adapter or name is None or not options.has_lora or options.lmi.release is not None:
        return adapter
    return name if name in model.adapter_names() else ""


def _check(model: DecodingModel, adapters: tuple[str, ...], alias: str) -> None:
    named = [adapter for adapter in adapters if adapter]
    if not named:
        return
    if not model.options.has_lora:
        raise UserError(
            f"The request names the adapter {named[0][:_MAX_SHOWN]!r}, but LoRA is not "
            "enabled; set option.enable_lora=true, or leave the adapter out",
            field="adapters",
        )
    names = model.adapter_names()
    for adapter in named:
        if adapter not in names:
            shown = (alias or adapter)[:_MAX_SHOWN]
            raise UserError(_unknown(model, shown), field="adapters")


def _unknown(model: DecodingModel, shown: str) -> str:
    release = model.options.lmi.release
    if release is not None and release <= Release.V0_27:
        return f"Unknown or invalid adapter {shown}"
    text = f"Adapter {shown} is not registered"
    if release is not None or not model.options.has_lora:
        return text
    names = ", ".join(map(repr, model.adapter_names()))
    return f"{text}; {f'registered are {names}' if names else 'none is registered'}"


def _outside(call: Call) -> str:
    """The name that stands beside the body."""
    given = (call.headers.get(_IDENTIFIER), call.headers.get(_OLDER), call.query.get(_OLDER))
    return next((name for name in given if name), "")
