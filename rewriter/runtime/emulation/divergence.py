"""The error that every node of a reduced-precision model adds, in one run.

One session holds three computations side by side: the original in FP32, the emulated model, and each node of
the emulated model on its own, with the original's values as operands. The graph reduces their distances as
soon as the tensors exist, so memory is a small multiple of the largest activation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from rewriter.ir.model import Array, Model
from rewriter.ir.model import facts as tensor_facts
from rewriter.runtime.emulation import Accumulation, emulation, reference
from rewriter.runtime.emulation.side_by_side import UNSCALED, SideBySide
from rewriter.runtime.engines.onnxruntime import Session


@dataclass(frozen=True)
class NodeError:
    """The errors of one node's result: relative L2, infinite where NaN or infinity appeared.

    Attributes:
        node, op, key: The node of the original, with its key in a plan. `op` is Cast for the rounding
            of an FP32 result that FP16 nodes read, and Input for that of an input of the model.
        tensor: Its output.
        added: Error of the node alone on the original's exact values: from its weights, its arithmetic and
            the rounding of its result.
        total: Error of the tensor in the emulated model, with the errors of all nodes before it.
    """

    node: str
    op: str
    key: str
    tensor: str
    added: float
    total: float


@dataclass(frozen=True)
class Divergence:
    """The errors of all float tensors of the main graph, in the order of computation."""

    nodes: tuple[NodeError, ...]

    def first(self, tolerance: float) -> NodeError | None:
        """The first tensor that is further than `tolerance` (relative L2) from the original."""
        return next((n for n in self.nodes if not n.total <= tolerance), None)

    def worst(self, count: int) -> tuple[NodeError, ...]:
        """The nodes that add the largest errors, largest first; equal ones in the model's order."""
        return tuple(sorted(self.nodes, key=lambda n: -n.added)[:count])


def diverge(
    original: Model,
    fixed: Model,
    samples: Iterable[Mapping[str, Array]],
    accumulation: Accumulation = "fp16",
    exponents: Mapping[str, int] = UNSCALED,
) -> Divergence:
    """Compares `fixed` with `original`, tensor by tensor, over all samples together.

    Args:
        original: The model before `mixed-precision`, with inputs of the samples' types.
        fixed: The same nodes in reduced precision.
        accumulation: As for `emulation.emulation`.
        exponents: Tensors of `original` that `fixed` has multiplied by 2^exponent (pass `rescale`).

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run one of the two.
    """
    exact = reference(original, tensor_facts.infer(original))
    pair = SideBySide(
        exact,
        emulation(fixed, tensor_facts.infer(fixed), accumulation, tf32=True),
        tensor_facts.infer(exact),
        exponents,
    )
    squares = np.zeros((len(pair.rows), 3))
    with Session(pair.model) as session:
        for sample in samples:
            found = {name: float(value) for name, value in session.run(sample).items()}
            norms = [[found.get(name, 0.0) for name in row.norms] for row in pair.rows]
            squares += np.square(np.asarray(norms, np.float64).reshape(-1, 3))
    rows = zip(pair.rows, np.sqrt(squares).tolist(), strict=True)
    return Divergence(
        tuple(
            NodeError(row.node, row.op, row.key, row.tensor, _ratio(added, scale), _ratio(total, scale))
            for row, (scale, total, added) in rows
        )
    )


def _ratio(error: float, scale: float) -> float:
    if not math.isfinite(error):
        return math.inf
    return error / (scale or 1.0) if math.isfinite(scale) else 0.0
