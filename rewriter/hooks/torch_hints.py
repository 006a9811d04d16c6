"""Hints of training to the plan: modules that ran with autocast off, and those that the user names."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

from onnx import NodeProto

from rewriter.hazards import Hazard, Survey
from rewriter.hazards.user_rules import HINT
from rewriter.hooks.fixing import require
from rewriter.ir.errors import UsageError, nearest

torch = require("torch", "torch", __name__)

SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata in which the newer exporter lists the modules of a node, and its own name last."""

WHOLE_MODEL = 0.9
"""Share of the results from which on autocast is off for the model as a whole, which is no hint."""


def hints(
    module: Any, example: tuple[tuple[Any, ...], dict[str, Any]], named: Sequence[str]
) -> dict[str, str]:
    """Modules to keep in FP32, by name, with the reason.

    Args:
        example: Positional and keyword arguments of the module.
        named: Patterns of module names from the user; they hold for all modules inside, too.

    Raises:
        UsageError: a pattern fits no module.
    """
    modules = dict(module.named_modules()) if isinstance(module, torch.nn.Module) else {}
    found = {
        name: f"module {name} ran with autocast off" for name in _without_autocast(module, modules, example)
    }
    for pattern in named:
        tops = [name for name in modules if fnmatchcase(name, pattern)]
        if not tops:
            what = f"the model has no module {pattern!r}"
            raise UsageError(what, where="fp32_modules=", hint=nearest(pattern, filter(None, modules)))
        inside = (name for name in modules if any(name == top or name.startswith(f"{top}.") for top in tops))
        found |= {name: f"module {name} is one of fp32_modules" for name in inside}
    return found


def rule(kept: Mapping[str, str]) -> Callable[[Survey], Iterator[Hazard]]:
    """A rule that keeps the nodes of these modules in FP32, for `rewriter.fix(hazards=...)`."""

    def training(survey: Survey) -> Iterator[Hazard]:
        for node in survey.nodes:
            if reason := kept.get(module_of(node)):
                yield Hazard(node, HINT, reason)

    return training


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


def _without_autocast(
    module: Any, modules: Mapping[str, Any], example: tuple[tuple[Any, ...], dict[str, Any]]
) -> list[str]:
    """The modules most of whose own results were computed where their code switches autocast off."""
    if not modules:
        return []
    try:
        with _watched(modules) as results, torch.no_grad():
            module(*example[0], **example[1])
    except Exception:  # what the export accepts, a call may not; a hint is no reason to fail
        return []
    off = sum(count for (_, is_off), count in results.items() if is_off)
    if off > WHOLE_MODEL * sum(results.values()):
        return []
    return [name for name in modules if results[name, True] > results[name, False]]


@contextmanager
def _watched(modules: Mapping[str, Any]) -> Iterator[Counter[tuple[str, bool]]]:
    """Counts the results of each module, by name, with autocast switched off and not."""
    results: Counter[tuple[str, bool]] = Counter()
    names, switches = [""], list[bool]()
    kind = torch.amp.autocast_mode.autocast
    mode: Any = torch.overrides.TorchFunctionMode
    start, enter, leave = kind.__init__, kind.__enter__, kind.__exit__

    class Watch(mode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                results[names[-1], bool(switches) and not switches[-1]] += 1
            return result

    def started(
        self: Any, device: str, dtype: Any = None, enabled: bool = True, *rest: Any, **more: Any
    ) -> None:
        start(self, device, dtype, enabled, *rest, **more)
        self._wanted = enabled  # without CUDA PyTorch switches it off itself

    def entered(self: Any) -> Any:
        switches.append(self._wanted)
        return enter(self)

    def left(self: Any, *error: Any) -> Any:
        switches.pop()
        return leave(self, *error)

    with ExitStack() as stack:
        for name, one in modules.items():
            stack.callback(one.register_forward_pre_hook(lambda *_, name=name: names.append(name)).remove)
            stack.callback(one.register_forward_hook(lambda *_: names.pop() and None).remove)
        for name, function, original in (
            ("__init__", started, start),
            ("__enter__", entered, enter),
            ("__exit__", left, leave),
        ):
            setattr(kind, name, function)
            stack.callback(setattr, kind, name, original)
        stack.enter_context(Watch())
        yield results
