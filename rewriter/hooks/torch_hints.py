"""Finds the nodes of PyTorch modules that stay in FP32: named ones, and those that switch autocast off."""

from __future__ import annotations

import ast
import glob
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any
from unittest import mock

from onnx import NodeProto

from rewriter.hazards import Hazard, Rule, Survey
from rewriter.hazards.user_rules import HINT
from rewriter.hooks.fixing import require
from rewriter.ir.errors import UsageError, nearest
from rewriter.ir.model import Model, walk_nodes

torch = require("torch", "torch", __name__)

SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata in which the newer exporter lists the modules of a node, and its own name last."""

WHOLE_MODEL = 0.9
"""Share of the results above which autocast is off for the model as a whole, which is no hint."""


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


def rule(modules: Collection[str]) -> Rule:
    """A rule that keeps the own nodes of modules in FP32, unless an engine is faster without and passes."""

    def training(survey: Survey) -> Iterator[Hazard]:
        for node in survey.nodes:
            if (name := module_of(node)) in modules:
                yield Hazard(node, HINT, f"module {name} ran with autocast off")

    return training


def without_autocast(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Modules most of whose own results are computed where their code switches autocast off."""
    try:
        with _watched(module) as results, torch.no_grad():
            module(*args, **kwargs)
    except Exception:  # what the export accepts, a call may not; a hint is no reason to fail
        return []
    off = sum(count for (_, enabled), count in results.items() if not enabled)
    if off > WHOLE_MODEL * results.total():
        return []
    return sorted(name for name, enabled in results if results[name, False] > results[name, True])


@contextmanager
def _watched(module: Any) -> Iterator[Counter[tuple[str, bool]]]:
    """Counts floating-point results by the module that computes them, and whether autocast is left on."""
    results, names, switches = Counter[tuple[str, bool]](), [""], [True]
    kind, mode = torch.amp.autocast_mode.autocast, torch.overrides.TorchFunctionMode
    start, enter, leave = kind.__init__, kind.__enter__, kind.__exit__

    class Watch(mode):  # type: ignore[misc, valid-type]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                results[names[-1], switches[-1]] += 1
            return result

    def started(
        self: Any, device: str, dtype: Any = None, enabled: bool = True, *rest: Any, **more: Any
    ) -> None:
        start(self, device, dtype, enabled, *rest, **more)
        self._requested = enabled  # without CUDA, PyTorch switches it off itself

    def entered(self: Any) -> Any:
        switches.append(getattr(self, "_requested", self._enabled))  # a decorator was made before
        return enter(self)

    def left(self: Any, *error: Any) -> Any:
        switches.pop()
        return leave(self, *error)

    with ExitStack() as stack:
        for name, one in module.named_modules():
            stack.callback(one.register_forward_pre_hook(lambda *_, name=name: names.append(name)).remove)
            stack.callback(one.register_forward_hook(lambda *_: names.__delitem__(-1)).remove)
        stack.enter_context(mock.patch.multiple(kind, __init__=started, __enter__=entered, __exit__=left))
        stack.enter_context(Watch())
        yield results
