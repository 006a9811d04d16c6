"""Finds the nodes of PyTorch modules that stay in FP32: named ones, and those that switch autocast off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any
from unittest import mock

from rewriter.base.errors import UsageError, nearest
from rewriter.hazards import GraphAnalysis, Hazard, Rule
from rewriter.hazards.user_rules import HINT
from rewriter.hooks.fixing import module_of, require

torch = require("torch", "torch", __name__)

DEVICES = "cpu", "cuda"

WHOLE_MODEL = 0.9
"""Share of the results above which autocast is off for the model as a whole, which is no hint."""


def check_names(module: Any, patterns: Iterable[str]) -> None:
    """Refuses the pattern of a name that no module has."""
    names = [name for name, _ in module.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            what = f"the model has no module {pattern!r}"
            raise UsageError(what, where="fp32_modules=", hint=nearest(pattern, names))


def rule(modules: Collection[str]) -> Rule:
    """A rule that keeps the own nodes of modules in FP32, unless an engine is faster without and passes."""

    def training(analysis: GraphAnalysis) -> Iterator[Hazard]:
        for node in analysis.nodes:
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
    results, names = Counter[tuple[str, bool]](), [""]
    kind, mode = torch.amp.autocast_mode.autocast, torch.overrides.TorchFunctionMode
    start = kind.__init__

    class Watch(mode):  # type: ignore[misc, valid-type]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                results[names[-1], all(map(torch.is_autocast_enabled, DEVICES))] += 1
            return result

    def started(
        self: Any, device: str, dtype: Any = None, enabled: bool = True, *rest: Any, **more: Any
    ) -> None:
        start(self, device, dtype, enabled, *rest, **more)
        self._enabled = enabled  # without CUDA, PyTorch switches it off itself

    with ExitStack() as stack:
        for name, part in module.named_modules():
            stack.callback(part.register_forward_pre_hook(lambda *_, name=name: names.append(name)).remove)
            stack.callback(part.register_forward_hook(lambda *_: names.__delitem__(-1)).remove)
        for device in DEVICES:  # on, in FP32: arithmetic stays as it is
            region = kind(device, torch.float32, enabled=False)
            region._enabled = True
            stack.enter_context(region)
        stack.enter_context(mock.patch.object(kind, "__init__", started))
        stack.enter_context(Watch())
        yield results
