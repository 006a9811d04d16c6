"""Pipelines as text: what parses, what prints, and what is refused with which words."""

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest
from command_lines import quick
from graphs import cases, graph
from hypothesis import given
from hypothesis import strategies as st
from paths import MODELS
from tables import values

from rewriter import api
from rewriter import passes as catalogue
from rewriter.base.errors import UsageError
from rewriter.ir.graph import GraphEditor
from rewriter.passes import ALL
from rewriter.passes.base import Context, Event, GraphPass, Pass
from rewriter.passes.clean_casts import CleanCasts
from rewriter.passes.isolate_clip import IsolateClip
from rewriter.passes.simplify import Simplify
from rewriter.pipeline.options import KEYS, FixOptions
from rewriter.pipeline.presets import OTHERWISE, PRESETS, preset_named, select
from rewriter.pipeline.schema import declarations, read
from rewriter.pipeline.text import listed, options_of, own_passes, parse, render


@dataclass(frozen=True)
class Sample(GraphPass):
    """One option of every type."""

    name = "sample-pass"
    before = after = ""

    flag: bool = False
    count: int = 3
    factor: float = 0.5
    label: str = "plain"
    mode: Literal["island", "transpose"] = "island"

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        yield from ()


@pytest.fixture(autouse=True)
def _with_sample(request: pytest.FixtureRequest) -> Iterator[None]:
    """`sample-pass` beside the real passes."""
    before = catalogue.ALL
    catalogue.ALL = (*before, Sample)
    yield
    catalogue.ALL = before


READ = [
    pytest.param("", (), id="an empty text is an empty pipeline"),
    pytest.param("isolate-clip", (IsolateClip(),), id="a name alone has its defaults"),
    pytest.param(" isolate-clip , sample-pass ", (IsolateClip(), Sample()), id="spaces do not matter"),
    pytest.param("isolate-clip{}", (IsolateClip(),), id="empty braces"),
    pytest.param("sample-pass{mode=transpose}", (Sample(mode="transpose"),), id="a choice"),
    pytest.param("sample-pass{flag=true}", (Sample(flag=True),), id="a bool"),
    pytest.param("sample-pass{count=-7}", (Sample(count=-7),), id="a negative int"),
    pytest.param("sample-pass{factor=1e-5}", (Sample(factor=1e-5),), id="a float with an exponent"),
    pytest.param("sample-pass{factor=inf}", (Sample(factor=float("inf")),), id="an infinite float"),
    pytest.param("sample-pass{factor=2}", (Sample(factor=2.0),), id="an int for a float"),
    pytest.param("sample-pass{label=*/a:0?}", (Sample(label="*/a:0?"),), id="a pattern"),
    pytest.param("sample-pass{ count = 4  flag=true }", (Sample(flag=True, count=4),), id="spaces"),
    pytest.param("isolate-clip,isolate-clip", (IsolateClip(), IsolateClip()), id="a pass may run twice"),
]


@pytest.mark.parametrize(("text", "expected"), READ)
def test_reads(text: str, expected: tuple[Pass, ...]) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(("text", "message", "hint"), cases("pipeline/refused_pipelines.txt"))
def test_refuses(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    first, *rest = str(caught.value).splitlines()
    assert message in first
    assert hint in "".join(rest)


@values
def test_prints_canonically(text: str, expected: str) -> None:
    assert render(parse(text)) == expected
    assert render(parse(expected)) == expected


SAMPLES = st.builds(
    Sample,
    flag=st.booleans(),
    count=st.integers(1 - 2**63, 2**63 - 1),
    factor=st.floats(allow_nan=False),
    label=st.text(string.ascii_letters + string.digits + "_./*?:+-", min_size=1),
    mode=st.sampled_from(["island", "transpose"]),
)
CLIPS = st.just(IsolateClip())


@given(st.lists(SAMPLES | CLIPS, max_size=3).map(tuple))
def test_what_is_printed_reads_back(passes: tuple[Pass, ...]) -> None:
    assert parse(render(passes)) == passes


def test_every_pass_prints_and_reads_back_with_its_defaults() -> None:
    everything = tuple(kind() for kind in own_passes().values())
    assert parse(render(everything)) == everything


def test_an_option_of_a_type_without_text_is_a_defect_of_the_pass() -> None:
    @dataclass(frozen=True)
    class Odd(Sample):
        table: dict[str, int] | None = None

    with pytest.raises(TypeError, match=r"Odd\.table"):
        options_of(Odd)


def test_structure_only_leaves_types_alone() -> None:
    mixed = [step.name for step in select("trt-fp16")]
    cut = mixed.index("mixed-precision")
    images = ("pad-channels", "unfold-patches", "unfold-pooling", "pool-before-mean", "fold-strides")
    moves = ("decompose-dot-products", "rescale", "merge-projections", "keep-epilogues")
    precise = (*images, "merge-conv-groups", "convtranspose-to-depth-to-space", *moves)
    assert [step.name for step in select("structure-only")] == [n for n in mixed[:cut] if n not in precise]
    assert {PRESETS[p].precision for p in ("trt-fp16", "trt-bf16", "structure-only")} == {
        "fp16",
        "bf16",
        "fp32",
    }


def test_passes_replace_the_preset_and_skip_drops() -> None:
    chosen = select("trt-fp16", "isolate-clip,sample-pass,isolate-clip", skip=["isolate-clip"])
    assert chosen == (Sample(),)


def test_passes_keep_their_options() -> None:
    assert select(passes="sample-pass{count=1},isolate-clip") == (Sample(count=1), IsolateClip())


def test_selection_names_the_option_at_fault() -> None:
    with pytest.raises(UsageError, match="`preset`: unknown preset 'trt-fp61'"):
        preset_named("trt-fp61")
    with pytest.raises(UsageError, match="`skip`: unknown pass 'isolate'"):
        select(passes="", skip=["isolate"])


# -- passes that a program hands over as objects
@dataclass(frozen=True)
class Mine(GraphPass):
    """A pass of the user's, whose name is its class's."""

    weights: Any = None

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        yield from ()


@dataclass(frozen=True)
class Unhashable(Mine):
    """Its option is a list."""

    options: list[int] = field(default_factory=list)


def test_names_objects_classes_and_the_preset_make_one_pipeline() -> None:
    preset = (Simplify(), CleanCasts())
    entries: list[Any] = ["clean-casts,simplify", Mine(), ..., Mine]
    found = listed(entries, preset)
    assert found == (CleanCasts(), Simplify(), Mine(), *preset, Mine())
    assert listed("clean-casts", preset) == parse("clean-casts") == (CleanCasts(),)


NO_PASSES = [
    pytest.param(3, "it is no pass: 3", id="a number"),
    pytest.param(int, "it is no pass: <class 'int'>", id="another class"),
    pytest.param(Unhashable(), "pass 'unhashable': its options cannot be compared", id="a list"),
]


@pytest.mark.parametrize(("entry", "words"), NO_PASSES)
def test_what_is_no_pass_is_refused_with_advice(entry: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        listed([entry])
    assert words in str(caught.value) and caught.value.hint


def test_a_pass_whose_options_no_text_can_hold_is_written_with_its_name() -> None:
    assert render([CleanCasts(), Mine(weights=(object(),))]) == "clean-casts,mine"


MATMUL = "g (float[4,64] x, float[64,64] w) => (float[4,64] y) { y = MatMul(x, w) }"


def data(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((4, 64)).astype(np.float32),
        "w": rng.standard_normal((64, 64)).astype(np.float32),
    }


@pytest.fixture
def matmul() -> onnx.ModelProto:
    """One MatMul of two inputs."""
    return graph(MATMUL).proto


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_a_preset_sets_what_fix_leaves_to_it(preset: Any) -> None:
    """Every default is an argument of `fix` that is None unless given, with a value for a file."""
    declared = declarations(FixOptions)
    for name, value in preset.defaults.items():
        assert declared[name].default is None
        assert read(KEYS[name], value, folder=Path()) == value
    assert render(preset.steps) == preset.pipeline
    assert preset.about


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_a_pass_is_in_a_preset_or_stands_alone(kind: type[Pass]) -> None:
    named = {type(step) for preset in PRESETS.values() for step in preset.steps}
    assert (kind in named) != kind.stands_alone, "either a preset names it, or it has `stands_alone = True`"


def test_what_is_given_comes_before_the_preset() -> None:
    accurate = preset_named("accurate")
    assert accurate.choose("max_latency_cost", 0.5) == 0.5
    assert accurate.choose("max_latency_cost") == 0.16
    assert accurate.choose("io") == OTHERWISE["io"]


def test_accurate_spends_a_budget_with_fp16_accumulators(matmul: onnx.ModelProto) -> None:
    result = api.fix(matmul, preset="accurate", inputs=[data()], build=False)
    assert result.verdict is not None and result.verdict.passed
    told = " ".join(check.summary for check in result.checks)
    assert "at most 0.16 more latency: relative-l2" in told and "sums in FP16" in told


def test_accurate_takes_an_error_in_place_of_its_budget() -> None:
    """Both weights are 1 in FP16, and the difference is all that is left."""
    text = """
        g (float[4,8] x) => (float[4,2] y)
        <float[8,2] w = {1.0004,1.0004, -1.0001,-1.0001, 0,0, 0,0, 0,0, 0,0, 0,0, 0,0}> {
            m = MatMul(x, w) y = Relu(m) }"""
    ones = np.ones((4, 8), np.float32)
    result = api.fix(graph(text).proto, preset="accurate", tolerance=1e-3, inputs=[{"x": ones}], build=False)
    assert result.verdict is not None and not result.proven, result.ending
    assert "TF32 off" in result.ending


def test_a_plan_or_a_pipeline_needs_no_budget_of_the_preset(matmul: onnx.ModelProto, tmp_path: Path) -> None:
    api.fix(matmul, inputs=[data()], verify=False, save_plan=tmp_path / "plan.json")
    api.fix(matmul, preset="accurate", plan=tmp_path / "plan.json", verify=False)
    api.fix(matmul, preset="accurate", passes="clean-casts", verify=False)


def test_migrate_keeps_inputs_and_outputs_and_names_the_command_of_trtexec_11(tmp_path: Path) -> None:
    model = MODELS / "conv_clip.onnx"
    out = tmp_path / "fixed.onnx"
    options = ("--preset", "trt11-migrate", "--inputs", model.with_suffix(".npz"), "--no-build")
    code, told, error = quick("fix", model, "-o", out, *options)
    assert code == 0, error
    assert f"trtexec --onnx={out}" in told.replace("\n", "")
    assert "--stronglyTyped" not in told
    before, after = onnx.load(model).graph, onnx.load(out).graph
    assert list(before.input) == list(after.input)
    assert list(before.output) == list(after.output)
    assert onnx.TensorProto.FLOAT16 in {t.data_type for t in after.initializer}


def test_presets_are_listed_with_their_pipelines() -> None:
    code, out, _ = quick("presets", COLUMNS="80")
    assert code == 0
    packed = re.sub(r"\s", "", out)
    for preset in PRESETS.values():
        assert preset.name in {line.removesuffix(" (default)") for line in out.splitlines()}
        assert re.sub(r"\s", "", preset.pipeline) in packed
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_shown_in_full(name: str) -> None:
    code, out, _ = quick("presets", "show", name)
    assert code == 0
    assert out.startswith(name) and PRESETS[name].summary[:60] in out
    assert re.sub(r"\s", "", PRESETS[name].pipeline) in re.sub(r"\s", "", out)


def test_the_table_of_old_flags_is_shown_and_on_the_page() -> None:
    shown = re.sub(r"\s", "", quick("presets", "show", "trt11-migrate")[1])
    page = (MODELS.parent / "docs" / "trt11-migration.md").read_text(encoding="utf-8")
    for old, now in PRESETS["trt11-migrate"].table:
        assert re.sub(r"\s", "", now).split("`")[0] in shown, old
        assert now in page


def test_what_the_table_says_of_our_options_is_true() -> None:
    """Every option of ours that the table names is one of `rewriter fix`, and every preset exists."""
    theirs = {"--memPoolSize", "--fp16", "--int8"}
    known = quick("fix", "--help")[1]
    for _, now in PRESETS["trt11-migrate"].table:
        for flag in re.findall(r"--[\w-]+", now):
            assert flag in theirs or flag in known, flag
        for name in re.findall(r"--preset (\S+)", now):
            preset_named(name)
