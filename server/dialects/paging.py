"""Pages of what is listed, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmi_core.errors import UserError


def page_limit(query: Mapping[str, str], *, usual: int, most: int) -> int:
    """How many are asked for; UserError for none, or for more than ``most``."""
    limit = query.get("limit", str(usual))
    if not limit.isascii() or not limit.isdecimal() or not 0 < int(limit[:9]) <= most:
        raise UserError(f"limit must be between 1 and {most}, got {limit[:40]!r}", field="limit")
    return int(limit)


def page_of(
    records: Sequence[dict[str, Any]],
    query: Mapping[str, str],
    *,
    usual: int,
    most: int,
    no_id: str | None = None,
) -> dict[str, Any]:
    """The first ones, or those behind the one that ``after`` names; UserError where it isn't there.
    ``no_id``: in place of ids where there is nothing."""
    limit, after = page_limit(query, usual=usual, most=most), query.get("after")
    if after is not None:
        places = [index for index, record in enumerate(records) if record["id"] == after]
        if not places:
            raise UserError(f"after names {after[:80]!r}, which isn't there", field="after")
        records = records[places[0] + 1 :]
    shown = records[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else no_id,
        "last_id": shown[-1]["id"] if shown else no_id,
        "has_more": len(shown) < len(records),
    }
