"""Passes that break the contract."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rewriter.ir.base import Change, Context, Event, ModelPass
from rewriter.ir.model import Model

NOTHING = "no class at all"


@dataclass(frozen=True)
class RenameOutput(ModelPass):
    """It gives the first output another name."""

    name = "rename-output"
    before = after = ""

    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        graph = model.proto.graph
        old = graph.output[0].name
        graph.output[0].name = "renamed"
        for node in graph.node:
            node.output[:] = ["renamed" if name == old else name for name in node.output]
        yield Change(old, "renamed")


@dataclass(frozen=True)
class NegToAbs(ModelPass):
    """It says that results stay bit-equal, and changes them."""

    name = "neg-to-abs"
    before = after = ""

    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        for node in model.proto.graph.node:
            if node.op_type == "Neg":
                node.op_type = "Abs"
                yield Change(node.name, "Neg became Abs")


@dataclass(frozen=True)
class DivideByZero(ModelPass):
    """It raises what is no error of rewriter's."""

    name = "divide-by-zero"
    before = after = ""

    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        yield Change("model", f"{1 // len(model.proto.functions)}")


@dataclass(frozen=True)
class IsolateClip(RenameOutput):
    """It takes the name of one of rewriter's own passes."""

    name = "isolate-clip"


@dataclass(frozen=True)
class DropDoubleNeg(RenameOutput):
    """It takes the name of a pass of another package."""

    name = "drop-double-neg"
