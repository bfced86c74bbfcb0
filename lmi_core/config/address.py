"""Addresses that a server listens on, as DJL-Serving's options write them."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

_ADDRESS = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9A-Fa-f:.]+\]|[^:/\[\]]+)(:(?P<port>[0-9]{1,5}))?/?"
)
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Address(NamedTuple):
    """``scheme`` is http or https; the host of IPv6 has no brackets."""

    scheme: str
    host: str
    port: int


def parse_address(text: str) -> Address:
    """Parse ``http://host:port``, scheme and port optional; ValueError says what is wrong."""
    if text.startswith("unix:"):
        raise ValueError("Unix sockets are not available in this version; write http://host:port")
    match = _ADDRESS.fullmatch(text if "://" in text else f"http://{text}")
    port = int(match["port"] or _DEFAULT_PORTS[match["scheme"]]) if match else -1
    if match is None or port > 65535:
        raise ValueError("is not http://host:port")
    return Address(match["scheme"], match["host"].strip("[]"), port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
