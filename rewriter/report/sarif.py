"""Converts results of `scan` to SARIF 2.1.0, which code hosts and editors show beside the file.

The format is OASIS Standard "Static Analysis Results Interchange Format (SARIF) Version 2.1.0", 27 March
2020; section numbers below are its own.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rewriter import __version__
from rewriter.base.errors import RewriterError
from rewriter.hazards.analysis import KINDS
from rewriter.jobs.scan import Finding, ScanResult
from rewriter.report.json import plain, shown

VERSION = "2.1.0"
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

NODES_LISTED = 100  # most locations of one result: code hosts show no more


def as_sarif(results: Sequence[ScanResult], unread: Sequence[RewriterError] = ()) -> dict[str, Any]:
    """Returns a SARIF log with one run for all models; each kind of hazard is a rule (3.49).

    Code hosts refuse several runs of one tool in a log, so that the models share one.

    Args:
        unread: Errors of models that could not be scanned: notifications of the tool (3.20.21).
    """
    kinds = sorted({finding.kind for result in results for finding in result.findings})
    files = [result for result in results if result.path]
    errors = (_unlinked(str(error).replace("\n ", ";")) for error in unread)
    notes = [{"level": "error", "message": {"text": text}} for text in errors]
    run = {
        "tool": {
            "driver": {
                "name": "rewriter",
                "semanticVersion": __version__,
                "rules": [_rule(kind) for kind in kinds],
            }
        },
        "invocations": [{"executionSuccessful": not unread, "toolExecutionNotifications": notes}],
        "artifacts": [
            {"location": {"uri": _uri(result.path)}, "properties": {"data": result.data.text}}
            for result in files
        ],
        "results": [
            _result(f, kinds.index(f.kind), result, files) for result in results for f in result.findings
        ],
        "columnKind": "unicodeCodePoints",
    }
    return {"$schema": SCHEMA, "version": VERSION, "runs": shown(plain([run]))}


def _rule(name: str) -> dict[str, Any]:
    kind = KINDS[name]
    return {
        "id": name,
        "shortDescription": {"text": f"{kind.title[:1].upper()}{kind.title[1:]}."},
        "help": {"text": f"{kind.repair[:1].upper()}{kind.repair[1:]}."},
        "defaultConfiguration": {"level": kind.severity},
    }


def _result(finding: Finding, index: int, result: ScanResult, files: Sequence[ScanResult]) -> dict[str, Any]:
    """Returns a result (3.27); SARIF's levels are the same three words as severities (3.27.10)."""
    text = f"{finding.reason.removesuffix('.')}."  # no capital: it may begin with the name of a tensor
    if finding.range is not None and str(finding.range) not in text:
        text += f" {finding.tensor} is in {finding.range}."
    properties = {"repair": finding.repair, "tensor": finding.tensor, "nodeCount": len(finding.nodes)}
    return {
        "ruleId": finding.kind,
        "ruleIndex": index,
        "level": finding.severity,
        "message": {"text": _unlinked(f"{text} What to do: {finding.repair}.")},
        "locations": [_location(finding, result, files)],
        "partialFingerprints": {"nodes/v1": "|".join((finding.kind, *finding.nodes[:1]))},
        "properties": {**properties, **({"link": finding.link} if finding.link else {})},
    }


def _unlinked(text: str) -> str:
    """The text without links: messages may embed them (3.11.6), and code hosts show messages as Markdown."""
    return re.sub(r"\]\(|<(?=\w+:)", lambda match: "".join(f"\\{letter}" for letter in match[0]), text)


def _location(finding: Finding, result: ScanResult, files: Sequence[ScanResult]) -> dict[str, Any]:
    """Returns the file as physical and the nodes as logical locations (3.28.4): a model has no lines."""
    nodes = zip(finding.nodes[:NODES_LISTED], finding.ops, strict=False)
    logical = [
        {"fullyQualifiedName": node, "name": node.split("/")[-1] or node, "kind": op} for node, op in nodes
    ]
    location: dict[str, Any] = {"logicalLocations": logical} if logical else {}
    if result.path:
        index = next(i for i, file in enumerate(files) if file is result)
        location["physicalLocation"] = {"artifactLocation": {"uri": _uri(result.path), "index": index}}
    return location


def _uri(path: Path | None) -> str | None:
    """Returns a relative reference for a relative path, a file: URI for an absolute one (RFC 3986, 3.4.3)."""
    if path is None:
        return None
    return path.as_uri() if path.is_absolute() else quote(os.fsencode(path.as_posix()))
