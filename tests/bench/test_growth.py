"""How cost grows: cost models, their fits, tables and plots."""

from __future__ import annotations

import numpy as np
import pytest

from bench.growth.fit import fit
from bench.growth.point import SIZES, Point, cost, points_of, shape_of
from bench.growth.report import Row, page, series_of, table


def rows_of(series: str, seconds_per_gb: float, bend: float = 1.0) -> list[Row]:
    """A millisecond and the bytes' time; the last point ``bend`` times as long."""
    rows = []
    for point in points_of(series, 1):
        num_gb, _ = cost(point, shape_of("160m", point.vocab_size), "bf16")
        rows.append(Row(point, (1e-3 + seconds_per_gb * num_gb,), 900.0))
    rows[-1] = Row(rows[-1].point, (bend * rows[-1].median,), 900.0)
    return rows


def test_a_step_reads_weights_and_cache() -> None:
    shape = shape_of("160m", 32000)
    empty, _ = cost(Point(series="context", size=0, context=0), shape, "bf16")
    assert empty == pytest.approx(2e-9 * shape.linear_params)
    full, operations = cost(Point(series="context", size=0, context=1000), shape, "bf16")
    assert full - empty == pytest.approx(1000 * 12 * 2 * 768 * 2 * 1e-9)
    assert operations == pytest.approx((2 * shape.linear_params + 4 * 12 * 768 * 1000) * 1e-9)


def test_a_shared_prefix_spares_all_but_its_keys() -> None:
    shape = shape_of("160m", 32000)
    alone = cost(Point(series="prompt", size=0, prompt=64), shape, "bf16")
    behind = cost(Point(series="prompt", size=0, prompt=1064, shared=1000), shape, "bf16")
    assert behind[1] - alone[1] == pytest.approx(4 * 12 * 768 * 64 * 1000 * 1e-9)


def test_fits_find_what_made_the_times() -> None:
    rng = np.random.default_rng(0)
    costs = [(float(a), float(b)) for a, b in rng.random((12, 2))]
    found = fit(costs, [0.01 + 0.5 * a + 0.2 * b for a, b in costs])
    assert (found.constant, found.per_gb, found.per_gop) == pytest.approx((0.01, 0.5, 0.2))
    falling = fit([(a, 0.0) for a in (1.0, 2.0, 3.0)], [3.0, 2.0, 1.0])
    assert min(falling.constant, falling.per_gb, falling.per_gop) >= 0.0


@pytest.mark.parametrize("series", list(SIZES))
def test_tables_mark_bends(series: str) -> None:
    straight = series_of(rows_of(series, 0.03), "160m", "bf16")
    assert [each.name for each in straight] == [series]
    assert "bend" not in table(straight)
    if series != "threads" and len(SIZES[series]) > 4:
        assert "(bend)" in table(series_of(rows_of(series, 0.03, bend=3.0), "160m", "bf16"))


def test_the_page_has_a_plot_of_every_series() -> None:
    rows = [row for series in SIZES for row in rows_of(series, 0.03)]
    text = page("growth", series_of(rows, "160m", "bf16"))
    assert text.count("<svg") == len(SIZES)
    assert text.count("<circle") == len(rows)
