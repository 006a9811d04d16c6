"""drop-round-trips: the Casts to FP16 and back go with which a product's kernel would end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rewriter.base import Change, Context, Event, Exactness, GraphPass, Refusal, Target
from rewriter.graph import GraphEditor, label
from rewriter.patterns.round_trips import RoundTrip, lost_round_trips

PROBE = "cast-round-trip-output"
"""Who asks the GPU whether such results are right."""


@dataclass(frozen=True)
class DropRoundTrips(GraphPass):
    """TensorRT-RTX 1.6.1 gives garbage for a product in FP32 that is cast to FP16 and back at once.

    Where the kernel of a MatMul, Gemm or Conv ends with the two Casts it writes FP16, and what comes next
    reads FP32 (rewriter/patterns/round_trips.py; one H200): relative errors of 2.4 to 8.6, or infinity. Without the
    Casts the result is right, and nearer to that of the model in FP32, for one rounding is less. Casts that
    round on purpose, to imitate FP16, go as well where they stand like that: elsewhere `clean-casts` keeps
    them.

    Options:
        when: `auto` takes them out where `rewriter probe` saw the target be wrong, and not where it saw it be
            right; if it did not look, for TensorRT-RTX, and for TensorRT of an unknown version. `always` and
            `never` say themselves.
    """

    name = "drop-round-trips"
    exactness = Exactness(5e-3, "that of mixed-precision: it undoes roundings to FP16")
    before = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[2,3] x, float[3,4] w, float[4] b) => (float[2,4] y) {
            m = MatMul(x, w)
            a = Add(m, b)
            h = Cast<to = 10>(a)
            y = Cast<to = 1>(h)
        }"""
    after = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[2,3] x, float[3,4] w, float[4] b) => (float[2,4] y) {
            m = MatMul(x, w)
            y = Add(m, b)
        }"""

    when: Literal["auto", "always", "never"] = "auto"

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        if self._applies(context.target):
            for trip in list(lost_round_trips(graph)):
                yield _drop(graph, trip)

    def _applies(self, target: Target) -> bool:
        if self.when != "auto":
            return self.when == "always"
        if PROBE in target.answers:
            return target.answers[PROBE] == "wrong"
        return target.library == "tensorrt-rtx" or not target.version


def _drop(graph: GraphEditor, trip: RoundTrip) -> Event:
    exact, result = trip.down.input[0], trip.up.output[0]
    if not graph.is_output(result):
        graph.redirect(result, exact)
    elif graph.producer(exact) is None:
        return Refusal(
            label(trip.down), f"{exact}, which it casts, has no node in this graph to write {result}"
        )
    else:
        graph.rename(exact, result)
    graph.remove(trip.up)
    return Change(label(trip.down), f"{exact} is not rounded to FP16 on its way to {result}")
