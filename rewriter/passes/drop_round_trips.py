"""drop-round-trips: removes Casts to FP16 and back at the end of a product's kernel."""

from collections.abc import Iterator
from dataclasses import dataclass

from rewriter.ir.graph import GraphEditor, display_name
from rewriter.passes.base import Change, Context, Event, Exactness, GraphPass, Refusal
from rewriter.target.quirks import RoundTrip, lost_round_trips

PROBE = "cast-round-trip-output"  # the probe that asks the GPU whether such results are right


@dataclass(frozen=True)
class DropRoundTrips(GraphPass):
    """TensorRT-RTX 1.6.1 returns garbage for an FP32 product that is cast to FP16 and directly back.

    Where the kernel of a MatMul, Gemm or Conv ends with the two Casts, it writes FP16 and its consumer reads
    FP32 (docs/engines.md#casts-to-fp16-and-back). Casts that imitate FP16 on purpose are removed here, too.

    It follows `rewriter probe`: it removes the Casts where the target was wrong and keeps them where it was
    right. Without probe results it removes them for TensorRT-RTX, and for TensorRT of an unknown version.

    Declines:
        - a result that is a graph output and whose producer is not in this graph
    """

    exactness = Exactness(5e-3, "as mixed-precision, since it removes roundings to FP16")
    example = """
         g (float[2,3] x, float[3,4] w, float[4] b) => (float[2,4] y) {
             m = MatMul(x, w)
        -    a = Add(m, b)
        -    h = Cast<to = 10>(a)
        -    y = Cast<to = 1>(h)
        +    y = Add(m, b)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        target = context.target
        unprobed = "wrong" if target.library == "tensorrt-rtx" or not target.version else "right"
        if target.answers.get(PROBE, unprobed) == "wrong":
            yield from (_drop(graph, trip) for trip in list(lost_round_trips(graph)))


def _drop(graph: GraphEditor, trip: RoundTrip) -> Event:
    exact, result = trip.down.input[0], trip.up.output[0]
    if not graph.is_output(result):
        graph.replace_all_uses_with(result, exact)
    elif graph.producer(exact) is None:
        reason = f"{result} is a graph output, and {exact} has no producer in this graph"
        return Refusal(display_name(trip.down), reason)
    else:
        graph.rename(exact, result)
    graph.remove(trip.up)
    return Change(display_name(trip.down), f"{exact} is not rounded to FP16 on its way to {result}")
