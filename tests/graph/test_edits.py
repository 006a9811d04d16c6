"""GraphEditor: every query, every edit, and that it commits a valid graph."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import graph, ops
from hypothesis import given
from hypothesis import strategies as st
from onnx import NodeProto, TensorProto
from tables import values

from rewriter.ir.graph import (
    TAG,
    GraphEditor,
    captured,
    constant_value,
    display_name,
    open_graphs,
    reads,
)
from rewriter.ir.model import Model, check

BRANCHES = """
    g (float[4] x, bool c) => (float[4] y) <float[4] w = {1, 2, 3, 4}> {
        a = Relu(x)
        y = If (c) <
            then_branch = t () => (float[4] u) { b = Add(a, w) u = Neg(b) },
            else_branch = e () => (float[4] v) { a2 = Abs(x) v = Mul(a2, w) }
        >
    }"""
"""Both branches read tensors of the outer graph."""


Edit = Callable[[GraphEditor], object]


def _editors(source: Model, tag: str = "") -> list[GraphEditor]:
    return open_graphs(source, tag=tag)


def _editor(text: str, tag: str = "") -> GraphEditor:
    return _editors(graph(text), tag)[0]


def _node(editor: GraphEditor, op_type: str) -> NodeProto:
    (found,) = (n for n in editor.nodes if n.op_type == op_type)
    return found


VALUES = [
    pytest.param({"value": onnx.numpy_helper.from_array(np.array([1.5]))}, [1.5], np.float64, id="a tensor"),
    pytest.param({"value_float": 0.1}, np.float32(0.1), np.float32, id="a float"),
    pytest.param({"value_floats": [1.0, 2.0]}, [1, 2], np.float32, id="floats"),
    pytest.param({"value_int": 3}, 3, np.int64, id="an int"),
    pytest.param({"value_ints": [3, 4]}, [3, 4], np.int64, id="ints"),
]


class TestQuestions:
    CHAIN = (
        "g (float[2,n] x, float[2,n] k) => (float[2,n] y, float[2,n] a) "
        "<float[3] w = {1, 2, 3}, float s = {2.5}> {"
        " a = Relu(x) b = Mul(a, s) c = Neg(a) d = Add(c, c) y = Sub(b, d) z = Exp(y) }"
    )

    def test_the_index(self) -> None:
        editor = _editor(self.CHAIN)
        assert editor.producer("a") is _node(editor, "Relu")
        assert editor.producer("x") is editor.producer("w") is editor.producer("nowhere") is None
        assert [n.op_type for n in editor.consumers("a")] == ["Mul", "Neg"]
        assert editor.consumers("z") == editor.consumers("nowhere") == []
        assert editor.only_consumer("b") is _node(editor, "Sub")
        assert editor.only_consumer("c") is _node(editor, "Add"), "it reads c twice"
        assert editor.only_consumer("a") is None and editor.only_consumer("z") is None
        assert len(editor.consumers("y")) == 1 and editor.only_consumer("y") is None, "a graph output"
        assert editor.is_initializer("w") and not editor.is_initializer("a")
        assert [name for name in ("x", "a", "b", "y") if editor.is_output(name)] == ["a", "y"]
        assert (editor.dtype("a"), editor.shape("a")) == (TensorProto.FLOAT, (2, "n"))
        assert (editor.rank("a"), editor.rank("s")) == (2, 0)
        assert [editor.dtype("nowhere"), editor.shape("nowhere"), editor.rank("nowhere")] == [None] * 3

    def test_constants(self) -> None:
        editor = _editor(
            "g (float[2] x) => (float[2] y) <float[1,1] w = {3}, float[2] v = {1, 2}> {"
            " c = Constant<value_float = 0.5>() i = Identity(w) j = Identity(i) z = Neg(w)"
            " a = Add(x, c) b = Add(a, j) d = Add(z, v) e = Squeeze(d) y = Add(b, e) }"
        )
        assert editor.scalar("c") == 0.5
        assert editor.scalar("w") == editor.scalar("j") == 3.0
        assert editor.constant("z") is None and editor.constant("x") is None
        assert editor.scalar("v") is None and editor.scalar("") is None
        np.testing.assert_array_equal(editor.constant("v"), [1, 2])

    @values
    def test_axes(self, line: str, opset: int, axes: tuple[int, ...] | None) -> None:
        text = (
            "g (float[2,3] x, int64[2] k) => (float[a,b] y) <int64[2] i = {0, 1}, float[3] f = {1, 2, 3}> {"
            f" z = Neg(k) {line} }}"
        )
        editor = _editors(graph(text, opset=opset))[0]
        assert editor.axes(editor.nodes[-1]) == axes


class TestScopes:
    def test_outer_editors_come_first_and_inner_ones_know_their_parents(self) -> None:
        main, then_branch, else_branch = _editors(graph(BRANCHES))
        assert main.is_main
        assert then_branch.parent is else_branch.parent is main
        assert not then_branch.is_main

    def test_a_tensor_that_a_branch_reads_has_a_consumer(self) -> None:
        main = _editor(BRANCHES)
        assert [n.op_type for n in main.consumers("a")] == ["If"]
        assert captured(_node(main, "If")) == {"a", "w", "x"}
        assert list(reads(_node(main, "If"))) == ["c", "a", "w", "x"]

    def test_outer_tensors_are_known_inside(self) -> None:
        _, then_branch, _ = _editors(graph(BRANCHES))
        assert then_branch.dtype("a") == TensorProto.FLOAT
        assert then_branch.shape("w") == (4,)
        assert then_branch.producer("a") is None
        np.testing.assert_array_equal(then_branch.constant("w"), [1, 2, 3, 4])

    def test_redirect_reaches_into_branches(self) -> None:
        source = graph(BRANCHES)
        main = _editors(source)[0]
        main.replace_all_uses_with("a", "x")
        main.erase_if_dead("a")
        main.commit()
        check(source)
        assert ops(source) == ["If"]
        assert captured(source.proto.graph.node[0]) == {"w", "x"}

    def test_redirect_skips_a_name_that_a_loop_body_defines_itself(self) -> None:
        source = graph(
            """
            g (float[4] x, int64 n, bool c) => (float[4] y) {
                a = Relu(x)
                y = Loop (n, c, a) <body = b (int64 i, bool k, float[4] s) => (bool kk, float[4] o) {
                    kk = Identity(k) o = Add(s, a)
                }>
            }"""
        )
        main = _editors(source)[0]
        loop = _node(main, "Loop")
        loop.attribute[0].g.input[2].name = "a"  # now the body's own state has this name
        loop.attribute[0].g.node[1].input[0] = "a"
        with main:
            main.replace_all_uses_with("a", "x")
        body = source.proto.graph.node[1].attribute[0].g
        assert list(body.node[1].input) == ["a", "a"]
        assert source.proto.graph.node[1].input[2] == "x"

    def test_a_branch_may_return_an_outer_tensor(self) -> None:
        text = BRANCHES.replace("{ a2 = Abs(x) v = Mul(a2, w) }", "{ v = Identity(x) }")
        source = graph(text)
        branch = source.proto.graph.node[1].attribute[1].g
        del branch.node[:]
        branch.output[0].name = "a"
        main = _editors(source)[0]
        assert "a" in captured(_node(main, "If"))
        main.replace_all_uses_with("a", "x")
        main.commit()
        assert source.proto.graph.node[1].attribute[1].g.output[0].name == "x"

    def test_edits_inside_reach_the_model(self) -> None:
        source = graph(BRANCHES)
        main, then_branch, _ = _editors(source, tag="t")
        with then_branch:
            then_branch.replace_producer("u", then_branch.make("Exp", ["b"], ["u"]))
            then_branch.add_constant("unread", np.zeros(2, np.float32))
        with main:
            pass
        check(source)
        branch = source.proto.graph.node[1].attribute[0].g
        assert [n.op_type for n in branch.node] == ["Add", "Exp"]
        assert not branch.initializer

    def test_a_large_constant_inside_is_not_detached(self) -> None:
        source = graph(BRANCHES)
        _, then_branch, _ = _editors(source)
        name = then_branch.add_constant("big", np.ones((4, 512), np.float32))
        then_branch.set_input(_node(then_branch, "Add"), 1, name)
        then_branch.commit()
        assert not source.weights
        assert len(source.proto.graph.node[1].attribute[0].g.initializer[0].raw_data) == 4 * 512 * 4


def _substitute(tensor: str, op: str, *inputs: str) -> Edit:
    return lambda editor: editor.replace_producer(tensor, editor.make(op, inputs, [tensor]))


def _between(editor: GraphEditor) -> None:
    """Two nodes in place of one, which read what it read."""
    middle = editor.tensor("m", like="y")
    editor.replace_producer("y", editor.make("Relu", ["a"], [middle]), editor.make("Abs", [middle], ["y"]))


def _sweep(editor: GraphEditor) -> None:
    editor.erase_if_dead("a")
    editor.erase_if_dead("x")
    assert len(editor.nodes) == 4
    editor.erase_if_dead("c")


def _rename(editor: GraphEditor) -> None:
    cast = _node(editor, "Cast")
    editor.rename("a", "y")
    editor.remove(cast)
    assert editor.consumers("y") == [_node(editor, "Neg")]


def _late(editor: GraphEditor) -> None:
    editor.insert(editor.make("Exp", ["x"], ["late"]), before=None)
    editor.replace_all_uses_with("a", "late")


XY = "g (float[2] x) => (float[2] y)"
XYZ = "g (float[2] x) => (float[2] y, float[2] z)"

EDITS: list[Any] = [
    pytest.param(
        f"{XY} <float[2] w = {{1, 2}}> {{ a = Exp(x) b = Neg(a) c = Add(b, w) y = Relu(c) }}",
        _substitute("c", "Abs", "x"),
        "Abs(x) Relu(c)",
        id="substitute removes producers that only the old node needed",
    ),
    pytest.param(
        "g (float[2] x) => (float[2] y, float[2] a, float[2] z)"
        " { a = Exp(x) b = Neg(a) c = Relu(b) y = Abs(c) z = Sqrt(b) }",
        _substitute("c", "Sin", "x"),
        "Exp(x) Neg(a) Sin(x) Abs(c) Sqrt(b)",
        id="substitute keeps tensors with other consumers and graph outputs",
    ),
    pytest.param(f"{XY} {{ a = Exp(x) y = Neg(a) }}", _between, "Exp(x) Relu(a) Abs(m)", id="two for one"),
    pytest.param(
        "g (float[4] x) => (float[2] y) { a, b = Split(x) c = Neg(a) y = Add(c, b) }",
        _substitute("c", "Identity", "b"),
        "Split(x) Identity(b) Add(c,b)",
        id="a node stays if one of its outputs is used",
    ),
    pytest.param(
        f"{XY} {{ y = Neg(x) }}",
        lambda editor: editor.insert(editor.make("Relu", ["y"], ["z"]), before=None),
        "Neg(x) Relu(y)",
        id="insert at the end",
    ),
    pytest.param(
        f"{XYZ} {{ y = Neg(x) a = Exp(x) z = Abs(a) }}",
        lambda editor: editor.set_input(_node(editor, "Neg"), 0, "z"),
        "Exp(x) Abs(a) Neg(z)",
        id="nodes are sorted",
    ),
    pytest.param(BRANCHES, _late, "Relu(x) Exp(x) If(c)", id="the order respects what branches read"),
    pytest.param(
        f"{XY} {{ a = Exp(x) b = Neg(a) c = Abs(b) y = Relu(a) }}",
        _sweep,
        "Exp(x) Relu(a)",
        id="sweep removes producers up to one that is still read",
    ),
    pytest.param(
        f"{XYZ} {{ a = Exp(x) y = Cast<to = 1>(a) z = Neg(a) }}",
        _rename,
        "Exp(x) Neg(y)",
        id="rename keeps the name of an output",
    ),
]


@pytest.mark.parametrize(("text", "edit", "expected"), EDITS)
def test_an_edit_reaches_the_model_at_commit(text: str, edit: Edit, expected: str) -> None:
    source = graph(text)
    editor = _editors(source)[0]
    edit(editor)
    editor.commit()
    check(source)
    nodes = source.proto.graph.node
    assert " ".join(f"{n.op_type}({','.join(n.input)})" for n in nodes) == expected
    read = {name for node in nodes for name in reads(node)}
    assert {t.name for t in source.proto.graph.initializer} <= read


class TestEdits:
    def test_commit_without_an_edit_changes_nothing(self) -> None:
        source = graph(f"{XY} <float[2] unread = {{1, 2}}> {{ y = Neg(x) }}")
        untouched = source.copy()
        _editors(source)[0].commit()
        assert source.same_as(untouched)
        editor = _editors(source)[0]
        editor.replace_producer("y", editor.make("Abs", ["x"], ["y"]))
        assert source.same_as(untouched), "nor does an edit before it"

    def test_new_nodes_are_tagged_and_have_names_of_their_own(self) -> None:
        editor = _editor("g (float[2] x) => (float[2] y) { y = Neg(x) }", tag="some-pass")
        first, second = (editor.make("Relu", ["x"], ["r"], name="r") for _ in range(2))
        assert {first.name, second.name} == {"r", "r_1"}
        assert {(p.key, p.value) for p in first.metadata_props} == {(TAG, "some-pass")}

    def test_fresh_names_avoid_those_inside_branches(self) -> None:
        main, then_branch, _ = _editors(graph(BRANCHES))
        assert main.fresh("b") == "b_1"
        assert then_branch.fresh("b") == "b_2"
        assert main.fresh("unused") == "unused"

    def test_fresh_names_avoid_removed_tensors_that_still_have_a_type(self) -> None:
        source = graph("g (float[2] x) => (float[2] y) { y = Neg(x) }")
        source.proto.graph.value_info.add(name="gone")
        assert _editors(source)[0].fresh("gone") == "gone_1"

    def test_a_tensor_may_get_the_facts_of_another(self) -> None:
        editor = _editor("g (float[2,n] x) => (float[2,n] y) { y = Neg(x) }")
        name = editor.tensor("x", like="x", dtype=TensorProto.FLOAT16)
        assert (name, editor.dtype(name), editor.shape(name)) == ("x_1", TensorProto.FLOAT16, (2, "n"))

    def test_set_input_of_a_tensor_that_is_read_twice(self) -> None:
        editor = _editor("g (float[2] x) => (float[2] y) { a = Exp(x) y = Mul(a, a) }")
        product = _node(editor, "Mul")
        editor.set_input(product, 1, "x")
        assert editor.consumers("a") == [product]
        editor.set_input(product, 0, "x")
        assert editor.consumers("a") == []

    def test_new_constants_small_and_large(self) -> None:
        source = graph("g (float[2] x) => (float[2] y) { y = Neg(x) }")
        editor = _editors(source)[0]
        small = editor.add_constant("x", np.array(2, np.float32))
        large = editor.add_constant("big", np.ones(512, np.float32))
        unread = editor.add_constant("unread", np.ones(512, np.float32))
        assert (small, large, unread) == ("x_1", "big", "unread")
        assert editor.scalar(small) == 2
        assert editor.shape(large) == (512,)
        wide = editor.tensor("wide")
        editor.insert(editor.make("Add", [small, large], [wide]), before=None)
        editor.commit()
        assert source.weights.keys() == {"big"}
        assert [t.name for t in source.proto.graph.initializer] == ["x_1", "big"]

    def test_an_unread_initializer_is_removed_with_its_input_and_weight(self) -> None:
        values = ", ".join(["1"] * 512)
        source = graph(
            f"g (float[512] x, float[512] w) => (float[512] y) "
            f"<float[512] w = {{{values}}}> {{ a = Add(x, w) y = Neg(a) }}"
        )
        tensor = source.proto.graph.initializer[0]
        tensor.CopyFrom(source.detached_tensor("w", np.ones(512, np.float32)))
        editor = _editors(source)[0]
        editor.replace_producer("a", editor.make("Relu", ["x"], ["a"]))
        editor.commit()
        check(source)
        assert not source.weights and not source.proto.graph.initializer
        assert [v.name for v in source.proto.graph.input] == ["x"]


class TestFunctions:
    @pytest.mark.parametrize(("attributes", "wanted", "dtype"), VALUES)
    def test_constant_value(self, attributes: dict[str, object], wanted: object, dtype: type) -> None:
        found = constant_value(onnx.helper.make_node("Constant", [], ["c"], **attributes))  # type: ignore[arg-type]
        assert found is not None and found.dtype == dtype
        np.testing.assert_array_equal(found, wanted)

    def test_a_string_constant_has_no_array(self) -> None:
        assert constant_value(onnx.helper.make_node("Constant", [], ["c"], value_string="s")) is None


UNARY = ["Relu", "Neg", "Abs", "Tanh"]


@st.composite
def _graphs(draw: st.DrawFn) -> Model:
    """Unary and binary nodes over all earlier tensors, some of which a branch reads or are graph outputs."""
    names = ["x"]
    lines = []
    for index in range(draw(st.integers(2, 12))):
        first, second = (draw(st.sampled_from(names)) for _ in range(2))
        kind = draw(st.sampled_from(["unary", "binary", "branch"]))
        name = f"t{index}"
        if kind == "unary":
            lines.append(f"{name} = {draw(st.sampled_from(UNARY))}({first})")
        elif kind == "binary":
            lines.append(f"{name} = Add({first}, {second})")
        else:
            lines.append(
                f"{name} = If (c) <"
                f" then_branch = b{index} () => (float[3] u{index}) {{ u{index} = Neg({first}) }},"
                f" else_branch = e{index} () => (float[3] v{index}) {{ v{index} = Abs({second}) }}>"
            )
        names.append(name)
    outputs = draw(st.lists(st.sampled_from(names[1:]), min_size=1, unique=True))
    listed = ", ".join(f"float[3] {name}" for name in outputs)
    return graph(f"g (float[3] x, bool c) => ({listed}) {{ {' '.join(lines)} }}")


@given(_graphs(), st.data())
def test_the_index_stays_correct_after_edits(source: Model, data: st.DataObject) -> None:
    """After any redirects, producers and consumers equal those of a fresh editor."""
    editor = _editors(source)[0]
    tensors = ["x", *(name for node in editor.nodes for name in node.output)]
    for _ in range(data.draw(st.integers(1, 4))):
        later, earlier = sorted(data.draw(st.tuples(*[st.integers(0, len(tensors) - 1)] * 2)), reverse=True)
        if earlier == 0 or editor.producer(tensors[earlier]) is not None:
            editor.replace_all_uses_with(tensors[later], tensors[earlier])
            editor.erase_if_dead(tensors[later])
    editor.commit()
    check(source)
    fresh = GraphEditor(source, source.proto.graph, {}, set)
    for name in tensors:
        assert _shown(editor.producer(name)) == _shown(fresh.producer(name))
        assert sorted(map(display_name, editor.consumers(name))) == sorted(
            map(display_name, fresh.consumers(name))
        )


def _shown(node: NodeProto | None) -> str | None:
    return None if node is None else display_name(node)
