"""Rules of the user's own code: what they may yield, and what reports make of it."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hazard_rules import analyzed

from rewriter.base.errors import UsageError
from rewriter.hazards import GraphAnalysis, Hazard
from rewriter.hazards.user_rules import rules_of_the_user

SURVEY = analyzed("g (float[2] x) => (float[2] y) { y = Exp(x) }")


def held(rule: Callable[[GraphAnalysis], Any]) -> list[Hazard]:
    (found,) = rules_of_the_user([rule])
    return list(found(SURVEY))


def own(analysis: GraphAnalysis) -> Iterator[Hazard]:
    for node in analysis.nodes:
        yield Hazard(node, "our-lookup", "it reads a table")


def known(analysis: GraphAnalysis) -> list[Hazard]:
    return [Hazard(node, "overflow", "it is large") for node in analysis.nodes]


def nothing(analysis: GraphAnalysis) -> None:
    """As a function without any return."""


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        pytest.param(own, [("user-rule", "our-lookup: it reads a table")], id="a kind of the user's"),
        pytest.param(known, [("overflow", "it is large")], id="a kind that reports know"),
        pytest.param(nothing, [], id="no hazard"),
    ],
)
def test_hazards_get_a_kind_that_reports_know(
    rule: Callable[[GraphAnalysis], Iterable[Hazard]], expected: list[tuple[str, str]]
) -> None:
    assert [(hazard.kind, hazard.reason) for hazard in held(rule)] == expected


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(UsageError, match="it is no rule: 3"):
        rules_of_the_user([own, 3])  # type: ignore[list-item]


def test_what_is_no_hazard_is_refused_with_the_name_of_the_rule() -> None:
    def names(analysis: GraphAnalysis) -> list[str]:
        return [node.name for node in analysis.nodes]

    with pytest.raises(UsageError, match=r"`hazards` names: it yields .* which is no hazard"):
        held(names)
