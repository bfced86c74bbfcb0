"""The page of families is what there is."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")


def test_the_page_of_families_is_not_stale() -> None:
    from tests.models.family_page import PAGE, family_page

    hint = "run: python -m tests.models.family_page > lmi_core/models/FAMILIES.md"
    assert PAGE.read_text() == family_page(), hint
