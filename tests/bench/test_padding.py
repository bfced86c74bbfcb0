"""The plot of padded batches shows each figure at its place."""

from __future__ import annotations

from xml.etree import ElementTree

from bench.padding import Case, Summary, plot


def test_a_plot_has_every_figure() -> None:
    summaries = {
        Case(None): Summary(0.0, 1.0, 0, 150.0, [300.0]),
        Case(0.0): Summary(0.0, 5.0, 0, 17.0, [30.0]),
        Case(0.33): Summary(0.44, 1.7, 63, 32.0, [60.0]),
        Case(1.0): Summary(0.55, 1.0, 127, 33.0, [66.0]),
        Case(1.0, "now"): Summary(0.9, 9.0, 127, 999.0, [66.0]),
    }
    picture = ElementTree.fromstring(plot(summaries))
    lines = [each.attrib["points"] for each in picture.iter() if each.tag.endswith("polyline")]
    assert [line.split()[0] for line in lines] == ["60.0,210.0", "360.0,40.0", "660.0,190.7"]
    labels = {each.text for each in picture.iter() if each.tag.endswith("}text")}
    assert {"0.33", "55", "5", "150", "1"} <= labels
    assert not labels & {"999", "9"}
