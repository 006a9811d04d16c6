"""The driver's contract: what a broken pass does is caught, named, and for imported passes rolled back."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx.parser
import pytest
from graphs import graph, ops
from onnx_text import with_header
from tables import values

from rewriter.base.errors import PassError, UsageError
from rewriter.ir.graph import TAG, GraphEditor, display_name
from rewriter.ir.model import Model, load, save
from rewriter.passes.base import Change, Context, Event, GraphPass, ModelPass, Pass, Refusal, Requires
from rewriter.pipeline.driver import Driver
from rewriter.target import Target

TEXT = "g (float[2] x) => (float[2] y) { a = Exp(x) y = Neg(a) }"
Rewrite = Callable[[Model], Iterator[Event]]


@dataclass(frozen=True)
class _Inline(ModelPass):
    """A pass out of a function."""

    name = "broken"
    body: Rewrite = field(default=lambda model: iter(()))

    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        yield from self.body(model)


@dataclass(frozen=True)
class _Imported(_Inline):
    name = "imported"
    imported = True


@dataclass(frozen=True)
class _FreeSignature(_Inline):
    name = "free-signature"
    keeps_signature = False


@dataclass(frozen=True)
class _NegToAbs(GraphPass):
    """Replaces Neg, and refuses Exp."""

    name = "neg-to-abs"

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for node in graph.nodes:
            if node.op_type == "Neg":
                graph.replace_producer(node.output[0], graph.make("Abs", node.input, node.output))
                yield Change(display_name(node), "Neg became Abs")
            elif node.op_type == "Exp":
                yield Refusal(display_name(node), "Exp stays")


def _run(source: Model, *passes: Pass) -> tuple[Model, list[str]]:
    result, reports = Driver().run(source, passes, Context())
    return result, [r.reason for report in reports for r in report.refusals]


def _becomes(text: str, *, told: bool = True) -> Rewrite:
    """A pass that makes another graph of the model, and reports a change or none."""

    def rewrite(model: Model) -> Iterator[Event]:
        model.proto.graph.CopyFrom(onnx.parser.parse_model(with_header(text)).graph)
        yield Change("y", "rewritten") if told else Refusal("y", "nothing done")

    return rewrite


X = "g (float[2] x) => (float[2] y) { a = Exp(x)"
RENAMED = _becomes("g (float[2] x) => (float[2] z) { a = Exp(x) z = Neg(a) }")
UNSORTED = _becomes("g (float[2] x) => (float[2] y) { y = Neg(a) a = Exp(x) }")
TYPED = _becomes("g (float[2] x) => (bool[2] y) { a = Exp(x) y = IsNaN(a) }")
LONGER = _becomes("g (float[3] x) => (float[2] y) { a = Exp(x) y = Neg(a) }")
BROKEN = [
    pytest.param(RENAMED, "inputs or outputs changed", id="renames an output"),
    pytest.param(TYPED, "inputs or outputs changed", id="changes an output's type"),
    pytest.param(LONGER, "inputs or outputs changed", id="changes an input's shape"),
    pytest.param(_becomes(f"{X} y = Neg(nowhere) }}"), "the graph is invalid", id="reads what is not there"),
    pytest.param(
        _becomes(f"{X} y = Transpose<perm = [1, 0]>(a) }}"),
        "types or shapes contradict",
        id="contradicts a shape",
    ),
    pytest.param(
        _becomes(f"{X} y = Sqrt(a) }}", told=False), "it reports no change, but the model", id="silent"
    ),
    pytest.param(UNSORTED, "topologically sorted", id="leaves nodes unsorted"),
]


@pytest.mark.parametrize(("body", "message"), BROKEN)
def test_a_broken_pass_is_named_with_those_before_it(body: Rewrite, message: str) -> None:
    source = graph(TEXT)
    untouched = source.copy()
    with pytest.raises(PassError) as caught:
        _run(source, _NegToAbs(), _FreeSignature(), _Inline(body))
    text = str(caught.value)
    assert message in text and "pass broken broke its contract" in text
    assert "`skip=broken`" in text and "passes before it: neg-to-abs, free-signature" in text
    assert source.same_as(untouched)


@pytest.mark.parametrize(("body", "message"), BROKEN)
def test_an_imported_pass_is_rolled_back(body: Rewrite, message: str) -> None:
    source = graph(TEXT)
    result, refusals = _run(source, _Imported(body), _NegToAbs())
    assert ops(result) == ["Exp", "Abs"]
    assert refusals[0].startswith("rolled back: ")
    assert message in refusals[0]


def test_the_error_names_the_file_and_that_no_pass_came_before(tmp_path: Path) -> None:
    path = save(graph(TEXT), tmp_path / "model.onnx")
    with pytest.raises(PassError, match=r"(?s)model\.onnx: pass broken .*passes before it: none"):
        _run(load(path), _Inline(UNSORTED))


def _fails(model: Model) -> Iterator[Event]:
    model.proto.graph.node[1].op_type = "Sqrt"
    raise ZeroDivisionError


def test_an_exception_inside_a_pass_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        _run(graph(TEXT), _Inline(_fails))


@pytest.mark.parametrize(
    ("body", "message"), [*BROKEN, pytest.param(_fails, "ZeroDivisionError: ", id="raises")]
)
def test_a_lenient_driver_goes_on_without_a_pass_that_fails(body: Rewrite, message: str) -> None:
    passes = (_Inline(body), _NegToAbs())
    result, (failed, other) = Driver(lenient=True).run(graph(TEXT), passes, Context())
    assert message in failed.failure and not failed.changes
    assert ops(result) == ["Exp", "Abs"] and other.changes and not other.failure


@dataclass(frozen=True)
class _ExpToMul(GraphPass):
    """Replaces Exp by a product with a detached weight."""

    name = "exp-to-mul"

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for node in [node for node in graph.nodes if node.op_type == "Exp"]:
            weight = graph.add_constant("w", np.ones(600, np.float32))
            graph.replace_producer(node.output[0], graph.make("Mul", [node.input[0], weight], node.output))
            yield Change(display_name(node), "Exp became Mul")


def test_a_pass_that_fails_takes_nothing_back_from_those_before_it() -> None:
    def fails(model: Model) -> Iterator[Event]:
        model.weights.clear()
        yield from _fails(model)

    source = graph("g (float[600] x) => (float[600] y) { a = Exp(x) y = Neg(a) }")
    before, after = [_NegToAbs(), _ExpToMul()], [_Looking(), _Inline(lambda _: iter(()))]
    driver = Driver(lenient=True)
    result, _ = driver.run(source, [*before, _Inline(fails), *after], Context())
    expected, _ = driver.run(source, before, Context())
    assert ops(result) == ["Mul", "Abs"] and result.proto == expected.proto
    assert np.array_equal(result.weights["w"], expected.weights["w"])


def test_a_pass_may_change_the_signature_if_it_says_so() -> None:
    result, _ = _run(graph(TEXT), _FreeSignature(RENAMED))
    assert result.signature.outputs[0].name == "z"


def test_a_model_that_contradicts_itself_is_not_held_against_a_pass() -> None:
    source = graph("g (float[2,3] x) => (float[7] y) { a = Relu(x) y = Neg(a) }")
    result, _ = _run(source, _NegToAbs())
    assert ops(result) == ["Relu", "Abs"]


def test_results_come_in_order_with_their_events() -> None:
    source = graph(TEXT)
    seen: list[str] = []
    driver = Driver(on_pass=lambda step: seen.append(step.name))
    result, reports = driver.run(source, [_Inline(), _NegToAbs(), _NegToAbs()], Context())
    assert [r.name for r in reports] == seen == ["broken", "neg-to-abs", "neg-to-abs"]
    assert [len(r.changes) for r in reports] == [0, 1, 0]
    assert [len(r.refusals) for r in reports] == [0, 1, 1]
    assert all(r.seconds >= 0 for r in reports)
    assert ops(result) == ["Exp", "Abs"]
    assert ops(source) == ["Exp", "Neg"]


def test_no_passes_give_the_model_back() -> None:
    source = graph(TEXT)
    assert _run(source) == (source, [])


def test_every_subgraph_is_visited_once() -> None:
    source = graph("""
        g (float[2] x, bool c, int64 n) => (float[2] y, float[2] z) {
            z = Neg(x)
            y = If (c) <
                then_branch = t () => (float[2] u) {
                    u = Loop (n, c, x) <body = b (int64 i, bool k, float[2] s) => (bool kk, float[2] o)
                        { kk = Identity(k) o = Neg(s) }> },
                else_branch = e () => (float[2] v) { v = Neg(z) }> }""")
    result, reports = Driver().run(source, [_NegToAbs()], Context())
    assert len(reports[0].changes) == 3
    text = str(result.proto.graph)
    assert "Neg" not in text
    assert text.count(TAG) == 3


def test_names_made_in_one_subgraph_are_not_made_in_another() -> None:
    @dataclass(frozen=True)
    class Naming(GraphPass):
        """Gives every Neg a constant, always asking for the same name."""

        name = "naming"

        def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
            for node in graph.nodes:
                if node.op_type == "Neg":
                    one = graph.add_constant("one", np.ones(2, np.float32))
                    graph.replace_producer(
                        node.output[0], graph.make("Mul", [node.input[0], one], node.output)
                    )
                    yield Change(display_name(node), "Neg became Mul")

    source = graph("""
        g (float[2] x, bool c) => (float[2] y, float[2] z) {
            z = Neg(x)
            y = If (c) <then_branch = t () => (float[2] u) { u = Neg(x) },
                        else_branch = e () => (float[2] v) { v = Neg(z) }> }""")
    result, _ = Driver().run(source, [Naming()], Context())
    (outer,) = (t.name for t in result.proto.graph.initializer)
    inner = [t.name for a in result.proto.graph.node[1].attribute for t in a.g.initializer]
    assert len({outer, *inner}) == 3


@dataclass(frozen=True)
class _Looking(GraphPass):
    """Changes nothing, and notes what it saw; takes a name, if it shall."""

    name = "looking"
    seen: list[tuple[GraphEditor, list[str], str]] = field(default_factory=list)
    takes: bool = False

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        name = graph.fresh("new") if self.takes else ""
        self.seen.append((graph, [node.op_type for node in graph.nodes], name))
        yield Refusal("g", "nothing done")


@dataclass(frozen=True)
class _TooNew(_NegToAbs):
    name = "too-new"
    requires: ClassVar[Requires] = Requires(opset=99)


def test_passes_that_change_nothing_share_an_editor_with_the_tag_of_each() -> None:
    looking = _Looking()
    result, _ = _run(graph(TEXT), looking, looking, _NegToAbs(), looking)
    (first, _, _), (second, _, _), (third, after, _) = looking.seen
    assert first is second
    assert third is not second
    assert after == ["Exp", "Abs"]
    tags = [entry.value for node in result.proto.graph.node for entry in node.metadata_props]
    assert tags == ["neg-to-abs"]


def test_a_name_that_a_pass_took_in_vain_is_free_for_the_next() -> None:
    looking = _Looking(takes=True)
    _run(graph(TEXT), looking, looking)
    assert [name for _, _, name in looking.seen] == ["new", "new"]


def test_changes_that_a_model_is_too_old_for_are_not_seen_by_the_next_pass() -> None:
    looking = _Looking()
    result, _ = _run(graph(TEXT), _Looking(), _TooNew(), looking)
    assert [seen for _, seen, _ in looking.seen] == [["Exp", "Neg"]]
    assert ops(result) == ["Exp", "Neg"]


@values
def test_targets(text: str, library: str, version: tuple[int, ...], shown: str) -> None:
    target = Target.parse(text)
    assert (target.library, target.version, str(target)) == (library, version, shown)


@pytest.mark.parametrize("text", ["", "  ", "onnxruntime", "10.", "tensorrt-rtx-1.6x", "tensorrt-rtx 1.03"])
def test_unknown_targets(text: str) -> None:
    with pytest.raises(UsageError, match="unknown target"):
        Target.parse(text)


CONSTANT = (
    "g (float[2] x) => (float[2] y) { k = Constant<value = float[2] {2, 3}>() a = Mul(x, k) y = Neg(a) }"
)


def test_every_pass_finds_weights_of_constants_as_initializers() -> None:
    seen: list[str] = []

    def look(model: Model) -> Iterator[Event]:
        seen.extend(tensor.name for tensor in model.proto.graph.initializer)
        yield from ()

    result, _ = _run(graph(CONSTANT), _Inline(look), _NegToAbs())
    assert seen == ["k"]
    assert ops(result) == ["Mul", "Abs"]


def test_constants_stay_where_no_pass_changes_anything() -> None:
    source = graph(CONSTANT)
    result, _ = _run(source, _Inline())
    assert result is source
