"""Texts of nodes with calls and numbers as operands."""

from tables import values

from rewriter.ir.graph.node_list import spelled_out


@values
def test_operands_become_nodes(text: str, expected: str) -> None:
    assert spelled_out(text).replace("{}", "{ }").split() == expected.split()
