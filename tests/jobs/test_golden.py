"""The files that the default preset writes stay equal, unless a change means to change them.

After such a change: `pytest -n 0 tests/jobs/test_golden.py --update` writes the texts below golden/ anew.
Their diff shows what changed, and the commit says why.
"""

import hashlib
from collections.abc import Iterator

import onnx
import pytest
from onnx import GraphProto, helper, numpy_helper
from paths import ROOT

import rewriter
from rewriter.ir.model import walk_graphs

GOLDEN = ROOT / "tests/jobs/golden"
NAMES = ("bert", "conv_clip", "if_loop", "mixed_casts", "mobilenet_v2", "nafnet", "qdq", "t5_encoder", "vit")
FEW = 8  # elements of the constants whose values are shown; larger ones show a hash


def golden(name: str) -> str:
    """What `fix` makes of a case model, without its metadata: a line for each node, tensor and value."""
    model = ROOT / f"models/{name}.onnx"
    proto = rewriter.fix(model, inputs=model.with_suffix(".npz"), verify=False).proto
    assert not proto.functions
    opsets = ", ".join(f"{o.domain or 'onnx'} {o.version}" for o in proto.opset_import)
    lines = [line for graph in walk_graphs(proto.graph) for line in _lines(graph)]
    return "\n".join([f"IR {proto.ir_version}, {opsets}", *lines]) + "\n"


def _lines(graph: GraphProto) -> Iterator[str]:
    yield f"graph {graph.name}"
    for title, values in (("input", graph.input), ("output", graph.output), ("value", graph.value_info)):
        yield from (f"{title} {helper.printable_value_info(value)}" for value in values)
    yield from (f"constant {tensor.name} {_text(tensor)}" for tensor in graph.initializer)
    for node in graph.node:
        words = [f"{', '.join(node.output)} = {node.domain}{node.op_type}({', '.join(node.input)})"]
        words += [f"<{attribute.name}={_text(attribute)}>" for attribute in node.attribute]
        words += [f"{item.key}: {item.value}" for item in node.metadata_props]
        yield "  ".join([*words, node.name, node.doc_string]).rstrip()


def _text(value: onnx.TensorProto | onnx.AttributeProto) -> str:
    """All of a value but the contents of large tensors, of which it has a hash, and of graphs."""
    held = helper.get_attribute_value(value) if isinstance(value, onnx.AttributeProto) else value
    if isinstance(held, onnx.TensorProto):
        array = numpy_helper.to_array(held)
        content = array.tolist() if array.size <= FEW else hashlib.sha256(array.tobytes()).hexdigest()[:8]
        return f"{array.dtype}{list(array.shape)} {content}"
    return held.name if isinstance(held, GraphProto) else str(held)


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_the_known_one(name: str, request: pytest.FixtureRequest) -> None:
    text, file = golden(name), GOLDEN / f"{name}.txt"
    if request.config.getoption("--update"):
        file.write_text(text, encoding="utf-8")
    assert text.splitlines() == file.read_text(encoding="utf-8").splitlines()
