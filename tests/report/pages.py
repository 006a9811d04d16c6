"""Results for tests of pages: real runs on a small network with a picture as output and a hostile name."""

from functools import cache

import numpy as np
from graphs import with_weights
from onnx import numpy_helper

from rewriter.api import fix, verify
from rewriter.ir.model import Array, Model
from rewriter.jobs.locate import locate
from rewriter.jobs.scan import ScanResult, scan
from rewriter.report.results import FixResult, VerifyResult
from rewriter.verification.locate.location import Location

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\"'&"
"""A node's name that would run code in a page that does not escape it."""

LAYERS = 5


LONG = (
    "/encoder_of_a_model_with_names_that_have_no_blanks_and_go_on_until_no_telephone_is_wide_enough_for_them"
)
"""The beginning of names that no line can hold."""


def network(large: float = 1e6, prefix: str = "/body") -> Model:
    """Convolutions on an image; between two of the nodes values reach `large`, 1e6 being beyond FP16."""
    rng = np.random.default_rng(0)
    weights: dict[str, Array] = {
        f"w{i}": 0.3 * rng.standard_normal((3, 3, 3, 3)).astype(np.float32) for i in range(LAYERS)
    }
    weights |= {"large": np.array([large], np.float32), "small": np.array([1 / large], np.float32)}
    kinds = ", ".join(f"float[{','.join(map(str, array.shape))}] {n}" for n, array in weights.items())
    layers = [
        f"c{i} = Conv<pads=[1,1,1,1]>({f't{i - 1}' if i else 'x'}, w{i}) t{i} = Tanh(c{i})"
        for i in range(LAYERS)
    ]
    tail = f"far = Mul(t{LAYERS - 1}, large) e = Exp(t0) sum = Add(far, e) y = Mul(sum, small)"
    image = "float[1,3,32,32]"
    made = with_weights(f"g ({image} x, {kinds}) => ({image} y) {{ {' '.join(layers)} {tail} }}", weights)
    for node in made.proto.graph.node:
        node.name = HOSTILE if node.output[0] == "sum" else f"{prefix}/{node.output[0]}"
    return made


def samples() -> dict[str, Array]:
    """One image of a gradient."""
    ramp = np.linspace(-1.0, 1.0, 32 * 32 * 3, dtype=np.float32)
    return {"x": ramp.reshape(1, 3, 32, 32)}


@cache
def fixed(large: float = 1e6, prefix: str = "/body") -> FixResult:
    return fix(network(large, prefix).proto, build=False, inputs=samples(), page=True)


@cache
def scanned() -> ScanResult:
    return scan(network().proto, inputs=samples())


@cache
def verified() -> VerifyResult:
    return verify(network().proto, fixed().proto, inputs=samples(), engine="onnxruntime")


@cache
def located() -> Location:
    wrong = network().proto
    weight = next(tensor for tensor in wrong.graph.initializer if tensor.name == "w2")
    scaled = np.float32(1.1) * numpy_helper.to_array(weight)
    weight.CopyFrom(numpy_helper.from_array(scaled, weight.name))
    return locate(network().proto, wrong, inputs=samples(), engine="onnxruntime")
