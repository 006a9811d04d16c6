"""What tests share: small graphs as text, one pass over them, and runs on ONNX Runtime."""

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_text import with_header
from paths import ROOT

from rewriter.ir.model import Array, Model, load, replace_items
from rewriter.passes.base import Context, Exactness, Pass
from rewriter.pipeline.driver import Driver, PassResult
from rewriter.runtime.engines.onnxruntime_library import keep_captured_casts


def graph(body: str, *, opset: int = 17, ir: int = 8) -> Model:
    """A model from the text of one graph in the syntax of onnx.parser, without the header."""
    header = f'<ir_version: {ir}, opset_import: ["" : {opset}]>\n'
    return model(header + textwrap.dedent(body))


def model(text: str) -> Model:
    """A checked model from a text in the syntax of onnx.parser, of opset 17 if it has no header."""
    return load(onnx.parser.parse_model(with_header(text)))


def with_constants(
    body: str, shapes: Mapping[str, tuple[int, ...]], x: str, outputs: str, *, opset: int = 17
) -> Model:
    """A graph with random FP32 initializers of these shapes, of those that its body names."""
    words = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    held = {name: shape for name, shape in shapes.items() if name in words}
    constants = "".join(f", float[{','.join(map(str, shape))}] {name}" for name, shape in held.items())
    return with_weights(f"g ({x}{constants}) => ({outputs}) {body}", random_weights(held), opset=opset)


def with_weights(text: str, weights: Mapping[str, Array], *, opset: int = 17) -> Model:
    """A graph with these initializers in place of the inputs of those names; it may have a header."""
    proto = (model(text) if text.lstrip().startswith("<") else graph(text, opset=opset)).proto
    replace_items(proto.graph.input, [value for value in proto.graph.input if value.name not in weights])
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return load(proto)


def weighted(text: str, **shapes: tuple[int, ...]) -> Model:
    """A graph with random initializers of those shapes, a tenth as large as inputs."""
    proto = onnx.parser.parse_model(with_header(text))
    values = random_weights(shapes).items()
    proto.graph.initializer.extend(
        numpy_helper.from_array(value * np.float32(0.1), name) for name, value in values
    )
    return load(proto)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[int | str]],
    outputs: Iterable[str],
    weights: Mapping[str, Array],
    *,
    opset: int = 17,
) -> Model:
    """A model of nodes with FP32 inputs of these shapes, and with initializers; floats are FP32."""
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    floats = {n: v.astype(np.float32) if v.dtype.kind == "f" else v for n, v in weights.items()}
    held = [numpy_helper.from_array(value, name) for name, value in floats.items()]
    body = helper.make_graph(nodes, "g", ports, results, held)
    proto = helper.make_model(body, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return load(onnx.shape_inference.infer_shapes(proto, data_prop=True))


def random_weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Normal FP32 values from a fixed seed."""
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def apply(step: Pass, source: Model, context: Context | None = None) -> tuple[Model, PassResult]:
    """One pass under the driver's contract."""
    result, reports = Driver().run(source, [step], context or Context())
    return result, reports[0]


def ops(source: Model) -> list[str]:
    """Operators of the main graph in order, without Constants."""
    return [n.op_type for n in source.proto.graph.node if n.op_type != "Constant"]


def run(source: Model, feeds: Mapping[str, Array]) -> list[Array]:
    """Outputs on ONNX Runtime's CPU, with graph optimisations off."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    proto = source.whole()
    keep_captured_casts(proto)  # ONNX Runtime loses them
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(value) for value in session.run(None, dict(feeds))]


def random_feeds(
    source: Model, seed: int = 0, scale: float = 1.0, *, turns: bool = False
) -> dict[str, Array]:
    """Normal float inputs, where axes of unknown size have 2 elements; ones for every other type.

    With `turns`, other types have 0 and 1 by turns, from `seed` on: a condition is once true, once false.
    """
    rng = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for port in source.signature.inputs:
        shape = tuple(d if isinstance(d, int) else 2 for d in port.shape or ())
        dtype = onnx.helper.tensor_dtype_to_np_dtype(port.dtype)
        other = (np.arange(math.prod(shape)).reshape(shape) + seed) % 2 if turns else np.ones(shape)
        floating = np.issubdtype(dtype, np.floating)
        feeds[port.name] = np.asarray(rng.standard_normal(shape) * scale if floating else other, dtype)
    return feeds


def keeps_results(before: Model, after: Model, step: Pass, feeds: Mapping[str, Array] | None = None) -> None:
    """Same results but for what the pass declares, same signature, and nothing left to do."""
    assert after.signature == before.signature
    onnx.checker.check_model(after.whole(), full_check=True)
    feeds = feeds or random_feeds(before)
    same_results(step.exactness, run(before, feeds), run(after, feeds))
    again, report = apply(step, after)
    assert again is after
    assert not report.changes


def same_results(exactness: Exactness, wanted: Sequence[Array], found: Sequence[Array]) -> None:
    """Equal to the bit, or within the relative L2 error that a pass declares."""
    for a, b in zip(wanted, found, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if exactness.tolerance == 0 or a.dtype.kind != "f":
            assert a.tobytes() == b.tobytes()
            continue
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
        difference = np.linalg.norm(b.astype(np.float64) - a)
        # a sum that cancels has the rounding of its terms, which are of order 1
        cancelling = 4 * np.finfo(a.dtype).eps * np.sqrt(a.size)
        assert difference <= exactness.tolerance * np.linalg.norm(a.astype(np.float64)) + cancelling


def assert_bit_equal(source: Model, result: Model, feeds: Mapping[str, Array]) -> None:
    for wanted, found in zip(run(source, feeds), run(result, feeds), strict=True):
        np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def matrix(name: str, size: float) -> str:
    values = np.random.default_rng(len(name)).standard_normal(16) * size
    return f"float[4,4] {name} = {{{', '.join(f'{v:.6f}' for v in values)}}}"


COLUMN = r"(?:^| )\|(?= |$)"


def cases(path: str) -> list[Any]:
    """The cases of a file below tests/: a head, then blocks of a graph and lines `- column | case | column`.

    The values of each are the graph and the columns; its id is the first column and the case.
    """
    params = []
    for block in (ROOT / "tests" / path).read_text(encoding="utf-8").split("\n\n")[1:]:
        text, *lines = block.split("\n- ")
        for first, case, *columns in ([part.strip() for part in re.split(COLUMN, line)] for line in lines):
            params.append(pytest.param(text, first, *columns, id=f"{first}: {case}".rstrip(": ")))
    return params
