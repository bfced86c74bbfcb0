"""Which adapters a call to LMI's routes is for (DJL-Serving's adapters.md)."""

from __future__ import annotations

from lmi_core.errors import UserError
from lmi_server.dialects.base import AdapterNames, Call
from lmi_server.dialects.lmi.release import Release

_IDENTIFIER = "x-amzn-sagemaker-adapter-identifier"
_ALIAS = "x-amzn-sagemaker-adapter-alias"
_OLDER = "adapter"
_MAX_SHOWN = 80


class LmiAdapters:
    """Chooses among a model's adapters and refuses unknown ones in the words of a release."""

    def __init__(self, names: AdapterNames | None, release: Release | None = None) -> None:
        """``names``: None: LoRA is not enabled. ``release``: None: our own words."""
        self._names = names
        self._release = release

    def chosen(
        self, in_body: str | list[str] | None, call: Call, num_prompts: int
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
        self._check(adapters, call.headers.get(_ALIAS, ""))
        return adapters

    def of_call(self, in_body: str | list[str] | None, call: Call, model: str | None) -> str:
        """The adapter of a chat or a completion, whose ``model`` may name it too."""
        (adapter,) = self.chosen(in_body, call, 1)
        if adapter or model is None or self._names is None or self._release is not None:
            return adapter
        return model if model in self._names() else ""

    def _check(self, adapters: tuple[str, ...], alias: str) -> None:
        named = [adapter for adapter in adapters if adapter]
        if not named:
            return
        if self._names is None:
            raise UserError(
                f"The request names the adapter {named[0][:_MAX_SHOWN]!r}, but LoRA is not "
                "enabled; set option.enable_lora=true, or leave the adapter out",
                field="adapters",
            )
        names = self._names()
        for adapter in named:
            if adapter not in names:
                shown = (alias or adapter)[:_MAX_SHOWN]
                raise UserError(self._unknown(shown), field="adapters")

    def _unknown(self, shown: str) -> str:
        if self._release is not None and self._release <= Release.V0_27:
            return f"Unknown or invalid adapter {shown}"
        text = f"Adapter {shown} is not registered"
        if self._release is not None or self._names is None:
            return text
        names = ", ".join(map(repr, self._names()))
        return f"{text}; {f'registered are {names}' if names else 'none is registered'}"


def _outside(call: Call) -> str:
    """The name that stands beside the body."""
    given = (call.headers.get(_IDENTIFIER), call.headers.get(_OLDER), call.query.get(_OLDER))
    return next((name for name in given if name), "")
