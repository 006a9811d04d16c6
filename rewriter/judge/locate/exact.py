"""Compares tensors of the other model with exact values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import onnx

from rewriter.ir.model import Array, Model
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.figures.pair import Pair


@dataclass(frozen=True)
class Exact:
    """Computes tensors of the original in FP32 on ONNX Runtime, a few at a time, sample by sample.

    `reference` is the original with every tensor in FP32; `samples` are iterated once for each call of
    `errors`. The other model holds tensors of `exponents` multiplied by 2^exponent.
    """

    reference: Model
    samples: Iterable[Mapping[str, Array]]
    exponents: Mapping[str, int]

    @property
    def outputs(self) -> dict[str, str]:
        """The outputs, as pairs for `errors`."""
        return {port.name: port.name for port in self.reference.signature.outputs}

    def errors(self, pairs: Mapping[str, str], values: Iterable[Mapping[str, Array]]) -> dict[str, float]:
        """Returns the relative L2 errors over all samples, of the tensors that `values` holds.

        Args:
            pairs: Name in the other model: name in the original.
            values: Tensors of the other model, for each sample; later ones are read when it is their turn.
        """
        squares: dict[str, Array] = {}
        with ExitStack() as stack:
            session: Session | None = None
            for sample, arrays in zip(self.samples, values, strict=False):
                present = [name for name in pairs if name in arrays]
                if not present:
                    break
                if session is None:
                    session = stack.enter_context(Session(self._with_outputs([pairs[n] for n in present])))
                exact = session.run(sample, list(dict.fromkeys(pairs[n] for n in present)))
                for name in present:
                    scale = 2.0 ** -self.exponents.get(pairs[name], 0)
                    value = np.asarray(arrays[name]).astype(np.float64) * scale
                    more = np.array(Pair(exact[pairs[name]], value).squares)
                    squares[name] = squares.get(name, np.zeros(2)) + more
        return {
            name: math.sqrt(error / (scale or 1.0)) if math.isfinite(error) else math.inf
            for name, (error, scale) in squares.items()
        }

    def _with_outputs(self, names: Sequence[str]) -> Model:
        model = self.reference.copy()
        missing = dict.fromkeys(n for n in names if n not in self.outputs)
        model.proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in missing)
        return model
