"""Measured tensors in the order of the network's depth."""

import graphs

from rewriter.ir.plan import Range
from rewriter.runtime.ranges.depth import along_depth

RANGE = Range(0.0, 1.0, 0.5, True)

SOURCE = """
    g (float[2] x, bool c) => (float[2] y) <float[2] w = {1, 2}> {
        k = Constant <value = float {3.0}> ()
        a = Mul(x, w)
        n = Shape(a)
        b = Add(a, w)
        d = Mul(b, k)
        y = If(c) <
            then_branch = t () => (float[2] u) <float[2] v = {3, 4}> { u = Mul(d, v) },
            else_branch = e () => (float[2] z) { z = Neg(d) }
        >
    }"""


def test_nodes_with_ranges_count_and_constants_stand_at_their_first_reader() -> None:
    names = [(0, name) for name in "wkabdy"] + [(1, "u"), (1, "v")]
    rows = along_depth(graphs.graph(SOURCE), dict.fromkeys(names, RANGE))
    assert [(t.depth, t.tensor, t.op, t.constant) for t in rows] == [
        (0, "a", "Mul", False),
        (0, "w", "Mul", True),
        (1, "b", "Add", False),
        (2, "d", "Mul", False),
        (2, "k", "Mul", True),
        (3, "y", "If", False),
        (4, "u", "Mul", False),
        (4, "v", "Mul", True),
    ]
    assert {t.key for t in rows if t.tensor in "wau"} == {"0:a", "1:u"}


def test_a_node_without_a_range_does_not_count() -> None:
    rows = along_depth(graphs.graph(SOURCE), dict.fromkeys([(0, "w"), (0, "b"), (0, "d")], RANGE))
    assert [(t.depth, t.tensor) for t in rows] == [(0, "w"), (0, "b"), (1, "d")]
