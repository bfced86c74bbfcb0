"""The LMI releases whose formats differ, and what came with which (DJL-Serving's sources)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from lmi_core.errors import UserError


class Release(IntEnum):
    """A release by the number after its dot; releases from 0.29 on are spoken as 0.29."""

    V0_24 = 24
    V0_25 = 25
    V0_26 = 26
    V0_27 = 27
    V0_28 = 28
    V0_29 = 29

    def __str__(self) -> str:
        return f"0.{self.value}"

    @classmethod
    def parse(cls, text: str) -> Release:
        """The release that is written ``0.N``; UserError lists them."""
        for release in cls:
            if str(release) == text:
                return release
        allowed = ", ".join(map(str, cls))
        raise UserError(f"lmi_compat is {text!r}; allowed are {allowed}", field="lmi_compat")

    @property
    def has_stream_field(self) -> bool:
        return self >= Release.V0_27

    @property
    def has_chat(self) -> bool:
        return self >= Release.V0_27

    @property
    def ends_failures_in_form(self) -> bool:
        """A failed step is a last token of the answer's own form, not an error in its place."""
        return self == Release.V0_28


_PARAMETERS_SINCE = {
    "details": Release.V0_26,
    "return_full_text": Release.V0_27,
    "output_formatter": Release.V0_27,
    "decoder_input_details": Release.V0_28,
    "top_n_tokens": Release.V0_29,
}


def split_parameters(
    raw: Mapping[str, Any], release: Release
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The parameters that ``release`` knows, and the names of those that are too new for it."""
    later = tuple(
        name for name in raw if release < _PARAMETERS_SINCE.get(name, release) and raw[name]
    )
    return {name: value for name, value in raw.items() if name not in later}, later
