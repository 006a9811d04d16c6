"""Rules of the user's own code: functions from a `Survey` to hazards, given with `hazards=`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from rewriter.hazards.kinds import KINDS, Hazard
from rewriter.hazards.survey import Survey
from rewriter.ir.errors import UsageError

USER_KIND = "user-rule"
"""The kind of a hazard whose rule is not one of `KINDS`."""


def rules_of_the_user(
    given: Iterable[Callable[[Survey], Iterable[Hazard]]],
) -> tuple[Callable[[Survey], Iterator[Hazard]], ...]:
    """The rules, held to what reports need: hazards whose kind is known.

    Raises:
        UsageError: one cannot be called; or, when it runs, it yields something else than hazards.
    """
    for rule in given:
        if not callable(rule):
            raise UsageError(f"it is no rule: {rule!r}", where="`hazards`", hint=_HINT)
    return tuple(_held(rule) for rule in given)


_HINT = "give functions from a rewriter.hazards.Survey to rewriter.hazards.Hazard objects"


def _held(rule: Callable[[Survey], Iterable[Hazard]]) -> Callable[[Survey], Iterator[Hazard]]:
    where = f"`hazards={getattr(rule, '__name__', type(rule).__name__)}`"

    def hazards(survey: Survey) -> Iterator[Hazard]:
        for hazard in rule(survey) or ():
            if not isinstance(hazard, Hazard):
                raise UsageError(f"it yields {hazard!r}, which is no hazard", where=where, hint=_HINT)
            if hazard.rule in KINDS:
                yield hazard
            else:
                yield replace(hazard, rule=USER_KIND, reason=f"{hazard.rule}: {hazard.reason}")

    return hazards
