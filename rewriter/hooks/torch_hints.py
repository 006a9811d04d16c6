"""Finds the nodes of PyTorch modules, which an exporter's names or metadata tell."""

from __future__ import annotations

import ast
import glob
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

from onnx import NodeProto

from rewriter.hooks.fixing import require
from rewriter.ir.errors import UsageError, nearest
from rewriter.ir.model import Model, walk_nodes

torch = require("torch", "torch", __name__)

SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata in which the newer exporter lists the modules of a node, and its own name last."""


def nodes_of(module: Any, patterns: Iterable[str]) -> Callable[[Model], list[str]]:
    """Returns a function from an exported model to patterns of its nodes that are in modules of these names.

    Raises:
        UsageError: a pattern fits no module.
    """
    names = [name for name, _ in module.named_modules()] if isinstance(module, torch.nn.Module) else []
    tops = set[str]()
    for pattern in patterns:
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            what = f"the model has no module {pattern!r}"
            raise UsageError(what, where="fp32_modules=", hint=nearest(pattern, filter(None, names)))
        tops.update(fitting)

    def kept(model: Model) -> list[str]:
        nodes = walk_nodes(model.proto.graph) if tops else ()
        return [glob.escape(node.name) for node in nodes if node.name and inside(module_of(node))]

    def inside(name: str) -> bool:
        return any(name == top or name.startswith(f"{top}.") for top in tops)

    return kept


def module_of(node: NodeProto) -> str:
    """The name of the innermost module that a node was exported from; "" for the model itself."""
    scopes = next((item.value for item in node.metadata_props if item.key == SCOPES), "")
    if scopes:
        return str(["", *ast.literal_eval(scopes)[:-1]][-1])
    path: list[str] = []
    for part in node.name.split("/")[1:-1]:  # "/blocks/blocks.0/norm/Pow" is of blocks.0.norm
        repeats = bool(path) and part.startswith(f"{path[-1]}.")
        path[-1:] = [part] if repeats else [*path[-1:], part]
    return ".".join(path)
