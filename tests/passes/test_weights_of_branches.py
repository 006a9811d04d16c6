"""Passes that replace weights, in a branch of an If: they copy no weights of the enclosing graph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from graphs import apply, graph, random_feeds, run

from rewriter.base import Context, Pass, Target
from rewriter.model import Model
from rewriter.passes.merge_branches import MergeBranches
from rewriter.passes.merge_projections import MergeProjections
from rewriter.passes.postpone_resize import PostponeResize
from rewriter.passes.transpose_convs import NEEDED_ANSWERS, TransposeConvs
from rewriter.passes.unfold_patches import UnfoldPatches

CONTEXT = Context(target=Target(answers=NEEDED_ANSWERS))


@dataclass(frozen=True)
class Case:
    """A pass, the types of x and y, constants, both branches, and what the pass makes of the first.

    Attributes:
        refusals: How many nodes the pass declines if the constants belong to the outer graph.
    """

    step: Pass
    x: str
    y: str
    constants: str
    body: str
    other: str
    operators: tuple[str, ...]
    refusals: int = 1

    def model(self, *, inside: bool) -> Model:
        held = f"<{self.constants}>"
        return graph(
            f"""
            g ({self.x} x, bool c) => ({self.y} y) {"" if inside else held} {{
                y = If (c) <
                    then_branch = t () => ({self.y} u) {held if inside else ""} {{ {self.body} }},
                    else_branch = e () => ({self.y} v) {{ {self.other} }}
                >
            }}"""
        )


CASES = [
    Case(
        MergeBranches(),
        "float[1,1,4,4]",
        "float[1,1,4,4]",
        "float[1,1,1,1] w = {1}, float[1,1,1,1] r = {2}",
        "p = Conv(x, w) q = Conv(x, r) u = Add(p, q)",
        "v = Relu(x)",
        ("Conv",),
    ),
    Case(
        MergeProjections(),
        "float[3,2]",
        "float[3,2]",
        "float[2,2] a = {1, 2, 3, 4}, float[2,2] b = {4, 3, 2, 1}",
        "q = MatMul(x, a) k = MatMul(x, b) u = Add(q, k)",
        "v = Neg(x)",
        ("MatMul", "Add", "Split", "Add"),
        refusals=2,
    ),
    Case(
        PostponeResize(work=0),
        "float[1,2,2,2]",
        "float[1,1,4,4]",
        "float[1,2,1,1] w = {1, 2}, float[4] twice = {1, 1, 2, 2}",
        'p = Resize<mode = "linear">(x, , twice) u = Conv(p, w)',
        "shape = Constant<value_ints = [1, 1, 4, 4]>() v = ConstantOfShape(shape)",
        ("Conv", "Resize"),
    ),
    Case(
        TransposeConvs(depth=1, work=0),
        "float[1,1,4,4]",
        "float[1,1,3,3]",
        "float[1,1,2,2] w = {1, 2, 3, 4}",
        "u = Conv(x, w)",
        "v = MaxPool<kernel_shape = [2, 2]>(x)",
        ("ConvTranspose",),
    ),
    Case(
        UnfoldPatches(),
        "float[1,1,4,4]",
        "float[1,1,2,2]",
        "float[1,1,2,2] w = {1, 2, 3, 4}",
        "u = Conv<strides = [2, 2]>(x, w)",
        "v = MaxPool<kernel_shape = [3, 3]>(x)",
        ("Reshape", "Transpose", "Reshape", "MatMul", "Add", "Transpose", "Reshape"),
    ),
]
every_case = pytest.mark.parametrize("case", [pytest.param(case, id=case.step.name) for case in CASES])


@every_case
def test_weights_of_a_branch_are_replaced_in_it(case: Case) -> None:
    before = case.model(inside=True)
    after, _ = apply(case.step, before, CONTEXT)
    branch = next(a.g for a in after.proto.graph.node[0].attribute if a.name == "then_branch")
    assert tuple(node.op_type for node in branch.node) == case.operators
    for condition in (True, False):
        feeds = random_feeds(before) | {"c": np.asarray(condition)}
        np.testing.assert_allclose(run(after, feeds)[0], run(before, feeds)[0], rtol=1e-5, atol=1e-6)


@every_case
def test_weights_of_an_enclosing_graph_are_not_copied(case: Case) -> None:
    before = case.model(inside=False)
    after, report = apply(case.step, before, CONTEXT)
    assert after is before
    assert ["enclosing graph" in refusal.reason for refusal in report.refusals] == [True] * case.refusals
