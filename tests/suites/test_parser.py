"""Whether the installed parser agrees with the table of operators, in both directions."""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence

import onnx
import pytest
from backend_cases import cases
from needs import needs_rtx
from nightly import NIGHTLY
from onnx import TensorProto, helper
from operator_cases import CASES

from rewriter.base.errors import RewriterError
from rewriter.ir.model import load
from rewriter.runtime.engines.this_machine import parser_here
from rewriter.target import Target
from rewriter.target.operators import refused_in_model, rows_of

pytestmark = [needs_rtx, pytest.mark.skipif(not NIGHTLY, reason="asks the parser about thousands of models")]
HERE = parser_here(Target("tensorrt-rtx"))

ASK = """
import json, sys
import tensorrt_rtx as trt
logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
builder = trt.Builder(logger)
for line in sys.stdin:
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    taken = parser.parse(bytes.fromhex(line))
    print(json.dumps([taken, *(parser.get_error(i).desc() for i in range(parser.num_errors))]), flush=True)
"""


def asked(models: Iterable[onnx.ModelProto]) -> Iterator[tuple[bool, str]]:
    """True for each model that the parser takes, or dies of, and its messages."""
    lines = [model.SerializeToString().hex() for model in models]
    while lines:
        command, text = [sys.executable, "-c", ASK], "\n".join(lines)
        child = subprocess.run(command, input=text, capture_output=True, text=True, timeout=600, check=False)
        answers = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("[")]
        yield from ((taken, " ".join(messages)) for taken, *messages in answers)
        if len(answers) < len(lines):
            yield True, "it died"
        lines = lines[len(answers) + 1 :]


def test_each_graph_of_the_table() -> None:
    wrong = {}
    for case, (taken, message) in zip(CASES, asked(case.model.proto for case in CASES), strict=True):
        refused = refused_in_model(case.model, HERE)
        if taken is bool(refused):
            wrong[case.name] = str(refused[0]) if refused else message
    assert not wrong


LATER = {"RoiAlign", "LinearAttention", "CausalConvWithState"}
"""Operators that miss their plugin only where their inputs make sense."""

MISREAD = "quantised to UINT8"
"""Refused at once, since the parser takes it for INT8."""

UNASKED = {"If", "Loop", "Scan", "SequenceMap", "Constant", "TopK"}
"""Operators of graphs or without inputs; the parser dies of a TopK whose K has four axes."""

NO_IMPORTER = (
    "Plugin not found, are",
    "was not found",
    "No importer registered",
    "not supported in TensorRT-RTX",
)


def nodes() -> dict[str, onnx.ModelProto]:
    """A node of every operator of ONNX on FP32 tensors of four axes."""
    models = {}
    for schema in onnx.defs.get_all_schemas():
        if schema.name in UNASKED | LATER or schema.deprecated:
            continue
        inputs = [
            helper.make_tensor_value_info(f"x{place}", TensorProto.FLOAT, [1, 2, 4, 4])
            for place in range(max(1, schema.min_input))
        ]
        made = [f"y{place}" for place in range(max(1, schema.min_output))]
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in made]
        node = helper.make_node(schema.name, [value.name for value in inputs], made, domain=schema.domain)
        imports = [helper.make_opsetid(name, 1 if name else 24) for name in {"", schema.domain}]
        graph = helper.make_graph([node], "g", inputs, outputs)
        model = helper.make_model(graph, opset_imports=imports, ir_version=10)
        models[f"{schema.domain}.{schema.name}"] = model
    return models


def test_the_operators_without_an_importer_are_those_of_the_table() -> None:
    models, wrong = nodes(), {}
    for (name, proto), (_, message) in zip(models.items(), asked(models.values()), strict=True):
        node = proto.graph.node[0]
        whole = any(not row.when and node.op_type not in row.besides for row in rows_of(node, HERE))
        if whole is not (message.startswith("false") or any(part in message for part in NO_IMPORTER)):
            wrong[name] = message
    assert not wrong


def test_no_case_of_the_backend_suite_that_parses_is_refused() -> None:
    protos = {case.name: onnx.ModelProto.FromString(case.model) for case in cases(light=False)}
    wrong, found, refusals = {}, 0, 0
    for (name, proto), (taken, _) in zip(protos.items(), asked(protos.values()), strict=True):
        try:
            refused: Sequence[object] = [
                r for r in refused_in_model(load(proto), HERE) if r.row.at_once != MISREAD
            ]
        except RewriterError:
            continue
        found, refusals = found + bool(refused), refusals + (not taken)
        if taken and refused:
            wrong[name] = str(refused[0])
    assert not wrong
    assert found > 0.85 * refusals, "the table has 814 of the 914 that 1.7.1 refuses"
