"""What the table of operators refuses; tests/suites/test_parser.py asks the installed parser, too."""

from pathlib import Path

import pytest
from hazard_rules import analyzed
from operator_cases import CASES, NEWEST, OperatorCase
from paths import MODELS
from tables import values

from rewriter.hazards import target_rules
from rewriter.ir.model import load
from rewriter.target import Target, operators


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_table(case: OperatorCase) -> None:
    refused = operators.refused_in_model(case.model, case.target)
    expected = [f"{case.target} takes no {case.expected}"] if case.expected else []
    assert [one.reason for one in refused][:1] == expected


def test_every_row_with_a_condition_has_a_graph() -> None:
    rows, _ = operators._rows()
    conditions = {row.when for of_operator in rows.values() for row in of_operator if row.when}
    refused = (one for case in CASES for one in operators.refused_in_model(case.model, case.target))
    assert conditions == {one.row.when for one in refused if one.row.when}


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.onnx")), ids=lambda path: path.stem)
def test_models_that_build_are_taken(path: Path) -> None:
    refused = operators.refused_in_model(load(path), Target.parse(NEWEST))
    assert {one.row.repaired for one in refused} <= {True}, "fix stores the INT32 biases of qdq.onnx in FP32"


@values
def test_the_releases_that_a_target_may_be(target: str, every: bool, some: bool) -> None:
    """STFT takes FP16 since 11.2, and since TensorRT-RTX 1.6, the first that is expected."""
    rows, _ = operators._rows()
    (row,) = (row for row in rows["", "STFT"] if row.types)
    assert row.refuses(Target.parse(target)) is every
    assert row.refuses(Target.parse(target), every=False) is some


def test_axes_that_are_made_of_a_shape_are_no_data() -> None:
    text = """g (float[2,3] x) => (float[n,m] y) {
        s = Shape<end = 1>(x) i = Constant<value_ints = [1]>() a = Sub(s, i) y = ReduceSum(x, a) }"""
    assert not operators.refused_in_model(OperatorCase("", text).model, Target.parse(NEWEST))


def test_axes_of_a_branch_come_from_outside() -> None:
    text = """g (float[2,3] x, int64[1] i, bool c) => (float[n,m] y) {
        s = Shape<start = 0, end = 1>(x)
        y = If (c) <
            then_branch = t () => (float[n,m] a) { a = ReduceSum(x, i) },
            else_branch = e () => (float[n,m] b) { b = ReduceSum(x, s) }
        > }"""
    refused = operators.refused_in_model(OperatorCase("", text).model, Target.parse(NEWEST))
    assert [one.node.output[0] for one in refused] == ["a"]


def test_a_plugin_and_a_local_function_have_any_operator() -> None:
    model = OperatorCase("", "g (float[4] x) => (float[n] y) { y = Unique(x) }").model
    assert operators.refused_in_model(model, Target())
    assert not operators.refused_in_model(model, Target(), ["Unique:fp32"])
    model.proto.functions.add(name="Unique", domain="own")
    assert not operators.refused_in_model(model, Target())


def test_scan_warns_of_what_fix_repairs() -> None:
    text = 'g (float16[4] x) => (float16[4] z) { y = Celu(x) z = BitShift<direction = "LEFT">(y, y) }'
    found = target_rules.refused_operators(analyzed(text, opset=12))
    assert [(h.node.op_type, h.severity) for h in found] == [("Celu", "warning"), ("BitShift", "error")]
