"""docs/findings.md: every kind of hazard, every other rule of a plan, and the known defects of TensorRT."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rewriter.hazards import quirks
from rewriter.hazards.kinds import KINDS, SEVERITIES, Kind
from rewriter.hazards.planning import dot_products, free_fp32, islands

OTHER_RULES: Mapping[str, str] = {
    "user": "you named the node, its operator, or a plan that has it",
    "no-lower-type": "the operator has no FP16 (BF16) in this opset or in TensorRT, or reads bits",
    "unknown-type": "the type of one of its tensors is not known",
    "generated": "random numbers: another type would give another sequence",
    "subgraph": "it holds branches or a loop body, and keeps the types that these exchange",
    islands.RULE: "it adds to a stream whose first sum is kept in FP32",
    free_fp32.RULE: "free: elementwise after an FP16 product, whose sum then stays in FP32",
    free_fp32.NORM_RULE: "free: a norm of one operator, which computes in FP32 inside",
    free_fp32.SOFTMAX_RULE: "free: attention's Softmax, with which attention stays one kernel",
    free_fp32.RECIPROCAL_RULE: "free: a division by a constant, which FP16 would round to a product",
    dot_products.RULE: "free: a written-out sum of products",
}
"""Rules that a plan names for nodes in which nothing goes wrong."""


_PAGE = """\
# Every finding of scan, and every rule of a plan

Written by `python -m rewriter.pipeline.catalogue`, from the rules themselves. `scan` begins each finding with
its kind; in a plan the same word is the rule. [hazards.md](hazards.md) has the measurements on which the
rules about the inside of operators rest.

## Kinds of hazard

The severity is the usual one; evidence in the data raises or lowers it. An error gives wrong results on your
samples. A warning gives wrong results on other data, or slightly wrong ones. A note is worth knowing.
“Measured” findings rest on the ranges of your samples; on random data they are warnings at most.

{kinds}

## Rules that are no hazards

A plan keeps these nodes out of FP16, too. What “free” means was measured: [accuracy.md](accuracy.md).

{rules}

## Known defects of TensorRT

`scan --target VERSION` and `fix --target VERSION` know these wrong results of a correct graph. Without a
version they are notes of the kind `known-defect`.

{defects}
"""


def page() -> str:
    """docs/findings.md."""
    kinds = [_kind(name, KINDS[name]) for name in sorted(KINDS, key=_place)]
    rules = [(f"`{name}`", why) for name, why in OTHER_RULES.items()]
    return _PAGE.format(
        kinds=_table(("kind", "what it is", "severity", "measured", "what to do"), kinds),
        rules=_table(("rule", "why"), rules),
        defects=_table(("defect", "releases", "what helps", "reported"), map(_defect, quirks.table())),
    )


def _place(name: str) -> tuple[int, str]:
    """Errors first, then by name."""
    return -SEVERITIES.index(KINDS[name].severity), name


def _kind(name: str, kind: Kind) -> tuple[str, ...]:
    return f"`{name}`", kind.title, kind.severity, "yes" if kind.measured else "", kind.repair


def _defect(quirk: quirks.Quirk) -> tuple[str, ...]:
    link = f"[link]({quirk.link})" if quirk.link else quirk.source
    return f"`{quirk.id}`: {quirk.title}", quirk.releases, quirk.remedy, link


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    first, *others = [f"| {' | '.join(row)} |" for row in [head, *escaped]]
    return "\n".join([first, "|" + "---|" * len(head), *others])
