"""Routing and grouped linears: every implementation against the reference, and their promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmi_core import _native, ops
from lmi_core.ops.cpu import NativeWeights, lower
from lmi_core.ops.graph import Graph, Handle

torch = pytest.importorskip("torch")

Array = npt.NDArray[np.float32]
LEVELS = _native.instruction_sets()
NUM_EXPERTS, TOP_K, HIDDEN, INNER = 24, 4, 72, 40
GROUPS = {"num_groups": 6, "top_groups": 3, "group_best": 2}
ROUTINGS: list[dict[str, Any]] = [
    {"scoring": "softmax"},
    {"scoring": "softmax", "normalizes": True, "scale": 0.7},
    {"scoring": "softmax", **GROUPS, "group_best": 1},
    {"scoring": "sigmoid", "normalizes": True, "scale": 2.5, **GROUPS, "bias": True},
    {"scoring": "sparsemixer", "threshold": 0.6},
]


def run_native(
    record: Any,
    tables: dict[str, Array],
    ids: list[int],
    level: str,
    dtype: str = "fp32",
    as_threads: int = 0,
) -> Array:
    """What ``record`` makes of rows ``ids`` of tables, which it gets as embeddings; in chunks as
    for so many threads."""
    graph = Graph(dtype)  # type: ignore[arg-type]
    result = record({name: ops.embed(graph, table) for name, table in tables.items()})
    sizes = {"max_tokens": 700, "max_seqs": 1, "max_logit_rows": 1}
    target = _native.Graph(
        **sizes, max_blocks_per_seq=64, block_size=16, act_dtype=dtype, instruction_set=level
    )
    handle = lower(graph, target)[result]
    target.output(handle)
    target.finish()
    tables = _native.BlockTables(1, 64)
    tables.set(0, list(range(64)))
    step = _native.Step(
        **sizes,
        max_logprobs=0,
        max_copies=0,
        block_size=16,
        block_tables=tables,
        sampling=_native.SamplingTable(1, 700),
    )
    step.add(ids, 0, 0, -1, "none", -1)
    target.measure_nodes(len(ids), as_threads)
    _native.Worker(2).run(target, step)
    return np.array(target.read(handle, len(ids)))


def routed(logits: Handle, settings: dict[str, Any], bias: Array) -> Handle:
    with_bias = {**settings, "bias": bias if settings.get("bias") else None}
    return ops.route(logits, top_k=TOP_K, **with_bias)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("settings", ROUTINGS)
def test_routes_are_the_definitions(settings: dict[str, Any], level: str) -> None:
    from lmi_core.ops.kernels.torch_ops.experts import route as torch_route
    from tests.ops.torch_formulas import routes as exact_routes

    random = np.random.default_rng(0)
    logits = random.standard_normal((50, NUM_EXPERTS)).astype(np.float32)
    bias = random.standard_normal(NUM_EXPERTS).astype(np.float32) / 4
    routes = run_native(
        lambda h: routed(h["logits"], settings, bias), {"logits": logits}, list(range(50)), level
    )
    known = {"normalizes": False, "scale": 1.0, "threshold": 0.0, "top_k": TOP_K}
    known |= {"num_groups": 1, "top_groups": 1, "group_best": 1, **settings}
    known["bias"] = torch.from_numpy(bias) if settings.get("bias") else None
    exact = exact_routes(torch.from_numpy(logits).double(), **known).numpy()
    np.testing.assert_array_equal(routes[:, :TOP_K], exact[:, :TOP_K])
    assert (np.diff(routes[:, :TOP_K]) > 0).all()
    np.testing.assert_allclose(routes[:, TOP_K:], exact[:, TOP_K:], rtol=1e-5)
    in_torch = torch_route(torch.from_numpy(logits), **known).numpy()
    np.testing.assert_allclose(in_torch, exact, rtol=1e-5)


@pytest.mark.parametrize("settings", ROUTINGS)
def test_ties_go_to_the_lowest_ids(settings: dict[str, Any]) -> None:
    from lmi_core.ops.kernels.torch_ops.experts import route as torch_route

    settings = {**settings, "bias": None}
    logits = np.zeros((2, NUM_EXPERTS), np.float32)
    logits[1, 20] = 1.0
    bias = np.zeros(NUM_EXPERTS, np.float32)
    routes = run_native(
        lambda h: routed(h["logits"], settings, bias), {"logits": logits}, [0, 1], LEVELS[-1]
    )
    wanted = [[0, 1, 2, 3], [0, 1, 2, 20]]
    np.testing.assert_array_equal(routes[:, :TOP_K], wanted)
    known = {"normalizes": False, "scale": 1.0, "threshold": 0.0, "top_k": TOP_K}
    known |= {"num_groups": 1, "top_groups": 1, "group_best": 1, **settings}
    in_torch = torch_route(torch.from_numpy(logits), **known)
    np.testing.assert_array_equal(in_torch[:, :TOP_K].numpy(), wanted)


def test_experts_of_rows_that_are_not_finite_are_experts() -> None:
    logits = np.full((3, NUM_EXPERTS), np.nan, np.float32)
    logits[1] = -np.inf
    logits[2, 3] = np.inf
    for settings in ROUTINGS:
        routes = run_native(
            lambda h, s=settings: routed(h["logits"], {**s, "bias": None}, logits[0]),
            {"logits": logits},
            [0, 1, 2],
            LEVELS[-1],
        )
        ids = routes[:, :TOP_K]
        assert ((ids >= 0) & (ids < NUM_EXPERTS)).all()
        assert (np.diff(ids) > 0).all()


class Mixture:
    """Random experts over random rows, the first of which choose the same experts."""

    def __init__(self, format: str, *, level: str = "", activation: str = "silu") -> None:
        random = np.random.default_rng(1)
        self.rows = random.standard_normal((700, HIDDEN)).astype(np.float32)
        self.logits = random.standard_normal((700, NUM_EXPERTS)).astype(np.float32)
        self.logits[:600] = self.logits[0]
        self.stream = random.standard_normal((700, HIDDEN)).astype(np.float32)
        shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
        self.experts = [
            [random.standard_normal(s).astype(np.float32) / s[1] ** 0.5 for s in shapes]
            for _ in range(NUM_EXPERTS)
        ]
        self.biases = [
            random.standard_normal(NUM_EXPERTS * n).astype(np.float32) for n in (2 * INNER, HIDDEN)
        ]
        packer = NativeWeights(level)
        self.gate_up = packer.pack_experts(
            [expert[:2] for expert in self.experts],
            format=format,  # type: ignore[arg-type]
            gated=True,
        )
        self.down = packer.pack_experts(
            [expert[2:] for expert in self.experts],
            format=format,  # type: ignore[arg-type]
            gated=False,
        )
        self.level, self.activation = level, activation
        self.dtype = "bf16" if format == "bf16" else "fp32"

    def run(self, ids: list[int], as_threads: int = 0) -> Array:
        tables = {"rows": self.rows, "logits": self.logits, "stream": self.stream}
        return run_native(self.record, tables, ids, self.level, self.dtype, as_threads)

    def record(self, values: dict[str, Handle]) -> Handle:
        h = ops.norm(values["rows"], None, None, 0.0, kind="none")
        routes = ops.route(values["logits"], top_k=TOP_K, scoring="softmax")
        h = ops.grouped_linear(
            h,
            routes,
            self.gate_up,
            bias=self.biases[0],
            activation=self.activation,  # type: ignore[arg-type]
        )
        down = {"bias": self.biases[1], "residual": values["stream"]}
        return ops.grouped_linear(h, routes, self.down, **down)  # type: ignore[arg-type]

    def exact(self, ids: list[int]) -> Array:
        """In float64, of the weights as they are packed."""
        gate_up = self.gate_up.unpack().reshape(NUM_EXPERTS, 2 * INNER, HIDDEN).astype(np.float64)
        down = self.down.unpack().reshape(NUM_EXPERTS, HIDDEN, INNER).astype(np.float64)
        biases = [bias.reshape(NUM_EXPERTS, -1) for bias in self.biases]
        results = []
        for row in ids:
            scores = np.exp(self.logits[row].astype(np.float64))
            scores /= scores.sum()
            y = self.stream[row].astype(np.float64)
            for expert in sorted(np.argsort(-scores, kind="stable")[:TOP_K]):
                gate, up = np.split(gate_up[expert] @ self.rows[row] + biases[0][expert], 2)
                if self.activation == "clamped_swiglu":
                    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7) + 1
                    h = gate / (1 + np.exp(-1.702 * gate)) * up
                else:
                    h = gate / (1 + np.exp(-gate)) * up
                y = y + scores[expert] * (down[expert] @ h + biases[1][expert])
            results.append(y)
        return np.array(results)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("format", "tolerance"), [("fp32", 1e-5), ("bf16", 0.03), ("int8", 0.03), ("int4", 0.03)]
)
def test_experts_products_and_sums(format: str, tolerance: float, level: str) -> None:
    mixture = Mixture(format, level=level)
    ids = list(range(590, 620))
    error = mixture.run(ids) - mixture.exact(ids)
    assert np.abs(error).max() < tolerance * 4


@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_clamped_activation(format: str) -> None:
    mixture = Mixture(format, activation="clamped_swiglu")
    mixture.rows *= 6
    ids = list(range(590, 610))
    exact = mixture.exact(ids)
    error = mixture.run(ids) - exact
    assert np.abs(error).max() < (1e-5 if format == "fp32" else 0.03) * np.abs(exact).max()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("format", ["fp32", "bf16", "int8", "int4"])
def test_same_bits_in_any_company(format: str, level: str) -> None:
    """Alone, among rows of the same experts, and where an expert has more rows than a block; in
    chunks for two threads and for many."""
    mixture = Mixture(format, level=level)
    every = mixture.run(list(range(700)))
    for ids in ([599], [3, 620], list(range(595, 605)), list(range(699, 400, -1))):
        for as_threads in (2, 8, 64):
            np.testing.assert_array_equal(mixture.run(ids, as_threads), every[ids])
