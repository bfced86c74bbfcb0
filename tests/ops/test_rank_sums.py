"""What ranks sum by torch goes in the order that a step list has: rank 0's product with the bias,
then the others'."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

import lmi_core.ops as graph_ops  # noqa: E402
from lmi_core.ops.device.ranked_graph import RankedGraph  # noqa: E402
from lmi_core.ops.device.torch_weights import DeviceWeight  # noqa: E402
from lmi_core.ops.kernels import select  # noqa: E402
from lmi_core.ops.operands import SlicedWeight  # noqa: E402
from tests.ops.paged_case import PagedCase  # noqa: E402


class OtherRank:
    """Whose product ends what this one's has of large numbers."""

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        return [part, torch.full_like(part, -1e8)]

    def collect(self, x: torch.Tensor) -> None:
        raise AssertionError("nothing is collected")


def test_a_bias_is_added_to_the_first_product() -> None:
    """(1e8 + 1) - 1e8 is 0 in fp32, (1e8 - 1e8) + 1 is 1."""
    graph = graph_ops.Graph("fp32")
    x = graph_ops.embed(graph, np.ones((9, 4), np.float32))
    weight = SlicedWeight((DeviceWeight(torch.full((3, 4), 2.5e7)),))
    graph_ops.sample(graph_ops.linear(x, weight, bias=np.ones(3, np.float32)))
    cpu = torch.device("cpu")
    kernels = select.load(select.select("cpu", "torch"))
    logits = RankedGraph(graph, kernels, cpu, OtherRank()).forward(
        PagedCase(((0, 2),), 1, 1, 16).step(cpu)
    )
    assert torch.equal(logits, torch.zeros(2, 3))
