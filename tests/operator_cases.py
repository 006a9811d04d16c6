"""Graphs of `hazards/operators.txt`, and what the table of operators says of them."""

from dataclasses import dataclass
from functools import cached_property

import graphs
import onnx.parser

from rewriter.ir.model import Model, load
from rewriter.target import Target

NEWEST = "tensorrt-rtx 1.7.1"  # the release whose parser was asked about each graph


@dataclass(frozen=True)
class OperatorCase:
    """One graph: `expected` is what the target refuses, "" if it takes all of it."""

    name: str
    text: str
    expected: str = ""
    options: str = ""

    @cached_property
    def model(self) -> Model:
        opset = self.options.partition("target=")[0].strip().removeprefix("opset=") or 17
        header = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n'
        return load(onnx.parser.parse_model(header + self.text))

    @property
    def target(self) -> Target:
        return Target.parse(self.options.partition("target=")[2] or NEWEST)


CASES = [OperatorCase(str(case.id), *case.values) for case in graphs.cases("hazards/operators.txt")]
