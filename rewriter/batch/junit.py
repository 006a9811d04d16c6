"""The summary as JUnit XML, which CI servers show as tests.

The format has no standard; this is what Jenkins, GitLab and GitHub's reporters read: a test case for each
model, and one for each GPU that it was verified on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from rewriter.batch.entry import Outcome, Record
from rewriter.batch.summary import Summary
from rewriter.printable import printable

FAILURES = ("failed", "unbuildable")
"""Endings that are a verdict on the model; the others are errors of the run."""

_NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 (section 2.2) does not allow."""


def as_junit(summary: Summary) -> str:
    """The text of the XML file."""
    cases = list(_cases(summary))
    outcomes = [outcome for _, _, outcome in cases]
    failures = sum(outcome.ending in FAILURES for outcome in outcomes)
    bad = sum(not outcome.passed for outcome in outcomes)
    counts = {"tests": len(cases), "failures": failures, "errors": bad - failures}
    suites = Element("testsuites", {name: str(number) for name, number in counts.items()})
    suite = SubElement(suites, "testsuite", {"name": "rewriter batch", **suites.attrib})
    suite.set("time", f"{summary.seconds:.3f}")
    for record, name, outcome in cases:
        _add(suite, record, name, outcome)
    indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(suites, encoding="unicode") + "\n"


def _cases(summary: Summary) -> Iterator[tuple[Record, str, Outcome]]:
    for record in summary.records:
        yield record, record.entry.name, record.outcome
        for gpu, verdict in record.verdicts.items():
            yield record, f"{record.entry.name} on {gpu}", verdict


def _add(suite: Element, record: Record, name: str, outcome: Outcome) -> None:
    case = SubElement(suite, "testcase", name=_text(name), classname="rewriter.batch")
    case.set("time", f"{outcome.seconds:.3f}")
    if not outcome.passed:
        kind = "failure" if outcome.ending in FAILURES else "error"
        part = SubElement(case, kind, type=outcome.ending, message=_text(outcome.text))
        part.text = _text(f"{record.entry.model}: {outcome.text}")


def _text(text: str) -> str:
    return _NO_XML.sub("?", printable(text))
