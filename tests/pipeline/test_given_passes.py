"""Passes that a program hands over as objects, beside the names of ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from rewriter.ir.base import Context, Event, GraphPass
from rewriter.ir.errors import UsageError
from rewriter.ir.graph import GraphEditor
from rewriter.passes.clean_casts import CleanCasts
from rewriter.passes.simplify import Simplify
from rewriter.pipeline.text import listed, parse, render


@dataclass(frozen=True)
class Mine(GraphPass):
    """A pass of the user's."""

    weights: Any = None
    name = "mine"

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        yield from ()


@dataclass(frozen=True)
class Nameless(GraphPass):
    """It forgot its name."""

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


REFUSED = [
    pytest.param(3, "it is no pass: 3", id="a number"),
    pytest.param(int, "it is no pass: <class 'int'>", id="another class"),
    pytest.param(Nameless(), "the pass has no name", id="no name"),
    pytest.param(Nameless, "the pass has no name", id="a class without a name"),
    pytest.param(Unhashable(), "pass 'mine': its options cannot be compared: unhashable type", id="a list"),
]


@pytest.mark.parametrize(("entry", "words"), REFUSED)
def test_what_is_no_pass_is_refused_with_advice(entry: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        listed([entry])
    assert words in str(caught.value) and caught.value.hint


def test_a_pass_whose_options_no_text_can_hold_is_written_with_its_name() -> None:
    assert render([CleanCasts(), Mine(weights=(object(),))]) == "clean-casts,mine"
