"""Probe of divisions by constants: are they products with a reciprocal that is rounded to FP16?

That factor is the same for all values. So the error is projected on the difference that the factor makes, and
rounding noise averages out (docs/accuracy.md#rounded-reciprocals).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rewriter.engines.probe.arithmetic import normal
from rewriter.engines.probe.question import Case, Probe, Seen
from rewriter.model import Array

LAYERS, WIDTH, ROWS = 10, 64, 256

Divide = Callable[[Array, Array], Array]


@dataclass(frozen=True)
class Chain:
    """Ten products with an activation after each, and a product that reads the last one.

    Attributes:
        nodes: The activation of `m`, named `h`; both are numbered.
        constants: Its constants; it divides by `c`.
        exact: The activation in float64, of its input and `c`, with the division to use.
        gain: Of the products, so that values keep their size.
    """

    name: str
    nodes: str
    constants: Mapping[str, float]
    exact: Callable[[Array, Array, Divide], Array]
    gain: float

    @property
    def case(self) -> Case:
        layers = (f"m{i} = MatMul(h{i}, w{i}) {self.nodes.format(i=i, o=i + 1)}" for i in range(LAYERS))
        weights = {f"w{i}": normal(30 + i, WIDTH, WIDTH, scale=self.gain / 8) for i in range(LAYERS + 1)}
        weights |= {name: np.asarray(value, np.float16) for name, value in self.constants.items()}
        body = f"{' '.join(layers)} y = MatMul(h{LAYERS}, w{LAYERS})"
        feeds = {"h0": normal(29, ROWS, WIDTH)}
        return Case(self.name, body, feeds, weights, lambda t: self.result(t, np.divide))

    def result(self, tensors: Mapping[str, Array], divide: Divide) -> Array:
        x = tensors["h0"]
        for i in range(LAYERS):
            x = self.exact(x @ tensors[f"w{i}"], tensors["c"], divide)
        return np.asarray(x @ tensors[f"w{LAYERS}"])

    def share(self, seen: Seen) -> float:
        """1.0 for products with the rounded reciprocal, 0.0 for divisions."""
        case = self.case
        tensors = {n: a.astype(np.float64) for n, a in {**case.feeds, **case.weights}.items()}
        exact = self.result(tensors, np.divide)
        change = self.result(tensors, _by_reciprocal) - exact
        found = np.asarray(seen.value, np.float64) - exact
        return float(np.sum(found * change) / np.sum(change * change))


def _by_reciprocal(x: Array, divisor: Array) -> Array:
    return np.asarray(x * np.float64(np.float16(1.0 / divisor)))


CHAINS = (
    Chain(
        "HardSwish, 6",
        "a{i} = Add(m{i}, three) r{i} = Clip(a{i}, zero, six) p{i} = Mul(m{i}, r{i}) h{o} = Div(p{i}, c)",
        {"c": 6.0, "three": 3.0, "zero": 0.0, "six": 6.0},
        lambda x, c, divide: divide(x * np.clip(x + 3.0, 0.0, 6.0), c),
        1.6,
    ),
    Chain(
        "GELU, sqrt(2)",
        "s{i} = Div(m{i}, c) e{i} = Erf(s{i}) a{i} = Add(e{i}, one) p{i} = Mul(m{i}, a{i}) "
        "h{o} = Mul(p{i}, half)",
        {"c": math.sqrt(2), "one": 1.0, "half": 0.5},
        lambda x, c, divide: np.asarray(0.5 * x * (1.0 + np.vectorize(math.erf)(divide(x, c)))),
        1.5,
    ),
    Chain(
        "scale, sqrt(48)",
        "h{o} = Div(m{i}, c)",
        {"c": math.sqrt(48)},
        lambda x, c, divide: divide(x, c),
        math.sqrt(48),
    ),
)
"""PaddlePaddle's HardSwish, GELU as it is written out, and attention's scale for heads of 48."""


def _judge(seen: Mapping[str, Seen]) -> tuple[str, Mapping[str, float]]:
    shares = {f"{chain.name}: share": chain.share(seen[chain.name]) for chain in CHAINS}
    return "rounded" if max(shares.values()) > 0.5 else "exact", shares


PROBES: tuple[Probe, ...] = (
    Probe(
        "division-by-constant",
        "Is an FP16 division by a constant a product with the reciprocal, rounded to FP16?",
        {"rounded": "yes, in some chain at least", "exact": "no"},
        tuple(chain.case for chain in CHAINS),
        _judge,
        "mixed-precision{epilogues=true} keeps such a Div in FP32 unless it is exact",
    ),
)
