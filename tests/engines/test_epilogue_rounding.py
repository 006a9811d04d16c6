"""The probe of ConvTransposes with FP32 consumers: which arithmetic gives which answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from rich.console import Console

from rewriter.engines.probe.answers import Answers, recorded
from rewriter.engines.probe.arithmetic import convolved_back
from rewriter.engines.probe.ask import PROBES, ask, build_all
from rewriter.engines.probe.epilogue_rounding import SUM_UNROUNDED
from rewriter.engines.probe.question import UNKNOWN, Case, Seen
from rewriter.model import Array
from rewriter.report.probe import print_result

(PROBE,) = (probe for probe in PROBES if probe.name == "conv-transpose-epilogue")
Rounding = Callable[[Array], Array]


def fp16(x: Array) -> Array:
    return x.astype(np.float16).astype(np.float64)


def exactly(x: Array) -> Array:
    return x


def in_fp32(x: Array) -> Array:
    return x.astype(np.float32).astype(np.float64)


def truncated(x: Array) -> Array:
    """Tensor Cores that cut off half of FP32's spacing at 96, 2^-18, after each of 144 blocks of 16 terms."""
    return np.asarray(np.sign(x) * (np.abs(x) - 144 * 2.0**-18))


def computed(case: Case, on_sum: Rounding, with_bias: Rounding) -> Seen:
    """Float64 with FP16 results; the first sum is rounded as in a kernel, with and without bias."""
    t: Mapping[str, Array] = {n: a.astype(np.float64) for n, a in {**case.feeds, **case.weights}.items()}
    first = with_bias(on_sum(convolved_back(t["x"], t["w"])) + t["b"][:, None, None])
    active = np.maximum(first, 0) if case.name.startswith("Relu") else first / (1 + np.exp(-first))
    return Seen(fp16(convolved_back(fp16(active), t["v"])), case.expected)


KERNELS: dict[str, tuple[Rounding, Rounding, str]] = {
    "sum and bias in FP32": (in_fp32, in_fp32, "fp32"),
    "FP32 sums that Tensor Cores truncate": (truncated, in_fp32, "fp32"),
    "the sum with its bias rounded once": (exactly, fp16, "fp32"),
    "the sum rounded, and rounded again with its bias, as FP16 alone": (fp16, fp16, "fp16"),
    "the sum rounded, the bias added in FP32": (fp16, in_fp32, "fp16"),
}


@pytest.mark.parametrize(("on_sum", "with_bias", "value"), KERNELS.values(), ids=KERNELS.keys())
def test_the_answer_follows_the_rounding_of_the_sum(
    on_sum: Rounding, with_bias: Rounding, value: str
) -> None:
    answer = PROBE.answer({case.name: computed(case, on_sum, with_bias) for case in PROBE.cases})
    assert answer.value == value
    assert answer.figures.keys() == {case.name for case in PROBE.cases}
    gaps = [error / SUM_UNROUNDED for error in answer.figures.values()]
    assert max(gaps) < 1 / 2.5 if value == "fp32" else min(gaps) > 8, "too near the bound"


def test_one_case_that_rounds_makes_the_answer_no() -> None:
    seen = {case.name: computed(case, in_fp32, in_fp32) for case in PROBE.cases}
    last = PROBE.cases[-1]
    assert PROBE.answer(seen | {last.name: computed(last, fp16, fp16)}).value == "fp16"


def test_nan_makes_the_answer_no() -> None:
    seen = {case.name: computed(case, in_fp32, in_fp32) for case in PROBE.cases}
    broken = PROBE.cases[0]
    assert broken.expected is not None
    wrong = Seen(np.full_like(broken.expected, np.nan), broken.expected)
    assert PROBE.answer(seen | {broken.name: wrong}).value == "fp16"


def test_the_data_and_the_bias_are_exact_in_fp16() -> None:
    """Otherwise the Cast of the data would round."""
    for case in PROBE.cases:
        assert np.array_equal(case.feeds["x"], fp16(case.feeds["x"]))
        left = computed(case, exactly, exactly)
        assert left.error < SUM_UNROUNDED / 5


def test_onnx_runtime_sums_in_fp32() -> None:
    """It has no FP16 ConvTranspose: with Casts to FP32 around it, only the result is rounded."""
    answer = ask("onnxruntime", [PROBE]).answers[PROBE.name]
    assert answer.value == "fp32"
    assert max(answer.figures.values()) < SUM_UNROUNDED / 5


def test_the_models_build_without_a_gpu() -> None:
    assert [(b.case, b.problem) for b in build_all([PROBE])] == [(case.name, "") for case in PROBE.cases]


def test_a_record_without_the_answer_is_shown_without_it() -> None:
    (found,) = (a for a in recorded() if "H200" in a.gpu)
    older = Answers(
        found.library,
        found.version,
        found.gpu,
        answers={name: answer for name, answer in found.answers.items() if name != PROBE.name},
    )
    assert PROBE.name not in older.values
    out = Console(record=True, width=200)
    print_result(older, out)
    (row,) = (line for line in out.export_text().splitlines() if "unrounded?" in line)
    assert f"{UNKNOWN}: not measured" in row
