"""Request properties as DJL-Serving sees them: headers and custom attributes."""

from __future__ import annotations

from collections.abc import Mapping

_CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"


def request_properties(headers: Mapping[str, str]) -> dict[str, str]:
    """Lower-case property names; the custom attributes header is replaced by its pairs."""
    return {name.lower(): value for name, value in sent_properties(headers).items()}


def sent_properties(headers: Mapping[str, str]) -> dict[str, str]:
    """As ``request_properties``, with names as they were sent."""
    properties: dict[str, str] = {}
    for name, value in headers.items():
        if name.lower() == _CUSTOM_ATTRIBUTES:
            properties.update(_pairs(value))
        else:
            properties[name] = value
    return properties


def _pairs(text: str) -> dict[str, str]:
    """``a=1;b=2``; a piece without ``=`` is dropped."""
    pieces = (piece.partition("=") for piece in text.split(";"))
    return {name.strip(): value.strip() for name, equals, value in pieces if equals}
