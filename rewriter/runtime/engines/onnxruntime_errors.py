"""Failures of ONNX Runtime, turned into errors that name the node and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from rewriter.ir.errors import ArithmeticRunError


class NoKernelError(ArithmeticRunError):
    """ONNX Runtime has no implementation of an operator, for its types at least.

    Attributes:
        op: The operator, with its domain in front unless that is the default one.
        node: The node as the user knows it; None where ONNX Runtime names the operator alone.
    """

    def __init__(self, op: str, node: str | None, file: str | None) -> None:
        super().__init__(
            f"ONNX Runtime has no kernel for {op}" + (f" (node {node})" if node else ""),
            where=file,
            hint="a custom operator runs in TensorRT with its plugin only; use `verify=false`",
        )
        self.op = op
        self.node = node


_NO_KERNEL = (
    re.compile(
        r"In Node, \(\"(?P<node>[^\"]*)\", (?P<op>[\w.:]+), \"(?P<domain>[^\"]*)\".*No Op registered", re.S
    ),
    re.compile(r"Fatal error: (?P<domain>[\w.]*):(?P<op>\w+)\(.*is not a registered function/op", re.S),
    re.compile(
        r"Could not find an implementation for (?P<op>[\w.:]+)\(\d+\) node with name '(?P<node>[^']*)'"
    ),
)
_FAILED = (
    re.compile(r"while running (?P<op>\w+) node\. Name:'(?P<node>[^']*)' Status Message: (?P<why>.*)", re.S),
    re.compile(r"Type Error: (?P<why>.* of operator \((?P<op>\w+)\) in node \((?P<node>[^)]*)\).*)", re.S),
    re.compile(r"Node \((?P<node>[^)]*)\) Op \((?P<op>\w+)\) (?P<why>.*)", re.S),
    re.compile(r"Node:(?P<node>.*?) (?P<why>Output:.*)", re.S),
)


HINT = "see that the samples have the shapes that the model expects; if it runs nowhere, export it again"


@contextmanager
def explained(file: str | None, what: str) -> Iterator[None]:
    """Turns a failure of ONNX Runtime into one that names the node and leaves its source paths out."""
    try:
        yield
    except Exception as error:  # its exception classes share no other base
        _explain(error, file, what)


def _explain(error: Exception, file: str | None, what: str) -> NoReturn:
    text = str(error)
    for pattern in _NO_KERNEL:
        if match := pattern.search(text):
            found = match.groupdict()
            domain = found.get("domain")
            op = f"{domain}.{found['op']}" if domain else found["op"]
            raise NoKernelError(op, found.get("node") or None, file) from error
    for pattern in _FAILED:
        if match := pattern.search(text):
            found = match.groupdict()
            node = f"node {found['node']}" + (f" ({found['op']})" if found.get("op") else "")
            where = f"{file}: {node}" if file else node
            raise ArithmeticRunError(f"{what}: {_short(found['why'])}", where=where, hint=HINT) from error
    raise ArithmeticRunError(f"{what}: {_short(text)}", where=file, hint=HINT) from error


def _short(text: str) -> str:
    """ONNX Runtime's message without its source locations and C++ signatures, on one line."""
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"\S*/onnxruntime/\S+:\d+ [^\n]*?\)(?: const)? (?=[\w!(\"])", "", text)
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "..."
