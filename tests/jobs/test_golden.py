"""The files that the default preset writes stay equal, unless a change means to change them.

After such a change: `python tests/jobs/test_golden.py` writes the texts below golden/ anew; their diff shows
what changed, and the commit says why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from onnx import GraphProto, helper, numpy_helper
from paths import ROOT

import rewriter
from rewriter.ir.model import walk_graphs
from rewriter.jobs.fix.provenance import RULE

GOLDEN = ROOT / "tests/jobs/golden"
NAMES = ("bert", "conv_clip", "if_loop", "mixed_casts", "mobilenet_v2", "nafnet", "qdq", "t5_encoder", "vit")
FEW = 8
"""Elements of the constants whose values are shown; larger ones show a hash."""


def golden(name: str) -> str:
    """What `fix` makes of a case model, without the model's metadata: a line for each node and constant."""
    model = ROOT / f"models/{name}.onnx"
    proto = rewriter.fix(model, inputs=model.with_suffix(".npz"), verify=False).proto
    del proto.metadata_props[:]
    proto.producer_version = ""
    lines = [line for graph in walk_graphs(proto.graph) for line in _lines(graph)]
    rest = hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()
    return "\n".join([*lines, f"all bytes {rest}"]) + "\n"


def _lines(graph: GraphProto) -> Iterator[str]:
    yield f"graph {graph.name}"
    for title, values in (("input", graph.input), ("output", graph.output)):
        yield from (f"{title} {helper.printable_value_info(value)}" for value in values)
    for tensor in graph.initializer:
        array = numpy_helper.to_array(tensor)
        dtype, shape = helper.tensor_dtype_to_string(tensor.data_type).lower(), list(array.shape)
        value = array.tolist() if array.size <= FEW else hashlib.sha256(array.tobytes()).hexdigest()[:8]
        yield f"constant {tensor.name} {dtype.removeprefix('tensorproto.')}{shape} {value}"
    for node in graph.node:
        tags = "".join(f" {item.value}" for item in node.metadata_props if item.key != RULE)
        yield f"{', '.join(node.output)} = {node.op_type}({', '.join(node.input)}){_attributes(node)}{tags}"


def _attributes(node: onnx.NodeProto) -> str:
    texts = []
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        if isinstance(value, onnx.TensorProto):
            value = np.array2string(numpy_helper.to_array(value), threshold=FEW).replace("\n", " ")
        elif isinstance(value, GraphProto):
            value = value.name
        texts.append(f"{attribute.name}={value.decode() if isinstance(value, bytes) else value}")
    return f" <{', '.join(texts)}>" if texts else ""


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_the_known_one(name: str) -> None:
    known = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert golden(name).splitlines() == known.splitlines()


if __name__ == "__main__":
    for case in NAMES:
        (GOLDEN / f"{case}.txt").write_text(golden(case), encoding="utf-8")
