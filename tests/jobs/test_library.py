"""`import rewriter`: verbs of one shape, errors that name options by their keys, results in a few lines."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from graphs import graph
from paths import ROOT
from searching import HOPELESS
from tables import values

import rewriter
from rewriter.base.errors import ModelError, UsageError
from rewriter.hazards import GraphAnalysis, Hazard
from rewriter.ir.graph import GraphEditor, display_name
from rewriter.jobs.fix.job import Phases
from rewriter.passes.base import Change, Context, Event, GraphPass
from rewriter.pipeline.options import EVERY, with_flags
from rewriter.pipeline.text import parse
from rewriter.report import html

SMALL = """
    g (float[2,3] x) => (float[2,4] y) <float[3,4] w = {1,2,3,4,5,6,7,8,9,10,11,12}> {
        m = MatMul(x, w) y = Relu(m) }"""


def small() -> rewriter.Model:
    return graph(SMALL)


@dataclass(frozen=True)
class TagRelu(GraphPass):
    """A user's pass: nothing in it is for a registry, and a field holds what no text can."""

    name = "tag-relu"
    names: Callable[[str], str] = str.lower

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for node in graph.nodes:
            if node.op_type == "Relu" and node.name != "tagged":
                node.name = self.names("TAGGED")
                yield Change(display_name(node), "tagged")


def every_product(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """A user's rule."""
    for node in analysis.nodes:
        if node.op_type == "MatMul":
            yield Hazard(node, "our-products", "products of this network are delicate")


def called(call: str) -> Any:
    """The value of a call as a user writes it, of a small model `m`."""
    names = {name: getattr(rewriter, name) for name in rewriter.__all__}
    return eval(call, {**names, "np": np, "as_html": html.as_html, "m": small()})


WRONG_CALLS = {
    "fix(m, keep_fp23='x')": r"(?s)`keep_fp23`.*did you mean `keep-fp32`",
    "fix(m, exclude='x')": r"(?s)`exclude`.*use `skip`",
    "locate(m, m, sed=1)": r"(?s)`sed`.*did you mean `seed`",
    "probe(asks=True)": r"(?s)`asks`.*did you mean `ask`",
    "compare_inputs([{'x': np.ones(1)}], 3)": "`theirs`: cannot read samples",
    "fix(m, max_latency_cost=20)": '"20%" is that much more',
    "scan(m, inputs={}, input_shapes={'x': (2,)})": "(?s)`input-shapes`.*leave out `inputs` or",
    "verify(m, m, inputs={}, input_values={'x': 3})": "`input-values`: it is for random data",
    "fix(m, inputs=3)": "`inputs`: cannot read samples from an int",
    "fix(m, input_shapes=[1])": r"(?s)`input-shapes`.*shapes, such as",
    "locate(m, m, seed='8')": r"`seed`: it cannot be '8'",
    "scan(m, {'x': 1})": r"(?s)options.*inputs=",
    "fix(m, output=3)": r"`output`: it cannot be 3.*\n.*a text or a path",
    "Plan.load(3)": r"3: it cannot be read",
    "as_html(3)": r"result=: there is no page of an int",
    "fix(m, passes=3)": r"`passes`.*\n.*it takes a text or a list of texts",
    "fix(m, hazards=[3])": r"`hazards`: it cannot",
}


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_a_wrong_call_is_a_usage_error_that_names_the_option(call: str) -> None:
    with pytest.raises(UsageError, match=WRONG_CALLS[call]) as caught:
        called(call)
    assert "--" not in str(caught.value)


@values
def test_the_terminal_shows_keys_as_its_options(key: str, flag: str) -> None:
    assert with_flags(key) == flag


def test_sentences_of_results_name_keys(tmp_path: Path) -> None:
    ones = {"x": np.ones((2, 8), np.float32)}
    plan = tmp_path / "plan.json"
    left = rewriter.fix(graph(HOPELESS), inputs=ones, build=False, repair=False)
    assert left.conclusion.remedy == "leave out `repair=false`"
    assert "leave out `repair=false`" in repr(left) and "--" not in repr(left)
    fp32 = rewriter.fix(graph(HOPELESS), inputs=ones, build=False, save_plan=plan)
    assert not plan.exists()
    said = fp32.warnings[-1]
    assert said.startswith("`save-plan`: no plan was written") and said.endswith(
        "`precision=fp32` gives the same"
    )


def test_errors_of_the_data_are_in_those_words_too() -> None:
    unknown = graph("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    unknown.proto.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(rewriter.RewriterError, match=r"(?s)`input-shapes=x:1x3x224x224`.*`inputs`"):
        rewriter.scan(unknown)


def test_a_plan_is_saved_edited_and_applied(tmp_path: Path) -> None:
    first = rewriter.fix(small(), build=False, keep_fp32="m").plan
    assert first is not None
    first.save(tmp_path / "plan.json")
    again = rewriter.Plan.load(tmp_path / "plan.json")
    assert again == first
    assert rewriter.fix(small(), build=False, plan=again).plan == first
    with pytest.raises(UsageError, match="cannot be read"):
        rewriter.Plan.load(tmp_path / "none.json")


@dataclass(frozen=True)
class Halving(GraphPass):
    """Wrong: it makes Relu a Neg."""

    name = "halving"

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for node in graph.nodes:
            if node.op_type == "Relu":
                node.op_type = "Neg"
                yield Change(node.output[0], "Relu became Neg")


class TestPassesOfYourOwn:
    def test_run_alone(self) -> None:
        model = small()
        done = rewriter.run_passes(model, ["simplify", TagRelu()])
        assert [n.name for n in done.model.proto.graph.node if n.op_type == "Relu"] == ["tagged"]
        assert all(n.name != "tagged" for n in model.proto.graph.node)
        assert done.pipeline == "simplify,tag-relu" and done.proto.graph.node

    def test_run_in_fix_before_the_preset_s(self) -> None:
        result = rewriter.fix(small(), build=False, passes=[TagRelu(names=str.casefold), ...])
        assert result.verified
        assert result.passes[0].name == "tag-relu" and len(result.passes[0].changes) == 1
        assert result.plan is not None
        assert "tagged" in {n.name for n in result.proto.graph.node}

    def test_one_that_breaks_the_result_is_left_out_and_every_report_says_so(self) -> None:
        result = rewriter.fix(small(), build=False, passes=[Halving(), ...])
        assert result.verified and "halving" not in result.pipeline
        told = "left out, although requested: halving"
        assert told in repr(result) and result.conclusion.remarks[0].startswith(told)
        assert result.conclusion.remarks[0] in result.warnings
        alone = rewriter.fix(small(), build=False, repair=False, passes=[Halving(), ...])
        assert "halving is not ours" in alone.conclusion.remedy and "defect" not in alone.conclusion.remedy

    def test_options_that_cannot_be_hashed_are_named(self) -> None:
        with pytest.raises(UsageError, match=r"(?s)tag-relu.*frozen dataclass"):
            rewriter.fix(small(), passes=[TagRelu(names=cast(Any, {})), ...])

    def test_what_needs_a_plan_runs_in_fix(self) -> None:
        with pytest.raises(UsageError, match=r"(?s)mixed-precision.*rewriter\.fix"):
            rewriter.run_passes(small(), "mixed-precision")


class TestRulesOfYourOwn:
    def test_fix_keeps_what_they_name(self) -> None:
        plan = rewriter.fix(small(), build=False, hazards=[every_product]).plan
        assert plan is not None
        decision = plan.decisions[0]
        assert (decision.key, decision.rule) == ("0:m", "user-rule")
        assert decision.reason == "our-products: products of this network are delicate"

    def test_scan_reports_what_they_name(self) -> None:
        data = {"x": np.ones((2, 3), np.float32)}
        found = rewriter.scan(small(), hazards=[every_product], inputs=data).findings
        assert [(f.kind, f.severity, f.nodes) for f in found if f.kind == "user-rule"] == [
            ("user-rule", "warning", ("MatMul(m)",))
        ]

    def test_what_is_no_hazard_is_named_with_its_rule(self) -> None:
        def broken(analysis: GraphAnalysis) -> Any:
            return ["node"]

        with pytest.raises(UsageError, match=r"broken.*no hazard"):
            rewriter.scan(small(), hazards=[broken])

    def test_a_kind_that_reports_know_stays_and_a_rule_may_return_nothing(self) -> None:
        def large(analysis: GraphAnalysis) -> list[Hazard]:
            return [Hazard(analysis.nodes[0], "overflow", "it is large")]

        found = rewriter.scan(small(), hazards=[large, lambda analysis: None]).findings
        assert [f.reason for f in found if f.kind == "overflow"] == ["it is large"]


def texts(value: object) -> Iterator[str]:
    """All texts of a result, however deep, with those of its page but for its commands."""
    if isinstance(value, str):
        yield value
    elif is_dataclass(value) and not isinstance(value, (type, rewriter.Model)):
        for part in fields(value):
            yield from texts(getattr(value, part.name))
    elif isinstance(value, dict):
        yield from texts([*value, *value.values()])
    elif isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            yield from texts(part)


OPTION = re.compile(r"(?<![\w-])--(?:no-)?([a-z][a-z0-9-]*)")
COMMAND = re.compile(r"<pre.*?</pre>|<style.*?</style>|<script.*?</script>", re.DOTALL)


RESULTS = {
    "fix(m, keep_fp32='m', build=False)": ["Nothing was lowered", "ALL 2 float nodes in FP32"],
    "fix(m, keep_fp32=['m*'], keep_fp32_op=['Relu', 'Conv'])": [],
    "fix(m, verify=False)": ["NOT verified"],
    "fix(m, tolerance=1e-9, repair=False)": ["FAILED"],
    "scan(m)": ["0 errors", "random inputs"],
    "verify(m, m, engine='emulation')": ["largest error 0", "Passed"],
    "locate(m, m, engine='emulation')": ["first wrong", "none"],
}


@pytest.mark.parametrize("call", RESULTS)
def test_results_show_themselves_in_a_few_lines_in_words_of_python(call: str) -> None:
    result = called(call)
    shown = repr(result)
    assert all(word in shown for word in RESULTS[call]), shown
    assert len(shown.splitlines()) <= 17 and max(map(len, shown.splitlines())) < 200
    assert "ModelProto" not in shown
    page = COMMAND.sub("", html.as_html(result))
    found = [text for text in (*texts(result), shown, page) for o in OPTION.findall(text) if o in EVERY]
    assert found == []


def test_plans_and_pipelines_show_themselves() -> None:
    plan = rewriter.fix(small(), build=False, keep_fp32="m").plan
    assert "fp16" in repr(plan) and "user: 1 node" in repr(plan)
    assert "simplify" in repr(rewriter.run_passes(small(), "simplify"))


def test_reasons_for_kept_nodes_name_the_request(tmp_path: Path) -> None:
    result = rewriter.fix(small(), keep_fp32=["m", "m*"], keep_fp32_op="Relu", build=False)
    assert not [text for text in result.warnings if "names no node" in text]
    reasons = {decision.op: decision.reason for decision in result.plan.decisions} if result.plan else {}
    assert reasons == {"MatMul": "kept by your pattern 'm'", "Relu": "kept by your request for every Relu"}
    warnings = " ".join(rewriter.fix(small(), keep_fp32_op="Conv", lower_op="Gemm", build=False).warnings)
    assert "`keep-fp32-op` 'Conv' names no node that computes on floats" in warnings
    assert "`lower-op` 'Gemm' names no node" in warnings


def test_names_of_a_model_are_no_markup(tmp_path: Path) -> None:
    evil = graph("g (float[2] x) => (float[2] y) { y = Relu(x) }").whole()
    evil.graph.node[0].output[0] = evil.graph.output[0].name = "<script>\x1b[2J"
    result = rewriter.locate(evil, evil, engine="emulation")
    assert "<script>" in repr(result) and "\x1b" not in repr(result)


def test_a_result_stands_for_its_model(tmp_path: Path) -> None:
    done = rewriter.run_passes(small(), "simplify")
    assert rewriter.load(rewriter.save(done, tmp_path / "x.onnx")).same_as(done.model)
    assert rewriter.scan(done).float_nodes == 2
    with pytest.raises(ModelError, match=r"(?s)an int is no model.*pass a path"):
        rewriter.save(3, tmp_path / "y.onnx")


BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

SOURCE = """
    g (float[2,3] x) => (float[2,4] y) <float[3,4] w = {1,2,3,4,5,6,7,8,9,10,11,12}> {
        ["/head/MatMul"] m = MatMul(x, w) y = Relu(m) }"""


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rewriter.save(graph(SOURCE), Path("model.onnx"))
    np.savez("data.npz", x=np.ones((2, 3), np.float32))
    blocks = BLOCK.findall((ROOT / "docs" / "library.md").read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "notebook"}
    for block in blocks:
        exec(compile(block, "docs/library.md", "exec", dont_inherit=True), names)
    assert len(blocks) == 7
    assert names["y"].shape == (2, 4)
    assert names["checked"].passed and names["found"].first is None
    assert names["compared"].samples[0].arrays[0].sentence == "theirs is BGR (if ours is RGB)"
    assert names["again"].plan == names["plan"]
    assert [n.name for n in names["named"].proto.graph.node if n.op_type == "Relu"] == ["act_1"]
    assert any(d.rule == "user-rule" for d in names["result"].plan.decisions)
    assert Path("fixed.onnx").is_file()


def names(pipeline: str) -> list[list[str]]:
    phases = Phases.of(parse(pipeline))
    parts = (phases.structural, phases.measuring, phases.lowering)
    return [[step.name for step in part] for part in parts]


@values
def test_a_pipeline_is_split_by_stages(pipeline: str, parts: list[list[str]]) -> None:
    assert names(pipeline) == parts


def test_a_pass_before_one_that_it_follows_is_refused() -> None:
    with pytest.raises(UsageError, match="mixed-precision has to follow rescale"):
        rewriter.fix("no such file.onnx", passes="mixed-precision,rescale")
