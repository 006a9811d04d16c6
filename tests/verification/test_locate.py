"""The first wrong tensor of an engine: bisection by cuts, and planted faults on ONNX Runtime."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from needs import without_gpu
from tables import values
from typer.testing import CliRunner

from rewriter.base.errors import EngineError, RewriterError, UsageError
from rewriter.cli import app
from rewriter.ir.graph.casts import TypeRequest, retype
from rewriter.ir.model import Array, Model, load, save
from rewriter.runtime.engines import this_machine
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.engines.protocol import EngineOutcome, Kernel, MeasureSettings, Variant
from rewriter.verification.locate import (
    REARRANGED,
    Exact,
    LocateOptions,
    Location,
    _same,
    locate,
    locate_by_emulation,
    locate_with,
)
from rewriter.verification.locate.bisection import Bisection
from rewriter.verification.locate.kernels import Written, recognised, relative, written
from rewriter.verification.locate.lineup import Lineup, SharedTensor, line_up


# -- the search alone ---------------------------------------------------------------------------
@st.composite
def lineups(draw: st.DrawFn, most: int = 120) -> Lineup:
    """Graphs like networks: mostly chains, with skip connections and branches; all lead to the last."""
    count = draw(st.integers(1, most))
    parents: list[set[int]] = [set() for _ in range(count)]
    for i in range(1, count):
        parents[i] = {i - 1} if draw(st.booleans()) else {draw(st.integers(max(0, i - 6), i - 1))}
        if draw(st.integers(0, 4)) == 0:
            parents[i].add(draw(st.integers(max(0, i - 12), i - 1)))
    read = set().union(*parents)
    parents[-1] |= {i for i in range(count - 1) if i not in read}
    return Lineup(
        tuple(SharedTensor(f"t{i}", f"t{i}", f"n{i}", "Op", tuple(sorted(p))) for i, p in enumerate(parents))
    )


def chain_of(count: int) -> Lineup:
    return Lineup(tuple(SharedTensor(f"t{i}", "", "", "", (i - 1,) if i else ()) for i in range(count)))


def spoiled(lineup: Lineup, faults: set[int]) -> set[str]:
    """Tensors that are wrong if the nodes `faults` are: those and all tensors computed from them."""
    bad: set[int] = set()
    for i, tensor in enumerate(lineup.tensors):
        if i in faults or not bad.isdisjoint(tensor.parents):
            bad.add(i)
    return {f"t{i}" for i in bad}


def searched(lineup: Lineup, bad: set[str], marks: int, hiding: frozenset[str] = frozenset()) -> Bisection:
    def measure(names: Sequence[str]) -> Mapping[str, float] | str:
        assert len(names) == len(set(names)) <= marks
        if hiding.intersection(names):
            return "hidden"
        return {n: math.inf if n in bad else 0.0 for n in names}

    last = lineup.tensors[-1].name
    options = LocateOptions(1e-3, marks, max_builds=10_000)
    search = Bisection(lineup, measure, {last: math.inf}, options)
    search.run()
    return search


@given(lineups(), st.data(), st.integers(1, 8))
def test_the_first_of_several_faults_is_found(lineup: Lineup, data: st.DataObject, marks: int) -> None:
    count = len(lineup.tensors)
    faults = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=4))
    found = searched(lineup, spoiled(lineup, faults), marks)
    assert (found.low, found.high, found.discarded) == (min(faults) - 1, min(faults), 0)
    width = max(len(found.cut(i)) for i in range(count))
    assert found.builds <= math.ceil(width / marks) * (math.log2(count) * 1.5 + 3)


@given(lineups(60), st.data())
def test_tensors_that_hide_the_fault_are_named_and_avoided(lineup: Lineup, data: st.DataObject) -> None:
    count = len(lineup.tensors)
    fault = data.draw(st.integers(0, count - 1))
    hiding = data.draw(st.frozensets(st.integers(0, max(0, count - 2)), max_size=3))
    bad = spoiled(lineup, {fault})
    found = searched(lineup, bad, 4, frozenset(f"t{i}" for i in hiding))
    assert found.low < fault <= found.high  # the fault is in the remaining tensors
    assert f"t{found.high}" in bad
    assert set(found.hiding) <= {f"t{i}" for i in hiding}
    assert found.high - found.low == 1 or found.hiding


def test_no_more_builds_are_made_than_allowed() -> None:
    chain = chain_of(10_000)
    bad, lines = spoiled(chain, {3_333}), list[str]()

    def measure(names: Sequence[str]) -> Mapping[str, float] | str:
        return {n: math.inf if n in bad else 0.0 for n in names}

    options = LocateOptions(1e-3, 1, max_builds=6)
    search = Bisection(chain, measure, {"t9999": math.inf}, options, lines.append)
    search.run()
    assert (len(lines), search.builds) == (6, 6)
    assert lines[-1].endswith(" of 10000 tensors are left")
    assert search.low < 3_333 <= search.high


def test_tensors_that_the_network_lacks_are_avoided() -> None:
    chain = chain_of(20)

    def measure(names: Sequence[str]) -> Mapping[str, float] | str:
        return {n: float(int(n[1:]) >= 7) for n in names if int(n[1:]) % 2}

    search = Bisection(chain, measure, {"t19": 1.0})
    search.run()
    assert (search.low, search.high) == (5, 7)
    assert "not in the built network" in search.hiding["t6"]


# -- planted faults on ONNX Runtime -------------------------------------------------------------
LAYERS = 12


def network(*faults: int, op: str = "Tanh") -> Model:
    """A residual network; the layers `faults` have a wrong weight."""
    rng = np.random.default_rng(0)
    weights = {}
    for i in range(LAYERS):
        weight = rng.standard_normal((8, 8)).astype(np.float32) / 3
        weights[f"w{i}"] = weight * (1.5 if i in faults else 1.0)
    lines = []
    for i in range(LAYERS):
        before = f"r{i - 1}" if i else "x"
        lines.append(f"m{i} = MatMul({before}, w{i})  a{i} = {op}(m{i})  r{i} = Add(a{i}, {before})")
    return graphs.with_weights(
        f"g (float[2,8] x, {', '.join(f'float[8,8] {name}' for name in weights)}) => (float[2,8] y)"
        f" {{ {' '.join(lines)} y = Identity(r{LAYERS - 1}) }}",
        weights,
    )


ORT = MeasureSettings("onnxruntime", timing=None)
SAMPLES = [{"x": np.random.default_rng(i).standard_normal((2, 8)).astype(np.float32)} for i in range(2)]


@dataclass(frozen=True)
class InMemory(EngineOutcome):
    arrays: tuple[dict[str, Array], ...] = ()
    between: tuple[dict[str, Array], ...] = ()

    def values(self, sample: int) -> dict[str, Array]:
        return self.arrays[sample]

    def inner(self, sample: int) -> dict[str, Array]:
        return self.between[sample]


Writes = tuple[Sequence[str], Mapping[str, tuple[str, Callable[[Array], Array]]]]
"""The nodes of a kernel, and what it writes: the tensor of the model, and its layout."""


class OrtBuild:
    """Builds in this process; `optimize` switches ONNX Runtime's fusions on."""

    def __init__(
        self,
        model: Model,
        samples: Sequence[Mapping[str, Array]],
        *,
        optimize: bool = False,
        kernels: Sequence[Writes] = (),
    ) -> None:
        self.model, self.samples, self.optimize, self.kernels = model, samples, optimize, kernels
        self.marked: list[tuple[str, ...]] = []

    def __call__(self, marks: Sequence[str]) -> EngineOutcome:
        self.marked.append(tuple(marks))
        model = self.model.copy()
        model.proto.graph.output.extend(onnx.ValueInfoProto(name=n) for n in marks)
        with Session(model, optimize=self.optimize) as session:
            arrays = tuple(session.run(sample) for sample in self.samples)
        between = () if marks else tuple(map(self.written, self.samples))
        kernels = tuple(Kernel(tuple(nodes), tuple(writes)) for nodes, writes in self.kernels)
        paths = (Path(),) * len(arrays)
        return InMemory(
            "other", 0, "ok", "", "", "", "", "ONNX Runtime", None, paths, kernels, None, (), arrays, between
        )

    def written(self, sample: Mapping[str, Array]) -> dict[str, Array]:
        writes = {name: what for _, kernel in self.kernels for name, what in kernel.items()}
        model = self.model.copy()
        inner = {name for name, _ in writes.values()} - {p.name for p in model.signature.outputs}
        model.proto.graph.output.extend(onnx.ValueInfoProto(name=n) for n in inner)
        with Session(model) as session:
            values = session.run(sample)
        return {name: layout(values[tensor]) for name, (tensor, layout) in writes.items()}


def located(original: Model, other: Model, options: LocateOptions | None = None) -> Location:
    return locate_with(original, other, SAMPLES, OrtBuild(other, SAMPLES), options or LocateOptions())


def test_nothing_is_located_in_equal_models() -> None:
    build = OrtBuild(network(), SAMPLES)
    found = locate_with(network(), network(), SAMPLES, build, LocateOptions())
    assert (found.first, found.chain, found.builds) == (None, (), 0)
    assert [step.error for step in found.outputs] == [0.0]
    assert build.marked == [()]


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_planted_fault_is_found(layer: int) -> None:
    found = located(network(), network(layer))
    assert found.first is not None
    assert (found.first.tensor, found.first.op, found.exact) == (f"m{layer}", "MatMul", True)
    assert found.builds <= 6
    assert all(step.error == 0.0 for step in found.right)
    assert found.chain[0] == found.first
    assert found.discarded == 0 and found.chain[-1].tensor == "y"
    assert all(step.error is not None and step.error > 0 for step in found.chain)


TWO_HEADS = """
    g (float[2,8] x) => (float[2,8] near, float[2,8] far) {
        a = Mul(x, A) b = Add(a, x) near = Tanh(b)
        c = Mul(x, C) d = Add(c, x) far = Tanh(d) }"""


def test_the_chain_starts_at_the_first_fault_though_another_output_is_worse() -> None:
    def heads(a: float, c: float) -> Model:
        constants = f"<float A = {{{a}}}, float C = {{{c}}}> {{"
        return graphs.graph(TWO_HEADS.replace("{\n", f"{constants}\n", 1))

    found = located(heads(0.5, 0.5), heads(0.6, -5.0))
    assert [step.tensor for step in found.wrong] == ["near", "far"]
    assert found.first is not None and found.first.tensor == "a"
    assert [step.tensor for step in found.chain] == ["a", "b", "near"]


def test_a_wrong_integer_output_is_reported() -> None:
    text = "g (float[2,8] x) => (int64[2,1] y) { ArgMax<axis = 1>(OF) }"
    same = graphs.graph(text.replace("ArgMax", "a = Abs(x) y = ArgMax").replace("OF", "a"))
    other = graphs.graph(text.replace("ArgMax", "a = Abs(x) b = Neg(a) y = ArgMax").replace("OF", "b"))
    found = located(same, other)
    assert found.first is None
    assert [step.tensor for step in found.wrong] == ["y"]


def test_nan_counts_as_wrong() -> None:
    spoiled_model = network(op="Log")
    found = located(network(), spoiled_model)
    assert found.first is not None and (found.first.tensor, found.first.error) == ("a0", math.inf)


def test_a_long_chain_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.verification.locate.STEPS", 4)
    found = located(network(), network(0))
    assert len(found.chain) == 4
    assert (found.chain[0].tensor, found.chain[-1].tensor) == ("m0", "y")


def test_what_is_known_needs_no_build() -> None:
    search = Bisection(chain_of(9), lambda names: pytest.fail("nothing is left"), {"t7": 0.0, "t8": 1.0})
    search.run()
    assert (search.low, search.high, search.builds) == (7, 8, 0)


DIAMOND = Lineup(
    tuple(
        SharedTensor(name, name, "", "", parents)
        for name, parents in (("a", ()), ("b", (0,)), ("c", (0,)), ("d", (1, 2)), ("e", (0,)), ("f", (3,)))
    )
)


def test_a_lineup_knows_what_leads_where() -> None:
    assert DIAMOND.last_use == (4, 3, 3, 5, 6, 6)
    assert [t.name for t in DIAMOND.leading_to(["d"]).tensors] == ["a", "b", "c", "d"]
    part = DIAMOND.leading_to(["e", "f"]).leading_to(["e"])
    assert [(t.name, t.parents) for t in part.tensors] == [("a", ()), ("e", (0,))]
    assert DIAMOND.path(0, 5) in ([0, 1, 3, 5], [0, 2, 3, 5])
    assert DIAMOND.path(2, 3) == [2, 3] and DIAMOND.path(5, 5) == [5]
    assert DIAMOND.path(4, 5) == [4], "e does not lead to f"


@values
def test_tensors_of_one_name_and_shape_are_shared(mine: str, yours: str, shared: bool) -> None:
    models = [graphs.graph(f"g ({kind} x) => ({kind} y) {{ y = Neg(x) }}") for kind in (mine, yours)]
    assert bool(line_up(models[0], models[1]).tensors) is shared


def test_unknown_shapes_may_be_equal() -> None:
    known, unknown = (graphs.graph("g (float[2,8] x) => (float[2,8] y) { y = Neg(x) }") for _ in range(2))
    for value in (*unknown.proto.graph.input, *unknown.proto.graph.output):
        value.type.tensor_type.ClearField("shape")
    for models in ((known, unknown), (unknown, known), (unknown, unknown)):
        assert [t.name for t in line_up(models[0], models[1]).tensors] == ["y"]


def test_errors_are_relative_to_all_samples_together() -> None:
    doubled = graphs.graph("g (float[2] x) => (float[2] y) { y = Add(x, x) }")
    feeds = [{"x": np.array(values, np.float32)} for values in ([1.5, 2.0], [0.0, 6.0])]
    given: list[Mapping[str, Array]] = [{"y": np.array(v)} for v in ([3.0, 5.0], [2.0, 12.0])]
    exact = Exact(doubled, feeds, {})
    assert exact.errors({"y": "y"}, given) == {"y": pytest.approx(math.sqrt((1 + 4) / (25 + 144)))}
    assert exact.errors({"y": "y"}, given[:1]) == {"y": pytest.approx(math.sqrt(1 / 25))}
    assert exact.errors({"z": "y"}, given) == {}
    zero = graphs.graph("g (float[2] x) => (float[2] y) { y = Sub(x, x) }")
    assert Exact(zero, feeds, {}).errors({"y": "y"}, [{"y": np.array([0.0, 0.5])}]) == {"y": 0.5}, "absolute"
    scaled = Exact(doubled, feeds, {"y": -1})
    assert scaled.errors({"y": "y"}, [{"y": np.array([1.5, 2.0])}]) == {"y": 0.0}


FOLDED = """
    g (float[1,2,6,6] x) => (float[1,2,6,6] y)
    <float[2,2,1,1] w = {3e37, 1e37, 2e37, 3e37},
     float[2] hundred = {100.0, 100.0}, float[2] one = {1.0, 1.0},
     float[2] zero = {0.0, 0.0}, float tiny = {1e-36}, float small = {1e-4}> {
        s = Mul(x, tiny) c = Conv(s, w) b = BatchNormalization(c, hundred, zero, zero, one)
        h = Mul(b, small) y = Tanh(h) }"""
"""ONNX Runtime folds the BatchNormalization into the Conv, whose weights then overflow. Marking the Conv's
result as an output prevents the folding and hides the fault."""


def test_a_fusion_fault_that_marks_hide_is_narrowed_down() -> None:
    source = graphs.graph(FOLDED)
    feeds = [{"x": np.ones((1, 2, 6, 6), np.float32)}]
    found = locate_with(source, source, feeds, OrtBuild(source, feeds, optimize=True), LocateOptions())
    assert [step.error > 1 for step in found.outputs if step.error] == [True]
    assert found.first is not None and (found.first.tensor, found.exact) == ("b", False)
    assert [step.tensor for step in found.right] == ["s"]
    assert [(step.tensor, step.op) for step in found.hiding] == [("c", "Conv")]
    assert "outputs change" in found.hiding[0].note and found.discarded >= 1


# -- tensors between kernels --------------------------------------------------------------------
def as_it_is(value: Array) -> Array:
    return value


def turned(value: Array) -> Array:
    return np.ascontiguousarray(value.T)


def halves(value: Array) -> Array:
    return value.astype(np.float16)


def shuffled(value: Array) -> Array:
    return np.random.default_rng(1).permutation(value.reshape(-1))


def layers(*layouts: Callable[[Array], Array]) -> list[Writes]:
    """A kernel for each layer of `network`, whose results have these layouts in turn."""
    return [
        (
            [f"node_of_{name}{i}" for name in "mar"],
            {f"__mye{i}": (f"r{i}", layouts[i % len(layouts)])},
        )
        for i in range(LAYERS)
    ]


@pytest.mark.parametrize("layouts", [(as_it_is,), (turned, halves)], ids=["as in the model", "others"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_one_run_finds_the_kernel_and_one_build_the_node(
    layer: int, layouts: Sequence[Callable[[Array], Array]]
) -> None:
    other = network(layer)
    build = OrtBuild(other, SAMPLES, kernels=layers(*layouts))
    found = locate_with(network(), other, SAMPLES, build, LocateOptions())
    assert build.marked == [(), (f"m{layer}", f"a{layer}")], "the tensors inside the wrong kernel"
    assert found.first is not None
    assert (found.first.tensor, found.exact, found.discarded) == (f"m{layer}", True, 0)
    assert [step.tensor for step in found.right] == ([f"r{layer - 1}"] if layer else [])
    chain = [f"m{layer}", f"a{layer}", *(f"r{i}" for i in range(layer, LAYERS)), "y"]
    assert [step.tensor for step in found.chain] == chain
    assert found.compared == LAYERS + 3
    assert found.kernel == tuple(f"node_of_{name}{layer}" for name in "mar")
    assert found.given == LAYERS


def test_a_fusion_that_marks_undo_is_named_after_one_run() -> None:
    source = graphs.graph(FOLDED)
    feeds = [{"x": np.ones((1, 2, 6, 6), np.float32)}]
    kernels: list[Writes] = [(["node_of_s"], {"1": ("s", as_it_is)})]
    build = OrtBuild(source, feeds, optimize=True, kernels=kernels)
    found = locate_with(source, source, feeds, build, LocateOptions())
    assert found.first is not None
    assert (found.first.tensor, [step.tensor for step in found.right]) == ("b", ["s"])
    assert [step.tensor for step in found.hiding] == ["c"]
    assert not any("s" in marks for marks in build.marked)


def test_values_in_an_unknown_order_are_left_out() -> None:
    other = network(6)
    build = OrtBuild(other, SAMPLES, kernels=layers(as_it_is, shuffled))
    found = locate_with(network(), other, SAMPLES, build, LocateOptions())
    assert found.first is not None and found.first.tensor == "m6"
    assert build.marked[1] == ("m5", "a5", "r5", "m6", "a6"), "r5 is in an unknown order, r4 is right"


def test_a_kernel_that_garbles_an_order_is_named() -> None:
    """As one that made an image of tokens in a wrong order: only what follows it has other elements."""
    text = "g (float[4,8] x) => (float[4,8] y) { a = Tanh(x) b = Identity(a) c = Mul(b, x) y = Neg(c) }"
    original, feeds = (
        graphs.graph(text),
        [{"x": np.random.default_rng(0).standard_normal((4, 8)).astype("f4")}],
    )
    order = ", ".join(map(str, np.random.default_rng(1).permutation(32)))
    constants = f"int64[32] order = {{{order}}}, int64[1] flat = {{-1}}, int64[2] size = {{4, 8}}"
    gathered = "a = Tanh(x) f = Reshape(a, flat) g = Gather(f, order) b = Reshape(g, size)"
    garbled = graphs.graph(
        f"g (float[4,8] x) => (float[4,8] y) <{constants}> {{ {gathered} c = Mul(b, x) y = Neg(c) }}"
    )
    kernels: list[Writes] = [
        (["node_of_a"], {"1": ("a", as_it_is)}),
        (["node_of_b"], {"2": ("b", as_it_is)}),
        (["node_of_c"], {"3": ("c", as_it_is)}),
    ]
    build = OrtBuild(garbled, feeds, kernels=kernels)
    found = locate_with(original, garbled, feeds, build, LocateOptions(max_builds=0))
    assert found.first is not None and (found.first.tensor, found.exact) == ("c", False)
    assert [(step.tensor, step.note) for step in found.hiding] == [("b", REARRANGED)]
    assert [step.tensor for step in found.right] == ["a"]


TWO_STEPS = """
    g (float[2,8] x) => (float[2,8] y) {
        a = Tanh(x)  b = Softmax(a)  c = Mul(b, b)  d = Add(c, a)  y = Neg(d) }"""


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        pytest.param(
            [Kernel(("node_of_a", "node_of_b"), ("1",)), Kernel(("node_of_b", "node_of_c"), ("2",))],
            [Written("1", ("a",), ("b",)), Written("2", ("c",), ("b", "a"))],
            id="a node in two kernels: a part of it says nothing",
        ),
        pytest.param(
            [Kernel(("node_of_c", "node_of_d", "node_of_y"), ("1", "2"))],
            [Written("1", ("y",), ("c", "d", "b", "a")), Written("2", ("y",), ("c", "d", "b", "a"))],
            id="what only the kernel itself reads is no end",
        ),
        pytest.param([Kernel(("elsewhere",), ("1",))], [Written("1", (), ())], id="a node of another graph"),
    ],
)
def test_what_a_kernel_may_write(kernels: Sequence[Kernel], expected: Sequence[Written]) -> None:
    model = graphs.graph(TWO_STEPS)
    assert [*written(model, kernels, {"a", "b", "c", "d", "y"})] == expected


def recognise(value: Array, **references: Array) -> dict[str, float]:
    names = [*references]
    result = Written("k", tuple(names[:1]), tuple(names[1:]))
    found, moved = recognised([result], {"k": value}, references, {n: n for n in names}, 1e-3)
    return {name: relative(both) for name, both in found.items()} | dict.fromkeys(moved, -1.0)


def test_a_value_is_right_wrong_or_unknown() -> None:
    rng = np.random.default_rng(0)
    end, inside = (rng.standard_normal((2, 4, 1, 6)).astype(np.float32) for _ in range(2))
    near = end.transpose(2, 3, 0, 1).astype(np.float16)
    assert recognise(near, end=end, inside=inside) == {"end": pytest.approx(3e-4, rel=0.5)}
    assert recognise(inside.reshape(8, 6), end=end, inside=inside) == {"inside": 0.0}
    assert recognise(shuffled(end), end=end, inside=inside) == {"end": -1.0}, "the same elements"
    assert recognise(end[:1], end=end) == {}, "another size"
    alike = inside + 9  # most of its norm is its mean
    assert recognise(shuffled(alike), end=alike) == {"end": -1.0}
    assert recognise(alike.reshape(-1) + 0.5 * shuffled(inside), end=alike) == {
        "end": pytest.approx(0.05, rel=0.5)
    }
    assert recognise(1.5 * end, end=end, inside=inside) == {"end": pytest.approx(0.5)}
    assert recognise(np.full(end.shape, np.nan, np.float32), end=end) == {"end": math.inf}
    mask = np.where(end > 1, -np.inf, end).astype(np.float32)
    assert recognise(mask.transpose(1, 0, 2, 3), end=mask) == {"end": 0.0}
    assert recognise(shuffled(mask), end=mask) == {"end": -1.0}
    assert recognise(mask, end=end) == {"end": math.inf}, "an overflow"
    assert recognise(np.zeros(8, np.float32), end=np.zeros(8, np.float32)) == {"end": 0.0}


def test_a_wrong_value_that_only_right_ones_follow_is_another_tensor() -> None:
    errors = {"a": 0.0, "b": 1.0, "c": 0.0, "d": 1.0, "f": 1.0}
    assert DIAMOND.leading_on(errors, {"f"}, 1e-3) == {"a": 0.0, "b": 1.0, "c": 0.0, "d": 1.0, "f": 1.0}
    errors = {"b": 1.0, "d": 0.0, "f": 1.0, "e": 0.0}
    assert DIAMOND.leading_on(errors, {"f"}, 1e-3) == {"d": 0.0, "f": 1.0, "e": 0.0}


def test_models_without_a_common_tensor_are_refused() -> None:
    other = graphs.graph("g (float[2,8] x) => (float[2,8] z) { z = Tanh(x) }")
    with pytest.raises(UsageError, match="no float tensor"):
        located(network(), other)


# -- the engine of the protocol, the emulation, the command -------------------------------------
@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    np.savez(folder / "data.npz", x=SAMPLES[0]["x"])
    return {
        "good": save(network(), folder / "good.onnx"),
        "bad": save(network(5), folder / "bad.onnx"),
        "data": folder / "data.npz",
    }


def test_a_model_in_memory_and_a_profile_are_passed_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, int, object]] = []

    def stop(variants: Sequence[Variant], settings: MeasureSettings, _: Path) -> list[EngineOutcome]:
        assert variants[0].path.is_file()
        seen.append((variants[0].shapes, settings.builds, settings.timing))
        return [EngineOutcome("other", 0, "error", "not here")]

    monkeypatch.setattr("rewriter.verification.locate.measure", stop)
    profile = {"x": ((1, 8), (2, 8), (4, 8))}
    for shapes in (profile, None):
        with pytest.raises(EngineError, match="does not run: not here"):
            locate(network(), network(3), SAMPLES, ORT, profile=shapes)
    assert seen == [(profile, 1, None), ({}, 1, None)]


def test_a_model_that_does_not_run_is_an_error(files: dict[str, Path], tmp_path: Path) -> None:
    broken = network()
    broken.proto.graph.node[0].op_type = "Nothing"
    path = tmp_path / "broken.onnx"
    path.write_bytes(broken.whole().SerializeToString())
    with pytest.raises((EngineError, RewriterError)):
        locate(load(files["good"]), load(path), SAMPLES, ORT)


def test_the_emulation_finds_the_fault_in_one_run() -> None:
    original = graphs.graph("""
        g (float[2,8] x) => (float[2,8] y) <float big = {300.0}, float small = {1e-5}> {
            a = Mul(x, big)  b = Mul(a, a)  c = Mul(b, small)  y = Neg(c) }""")
    half = as_fp16(original)
    found = locate_by_emulation(original, half, [{"x": np.full((2, 8), 2.0, np.float32)}])
    assert found.first is not None
    assert (found.first.tensor, found.first.error, found.exact) == ("b", math.inf, True)
    assert found.builds == 0 and found.first.added == math.inf


def as_fp16(source: Model) -> Model:
    return retype(source, TypeRequest(lambda _s, _n: onnx.TensorProto.FLOAT16))


@values
def test_the_command_prints_the_chain(files: dict[str, Path], other: str, code: int, words: str) -> None:
    command = ["locate", str(files["good"]), str(files[other]), "--inputs", str(files["data"])]
    result = CliRunner().invoke(app, [*command, "--engine", "onnxruntime"])
    assert (result.exit_code, words in result.output) == (code, True), result.output


@values
def test_marks_leave_outputs_as_wrong_as_before(before: float, after: float | None, same: bool) -> None:
    assert _same(before, after, 5e-3) is same


@without_gpu
def test_without_a_gpu_tensorrt_is_refused_and_auto_means_emulation(files: dict[str, Path]) -> None:
    command = ["locate", str(files["good"]), str(files["bad"])]
    refused = CliRunner().invoke(app, [*command, "--engine", "tensorrt-rtx"])
    assert (refused.exit_code, "GPU" in refused.output) == (2, True)
    printed = " ".join(CliRunner().invoke(app, [*command, "-v"]).output.split())
    assert "emulation on ONNX Runtime" in printed


@pytest.mark.skipif(
    this_machine.choose().engine is None, reason="needs a GPU with TensorRT: the engine runs there"
)
def test_on_a_gpu_tensorrt_finds_the_fault(files: dict[str, Path]) -> None:
    engine = this_machine.choose().engine
    assert engine is not None
    found = locate(load(files["good"]), load(files["bad"]), SAMPLES, MeasureSettings(engine))
    assert found.first is not None and found.first.tensor in ("m5", "a5", "r5")
