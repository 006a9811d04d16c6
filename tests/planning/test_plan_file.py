"""Plans as files: they read back unchanged, and a plan that does not fit is refused with the node."""

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import pytest
from command_lines import invoke
from paths import DOCS
from tables import values

import rewriter
from rewriter.base.errors import OutputError, UsageError
from rewriter.cli import exits
from rewriter.hazards.planning.free_fp32 import FREE
from rewriter.hazards.planning.planner import fit
from rewriter.ir.model import Model, save
from rewriter.ir.plan import Decision, Plan, Range, plan_file

PAGE = DOCS / "plans.md"
DECISION = Decision("n", "Mul", "0:y", "overflow", "y exceeds 3e4", "y", Range(-1.5, 9e4, 0.1, True))
OPEN = Range(-math.inf, math.inf, math.nan, False)

CHAIN = """
    g (float[4] x) => (float[4] y) {
        [first] a = Exp(x) [twin] b = Neg(a) [twin] c = Abs(b) y = Sqrt(c) }"""


def fitted(plan: Plan, model: Model) -> Plan:
    return fit(model, plan, "p.json")


def plan_of(*entries: dict[str, Any], **fields: Any) -> str:
    head = {"schema": "rewriter-plan", "version": 1, "precision": "fp16"}
    return json.dumps({**head, "fp32": list(entries), **fields})


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan("fp16"), id="nothing in FP32"),
        pytest.param(Plan("bf16", "fp32", (DECISION,), 12), id="evidence and all"),
        pytest.param(Plan("fp16", "fp16,y=fp32", plugin_types=("Roi:fp16,int32:fp32",)), id="types of ports"),
        pytest.param(Plan("fp16", "keep", (Decision("n", "Exp", "1:é", "user", "ü"),), 1), id="not ASCII"),
        pytest.param(Plan("fp16", decisions=(replace(DECISION, repair="bf16"),)), id="an island in BF16"),
        pytest.param(Plan("fp16", norms_in_range=frozenset({"b", "a"})), id="norms in range"),
    ],
)
def test_a_written_plan_reads_back_unchanged(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert plan_file.read(path) == plan
    assert path.read_text(encoding="utf-8") == plan_file.to_text(plan)


def test_infinities_survive_in_standard_json() -> None:
    text = plan_file.to_text(Plan("fp16", decisions=(Decision("n", "Exp", "0:y", "r", "why", "y", OPEN),)))
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    found = plan_file.from_text(text).decisions[0].range
    assert found is not None and (found.low, found.high) == (-math.inf, math.inf)
    assert math.isnan(found.mean_abs)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("{", "not JSON line 1", id="no JSON"),
        pytest.param(
            plan_of(version=1)[:-1] + ', "float_nodes": ' + "9" * 5000 + "}", "not JSON", id="digits"
        ),
        pytest.param("[" * 900 + "]" * 900, "not JSON recursion", id="900 levels"),
        pytest.param("[]", "not a plan `save-plan`", id="another JSON"),
        pytest.param(plan_of(version=2), "version 2", id="a newer version"),
        pytest.param(plan_of(precision="fp8"), "'precision' 'fp8' 'fp16' 'bf16'", id="no precision"),
        pytest.param(plan_of(precision="fp32"), "'precision' 'fp32'", id="FP32 is no plan"),
        pytest.param(plan_of(io="fp64"), "'io' 'fp64' is no type NAME=fp16", id="unknown types of inputs"),
        pytest.param(plan_of(plugin_types=["A:fp8"]), "plugin_types 'fp8' OP:fp16", id="no type of a port"),
        pytest.param(plan_of(float_nodes=True), "'float_nodes' True int", id="a wrong type"),
        pytest.param(plan_of(fp16=[]), "no field 'fp16'", id="a field that does not exist"),
        pytest.param(plan_of(norms_in_range=["b", 1]), "norms_in_range: 1 string", id="no text"),
        pytest.param(plan_of({"nod": "first"}), "fp32[0] no field 'nod'", id="a field of a node"),
        pytest.param(plan_of({"op": "Exp"}), "fp32[0] no node is named", id="no node"),
        pytest.param(plan_of("first"), "fp32: item 0 'first' object", id="a bare name"),  # type: ignore[arg-type]
        pytest.param(plan_of({"node": "n", "range": {"low": 1}}), "fp32[0] range high", id="half a range"),
        pytest.param(
            plan_of({"node": "n", "range": {"low": "a", "high": 1, "mean_abs": 1, "finite": True}}),
            "fp32[0] range 'a'",
            id="no number",
        ),
    ],
)
def test_a_file_that_is_no_plan_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_file.from_text(text, "p.json")
    assert all(word in str(caught.value) for word in ["p.json", *words.split()])


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["absent", "binary"])
def test_a_file_that_cannot_be_read_is_named(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=re.escape("plan.json")):
        plan_file.read(path)


def test_a_plan_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write the plan"):
        Plan("fp16").save(tmp_path / "absent" / "plan.json")


BRANCHES = """
    g (float[2] x, bool c) => (float[2] y) {
        y = If(c) <
            then_branch = t () => (float[2] p) { h = Exp(x)\n p = Neg(h) },
            else_branch = e () => (float[2] p) { h = Exp(x)\n p = Neg(h) }
        >
    }"""


@pytest.mark.parametrize(
    ("text", "entries", "keys"),
    [
        pytest.param(CHAIN, [{"key": "0:b"}], ["0:b"], id="by key"),
        pytest.param(CHAIN, [{"node": "first"}], ["0:a"], id="by name"),
        pytest.param(CHAIN, [{"node": "Sqrt(y)"}], ["0:y"], id="without a name, as messages call it"),
        pytest.param(CHAIN, [{"node": "twin", "key": "0:c", "op": "Abs"}], ["0:c"], id="the key decides"),
        pytest.param(
            CHAIN,
            [{"key": "0:y"}, {"node": "first"}, {"key": "0:a"}],
            ["0:a", "0:y"],
            id="in the model's order, once",
        ),
        pytest.param(BRANCHES, [{"key": "2:h"}], ["2:h"], id="subgraphs have keys of their own"),
    ],
)
def test_nodes_are_found(text: str, entries: list[dict[str, str]], keys: list[str]) -> None:
    plan = fitted(plan_file.from_text(plan_of(*entries)), graphs.graph(text, opset=17, ir=10))
    assert [d.key for d in plan.decisions] == keys


CONV = "g (float[1,1,4,4] x, float[1,1,3,3] w) => (float[1,1,2,2] y) { y = Conv(x, w) }"


@pytest.mark.parametrize(
    ("text", "plan", "words"),
    [
        pytest.param(CHAIN, plan_of({"node": "frist"}), "did you mean 'first'?", id="a typing error"),
        pytest.param(CHAIN, plan_of({"key": "0:z", "node": "n"}), "float node n (key 0:z)", id="unknown"),
        pytest.param(CHAIN, plan_of({"key": "0:a", "op": "Log"}), "is Log in the plan and Exp", id="another"),
        pytest.param(CHAIN, plan_of(float_nodes=7), "7 float nodes, and this one has 4", id="number"),
        pytest.param(BRANCHES, plan_of({"node": "Exp(h)"}), '2 nodes give its "key": 1:h, 2:h', id="twins"),
        pytest.param(CONV, plan_of(bf16=[{"key": "0:y"}]), "Conv has no BF16 22", id="no BF16"),
    ],
)
def test_plans_that_do_not_fit_are_refused(text: str, plan: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        fitted(plan_file.from_text(plan), graphs.graph(text, opset=17, ir=10))
    assert str(caught.value).startswith("p.json: ")
    assert all(word in str(caught.value) for word in words.split())


# -- through fix ---------------------------------------------------------------------------------
LARGE = """
    g (float[1,4] x) => (float[1,4] y)
    <float[4,4] w = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}, float k = {200.0}> {
        [gemm] m = MatMul(x, w) [large] s = Mul(m, k) [root] r = Abs(s) [back] y = Div(r, k) }"""
FEEDS = {"x": np.full((1, 4), 10, np.float32)}
QUICK = {"inputs": FEEDS, "build": False, "skip": ("simplify", "rescale")}


def fix(source: Model, output: Path | None = None, **options: Any) -> rewriter.FixResult:
    return rewriter.fix(source.whole(), output, **{**QUICK, **options})


def test_a_saved_plan_applied_gives_the_same_bytes(tmp_path: Path) -> None:
    source = graphs.graph(LARGE)
    first = fix(source, tmp_path / "1.onnx", save_plan=tmp_path / "1.json")
    again = fix(source, tmp_path / "2.onnx", save_plan=tmp_path / "2.json")
    applied = fix(source, tmp_path / "3.onnx", plan=tmp_path / "1.json", save_plan=tmp_path / "3.json")
    assert first.plan is not None and first.plan.fp32 and first.plan == again.plan == applied.plan
    for kind in ("onnx", "json"):
        assert len({(tmp_path / f"{n}.{kind}").read_bytes() for n in (1, 2, 3)}) == 1
    assert not applied.repairs and "measuring ranges" in applied.seconds  # the means that weights keep
    nearest = fix(source, plan=tmp_path / "1.json", preset="trt11-migrate")
    assert "measuring ranges" not in nearest.seconds


def test_an_edited_plan_is_applied_exactly(tmp_path: Path) -> None:
    source = graphs.graph(LARGE)
    path = tmp_path / "plan.json"
    fix(source, save_plan=path)
    fields = json.loads(path.read_text())
    fields["fp32"] = [{"node": "gemm"}]
    path.write_text(json.dumps(fields))
    result = fix(source, plan=path)
    assert result.plan is not None and [d.node for d in result.plan.decisions] == ["gemm"]
    types = {name: f.dtype for name, f in result.model.facts().main.items()}
    assert (types["m"], types["s"], types["r"]) == (1, 10, 10)
    assert result.verdict is not None and not result.verdict.passed, "the overflow that the rules had seen"


def test_rescaled_tensors_are_a_part_of_the_plan(tmp_path: Path) -> None:
    source = graphs.graph(LARGE)
    first = fix(source, tmp_path / "1.onnx", save_plan=tmp_path / "1.json", skip=("simplify",))
    assert first.plan is not None and first.plan.exponents
    assert all(d.rule in FREE for d in first.plan.decisions)
    applied = fix(
        source,
        tmp_path / "2.onnx",
        plan=tmp_path / "1.json",
        save_plan=tmp_path / "2.json",
        skip=("simplify",),
    )
    assert applied.plan == first.plan
    for kind in ("onnx", "json"):
        assert (tmp_path / f"1.{kind}").read_bytes() == (tmp_path / f"2.{kind}").read_bytes()


@values
def test_other_exponents_are_refused(tmp_path: Path, exponents: dict[str, float], message: str) -> None:
    fields = json.loads(plan_file.to_text(Plan("fp16"))) | {"rescaled": exponents}
    (tmp_path / "plan.json").write_text(json.dumps(fields))
    with pytest.raises(UsageError, match=f"(?s){message}"):
        fix(graphs.graph(LARGE), plan=tmp_path / "plan.json", skip=("simplify",))


@values
def test_options_that_contradict_a_plan_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        fix(graphs.graph(LARGE), plan=Plan("fp16"), **options)


def test_a_plan_of_another_model_writes_nothing(tmp_path: Path) -> None:
    path = save(graphs.graph(LARGE), tmp_path / "m.onnx")
    (tmp_path / "p.json").write_text(plan_of({"key": "0:elsewhere", "node": "/enc/Softmax"}))
    outcome = invoke("fix", path, "-o", tmp_path / "f.onnx", "--plan", tmp_path / "p.json", "--no-build")
    assert outcome.exit_code == exits.BAD_INPUT
    assert "/enc/Softmax" in outcome.stderr and "p.json" in outcome.stderr
    assert not (tmp_path / "f.onnx").exists()


FIELDS = (plan_file.PlanFields, plan_file.NodeFields, plan_file.RangeFields)


def test_the_documentation_shows_a_plan_and_every_field() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", text, re.S)
    assert plan_file.from_text(example).decisions[0].rule == "overflow"
    for kind, name in [(one, f.name) for one in FIELDS for f in fields(one) if f.name != "headroom"]:
        assert (f'"{name}"' if kind is plan_file.RangeFields else f"`{name}`") in text
