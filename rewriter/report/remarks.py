"""Sentences of what checks, searches and attempts hand out as values."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rewriter.base.text import count, figure
from rewriter.ir.reading import own_table
from rewriter.target.costs import ORIGIN
from rewriter.verification.verdict import CPU, Check, Remark

SENTENCES: dict[str, str] = own_table("rewriter.report", "remarks.toml")
"""By the kind of a remark; the head of `remarks.toml` explains them."""


def place(device: str) -> str:
    """Where an engine ran: ONNX Runtime's CPU kernels compute FP16 in FP32."""
    return "with ONNX Runtime on the CPU" if device == CPU else "on this GPU"


def _instead(values: tuple[float, float]) -> str:
    return " instead of ".join(dict.fromkeys(f"{value:.3g}" for value in values))


def _failures(checks: tuple[Check, ...] | None) -> str:
    failures = "; ".join(worded(check).summary for check in checks or ())
    return "nothing was tried" if checks is None else failures or "every check passes"


WORDS: dict[str, Callable[[Any], str]] = {
    "emulations": lambda number: count(number, "emulation"),
    "errors": _instead,
    "failed": _failures,
    "findings": lambda number: count(number, "finding") if number else "types as planned",
    "latencies": _instead,
    "met": lambda met: "is" if met else "is NOT",
    "ran_on": lambda device: f"estimated, {ORIGIN}" if device is None else f"measured {place(device)}",
}
"""Values that need more than a format, by name."""


def sentence(remark: Remark, check: Check | None = None) -> str:
    """The remark in words; a check's may name its fields, too, and its `error`."""
    values = {} if check is None else {**vars(check), "error": error(check)}
    values |= {name: WORDS[name](v) if name in WORDS else v for name, v in remark.values.items()}

    def part(optional: re.Match[str]) -> str:
        names = re.findall(r"{(\w+)", optional[1])
        return "" if any(values.get(name) in (None, "") for name in names) else optional[1]

    text = re.sub(r"\[(.*?)\]", part, SENTENCES[remark.kind])
    return text.format_map({**values, "origin": ORIGIN})


def worded(check: Check) -> Check:
    """The check with its remarks as a sentence."""
    if not check.remarks:
        return check
    parts = [sentence(remark, check) for remark in check.remarks]
    parts += without_tf32(check)
    if (timed := check.latency) is not None:
        parts.append(f"{timed.median_us:.1f} us (+- {timed.iqr_us:.1f})")
    details = (*wrong_states(check), *check.details)
    return replace(check, summary="; ".join(parts), details=details, remarks=())


def without_tf32(check: Check) -> list[str]:
    off = check.tf32_off if check.tf32_off is not None else math.inf
    return [f"with TF32 off, the largest error is {100 * off:.2g} % of what is allowed"] * (off <= 1.0)


def wrong_states(check: Check) -> list[str]:
    return [f"{name}, which no node reads, has an error of {error:.2g}" for name, error in check.wrong_states]


def error(check: Check) -> str:
    """`largest error 0.002 in y, within 0.005`: the one closest to its tolerance, or furthest beyond."""
    worst = max(
        check.outputs, key=lambda o: (not o.finite, o.excess, o.relative_l2, o.tolerance), default=None
    )
    words = ""
    if check.value is not None:
        relation = "within" if check.value.met else "NOT within"
        words = f"{check.value.metric} {check.value.value:.3g}, {relation} {check.value.allowed:.3g}"
    elif worst is not None:
        beyond = "beyond" if check.passed else "NOT within"
        relation = "within" if worst.finite and worst.relative_l2 <= worst.tolerance else beyond
        size = f"{worst.relative_l2:.2g}" if worst.finite else "NaN or infinity"
        words = f"largest error {size} in {worst.name}, {relation} {worst.tolerance:.2g}"
        if (other := worst.allowance) is not None:
            words += f"; {SENTENCES[other.reason].format(figure(other.measured))}"
    lost = check.passed is False and check.detections is not None and not check.detections.passed
    return "; ".join([words, *wrong_states(check)[:1], *[f"detections: {check.detections}"] * lost])
