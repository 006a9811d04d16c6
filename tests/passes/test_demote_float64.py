"""demote-float64: float32 wherever it suffices, float64 where shapes and borders need it."""

import numpy as np
from graphs import apply, graph, run
from onnx import TensorProto

from rewriter.ir.model import Model
from rewriter.passes.demote_float64 import DemoteFloat64


def doubles(source: Model) -> set[str]:
    """Names of the float64 tensors of all graphs."""
    known = source.facts()
    return {n for scope in known.scopes for n, tensor in scope.items() if tensor.dtype == TensorProto.DOUBLE}


def test_index_arithmetic_stays_beside_converted_tensors() -> None:
    source = graph(
        """g (float[N,3] x) => (float[M] y) <double third = {0.3333333333333333}, int64 at = {0}> {
            s = Shape(x) n = Gather(s, at) d = Cast<to = 11>(n) p = Mul(d, third) c = Ceil(p)
            i = Cast<to = 7>(c) z = Constant<value_int = 0>() o = Constant<value_int = 1>()
            r = Range(z, i, o) e = Cast<to = 11>(r) q = Mul(e, third) w = Add(q, p) y = Cast<to = 1>(w) }"""
    )
    result, report = apply(DemoteFloat64(), source)
    assert report.changes
    kept = {n.op_type for n in result.proto.graph.node for o in n.output if o in doubles(result)}
    assert kept == {"Cast", "Mul", "Ceil"}
    assert {"q", "w"}.isdisjoint(doubles(result))
    for rows in (1, 3, 7, 3000):
        feeds = {"x": np.zeros((rows, 3), np.float32)}
        np.testing.assert_allclose(run(result, feeds)[0], run(source, feeds)[0], rtol=1e-6)
