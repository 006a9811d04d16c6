"""Pipelines as text: what parses, what prints, and what is refused with which words."""

import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from graphs import cases
from hypothesis import given
from hypothesis import strategies as st

from rewriter import passes as catalogue
from rewriter.base.errors import UsageError
from rewriter.ir.graph import GraphEditor
from rewriter.passes.base import Context, Event, GraphPass, Pass
from rewriter.passes.clean_casts import CleanCasts
from rewriter.passes.isolate_clip import IsolateClip
from rewriter.passes.simplify import Simplify
from rewriter.pipeline.presets import PRESETS, preset_named, select
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


CANONICAL = [
    pytest.param("sample-pass{count=3}", "sample-pass", id="defaults are left out"),
    pytest.param(
        " sample-pass{ count=4   flag = true }", "sample-pass{flag=true count=4}", id="in order of the fields"
    ),
    pytest.param("sample-pass{factor=1e0}", "sample-pass{factor=1.0}", id="numbers as Python prints them"),
]


@pytest.mark.parametrize(("text", "expected"), CANONICAL)
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
