"""Converts the result of `scan` to SARIF 2.1.0, which code hosts and editors show beside the file.

The format is OASIS Standard "Static Analysis Results Interchange Format (SARIF) Version 2.1.0", 27 March
2020; section numbers below are its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from rewriter import __version__
from rewriter.hazards.kinds import KINDS
from rewriter.jobs.findings import Finding, ScanResult
from rewriter.report.json import plain

VERSION = "2.1.0"
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

NODES_LISTED = 100
"""Most locations of one result: code hosts show no more."""


def as_sarif(result: ScanResult) -> dict[str, Any]:
    """Returns a SARIF log with one run; each kind of hazard is a rule (3.49)."""
    kinds = sorted({finding.kind for finding in result.findings})
    driver = {
        "name": "rewriter",
        "semanticVersion": __version__,
        "rules": [_rule(kind) for kind in kinds],
    }
    uri = _uri(result.path)
    run = {
        "tool": {"driver": driver},
        "artifacts": [{"location": {"uri": uri}}] if uri else [],
        "results": [_result(f, kinds.index(f.kind), uri) for f in result.findings],
        "columnKind": "unicodeCodePoints",
        "properties": {
            "precision": result.precision,
            "target": str(result.target),
            "data": result.data.text,
        },
    }
    log = {"$schema": SCHEMA, "version": VERSION, "runs": [run]}
    return {name: plain(value) for name, value in log.items()}


def _rule(name: str) -> dict[str, Any]:
    kind = KINDS[name]
    return {
        "id": name,
        "shortDescription": {"text": _sentence(kind.title)},
        "help": {"text": _sentence(kind.repair)},
        "defaultConfiguration": {"level": kind.severity},
        "properties": {"repair": kind.rung},
    }


def _result(finding: Finding, index: int, uri: str | None) -> dict[str, Any]:
    """Returns a result (3.27); SARIF's levels are the same three words as severities (3.27.10)."""
    text = _sentence(finding.reason)
    if finding.range is not None and str(finding.range) not in text:
        text += f" {finding.tensor} is in {finding.range}."
    found: dict[str, Any] = {
        "ruleId": finding.kind,
        "ruleIndex": index,
        "level": finding.severity,
        "message": {"text": f"{text} What to do: {finding.repair}."},
        "locations": [_location(finding, uri)],
        "partialFingerprints": {"nodes/v1": "|".join((finding.kind, *finding.nodes[:1]))},
        "properties": {
            "repair": finding.repair,
            "tensor": finding.tensor,
            "nodeCount": len(finding.nodes),
        },
    }
    if finding.link:
        found["properties"]["link"] = finding.link
    return found


def _location(finding: Finding, uri: str | None) -> dict[str, Any]:
    """Returns the file as physical and the nodes as logical locations (3.28.4): a model has no lines."""
    nodes = zip(finding.nodes[:NODES_LISTED], finding.ops, strict=False)
    logical = [
        {"fullyQualifiedName": node, "name": node.split("/")[-1] or node, "kind": op} for node, op in nodes
    ]
    found: dict[str, Any] = {"logicalLocations": logical} if logical else {}
    if uri:
        found["physicalLocation"] = {"artifactLocation": {"uri": uri, "index": 0}}
    return found


def _uri(path: Path | None) -> str | None:
    """Returns a relative reference for a relative path, a file: URI for an absolute one (RFC 3986, 3.4.3)."""
    if path is None:
        return None
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())


def _sentence(text: str) -> str:
    """Returns the text as a sentence: SARIF messages end with a full stop (3.11.2)."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
