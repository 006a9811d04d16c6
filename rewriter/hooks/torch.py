"""PyTorch: `torch.onnx.export` followed by the fix, as a function or for a block of existing code.

The samples are arguments of the module; modules that switch autocast off in training stay in FP32.

Raises:
    ImportError: PyTorch is not installed.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, _GeneratorContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from rewriter.base.errors import InputsError, UsageError, nearest
from rewriter.hazards import GraphAnalysis, Hazard, Rule
from rewriter.hazards.user_rules import HINT
from rewriter.hooks.fixing import (
    Feeds,
    Fixed,
    FixWarning,
    HookOptions,
    attempt,
    fix_export,
    fix_file,
    module_of,
    require,
    say,
)
from rewriter.ir.model import Array, Model
from rewriter.runtime.inputs.arranging import as_array

torch = require("torch", "torch", __name__)

__all__ = ["FixWarning", "Fixed", "export", "patched"]


def export(*args: Any, **kwargs: Any) -> Fixed:
    """Export a module with `torch.onnx.export` and fix the result in place.

    Keyword arguments that `HookOptions` has are the hook's; `torch.onnx.export` gets all others unchanged.
    Its `f` may be a path, or None: the fixed model is only in `result.proto` then.

    Raises:
        Exception: the export failed, or the fix failed and `strict` is set.
    """
    own = {field.name: kwargs.pop(field.name) for field in fields(HookOptions) if field.name in kwargs}
    call = ExportCall.of(torch.onnx.export, args, kwargs)
    return _fixed(call, *_exported(call, HookOptions(**own)))


def patched(**options: Any) -> _GeneratorContextManager[list[Fixed]]:
    """Fixes every export by `torch.onnx.export` in this block or decorated function, in this thread.

    `with patched(preset="trt-fp16") as exports:` collects a `Fixed` for each. An ONNXProgram that was
    exported without a file is fixed when its `save` is called. A name bound before the block by
    `from torch.onnx import export` is the plain exporter, which is not affected.

    Args:
        options: Fields of `HookOptions`.
    """
    return patched_with(HookOptions(**options))


@dataclass(frozen=True)
class ExportCall:
    """One export."""

    run: partial[Any]  # exports; returns None, or the ONNXProgram of the newer exporter
    arguments: Mapping[str, Any]  # by parameter name, with the defaults of this release
    target: Any  # a path, or None; what else there is cannot be fixed

    @classmethod
    def of(cls, exporter: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ExportCall:
        """Binds the arguments to PyTorch's exporter, beneath the replacements of `patched` blocks."""
        while hasattr(exporter, "over"):
            exporter = exporter.__wrapped__
        bound = inspect.signature(exporter).bind(*args, **kwargs)
        bound.apply_defaults()
        return cls(partial(exporter, *args, **kwargs), bound.arguments, bound.arguments.get("f"))

    @property
    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments that the model is exported with.

        A dict at the end of the tuple holds keyword arguments, as in all releases of both exporters.
        """
        args, named = self.arguments.get("args", ()), dict(self.arguments.get("kwargs") or {})
        args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        if args and not named and isinstance(args[-1], dict):
            return args[:-1], args[-1]
        return args, named


@contextmanager
def patched_with(options: HookOptions) -> Iterator[list[Fixed]]:
    """Replaces the exporter for this thread; one that another block has covered does nothing more."""
    exports, thread, before = list[Fixed](), threading.get_ident(), torch.onnx.export

    @wraps(before)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if dispatch.over or threading.get_ident() != thread:  # type: ignore[attr-defined]
            return before(*args, **kwargs)
        call = ExportCall.of(before, args, kwargs)
        program, own = _exported(call, options)
        if call.target is None:
            return _fixed_when_saved(call, program, own, exports)
        exports.append(_fixed(call, program, own))
        return program

    dispatch.over = False  # type: ignore[attr-defined]
    torch.onnx.export = dispatch
    try:
        yield exports
    finally:
        dispatch.over = True  # type: ignore[attr-defined]
        if torch.onnx.export is dispatch:
            torch.onnx.export = before


def _exported(call: ExportCall, options: HookOptions) -> tuple[Any, HookOptions]:
    """Exports; returns None, or the ONNXProgram, and the options with hints of what training knew.

    A module is exported in eval mode, unless `training=` was given: the newer exporter exports a live Dropout
    otherwise, whose random results nothing can be compared with.

    Raises:
        UsageError: `fp32_modules` names no module.
    """
    module = call.arguments["model"]
    if not isinstance(module, torch.nn.Module):
        return call.run(), options
    check_names(module, options.fp32_modules)
    with nullcontext() if "training" in call.run.keywords else eval_mode(module):
        program = call.run()
    with eval_mode(module), _same_randomness():
        modules = without_autocast(module, *call.example)
    if not modules:
        return program, options
    say(f"modules that switch autocast off: {', '.join(modules)}", options)
    hazards = (*options.fix.get("hazards", ()), rule(modules))
    return program, replace(options, fix={**options.fix, "hazards": hazards})


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Puts every module in eval mode, and restores its mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _fixed(call: ExportCall, program: Any, options: HookOptions) -> Fixed:
    """Fix the export wherever it went: a file, or an ONNXProgram."""
    feeds, target = partial(_feeds, call, options), call.target

    def in_memory() -> Fixed:
        if target is not None:
            raise UsageError("a stream cannot be fixed", where="f=", hint="export to a file, or with f=None")
        return Fixed(result=fix_export(program.model_proto, feeds, options))

    with _same_randomness():
        if isinstance(target, (str, os.PathLike)):
            fixed = fix_file(Path(target), feeds, options)
        else:
            fixed = attempt(in_memory, options, "the program" if target is None else "the stream")
    return replace(fixed, program=program)


def _fixed_when_saved(call: ExportCall, program: Any, options: HookOptions, exports: list[Fixed]) -> Any:
    """The program of an export without a file; the fix follows `program.save(path)`."""
    save = program.save

    @wraps(save)
    def saved(destination: Any, *args: Any, **kwargs: Any) -> Any:
        answer = save(destination, *args, **kwargs)
        exports.append(_fixed(replace(call, target=destination), program, options))
        return answer

    program.save = saved
    return program


def _feeds(call: ExportCall, options: HookOptions, model: Model) -> Iterable[Any] | None:
    module = call.arguments["model"]
    if options.calibration is not None:
        return calibration_feeds(model, module, options.calibration, options.samples)
    feeds = example_feeds(model, module, *call.example)
    if all(array.size > 1 and np.all(array == array.flat[0]) for array in feeds.values()):
        say("the example arguments are constant, so ranges come from random data; give calibration=", options)
        return None
    return [feeds]


def _same_randomness() -> Any:
    """Returns a context that restores the random state, so that training is not affected."""
    return torch.random.fork_rng(range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0))


def example_feeds(
    model: Model, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Array]:
    """Returns the example arguments of an export as feeds.

    Inputs and arguments match by name if all names agree, else in the order of `forward`'s parameters,
    which both exporters keep.

    Raises:
        InputsError: the numbers of inputs and arguments differ.
    """
    ports, signature = model.signature.inputs, _signature(module)
    try:
        named = dict(signature.bind(*args, **kwargs).arguments) if signature else {}
    except TypeError:  # arguments that forward does not take: the export has reported it
        named = {}
    named = named or {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
    leaves = [leaf for value in named.values() for leaf in _leaves(value)]
    if all(len(_leaves(named.get(port.name))) == 1 for port in ports):
        leaves = [_leaves(named[port.name])[0] for port in ports]
    if len(leaves) != len(ports):
        raise InputsError(
            f"the model has {len(ports)} inputs ({', '.join(p.name for p in ports)}), the example arguments "
            f"contain {len(leaves)} tensors",
            where="args",
            hint="give calibration=[{input: array, ...}, ...]",
        )
    return {port.name: as_array(leaf) for port, leaf in zip(ports, leaves, strict=True)}


def calibration_feeds(model: Model, module: Any, items: Iterable[Any], most: int) -> Iterator[Any]:
    """The items as `inputs` of `rewriter.fix` takes them, until they hold `most` samples.

    A dict without the names of the inputs holds keyword arguments of `forward`.
    """
    names = [port.name for port in model.signature.inputs]
    first = next(iter(model.signature.inputs), None)
    batch = first.shape[0] if first is not None and first.shape else None
    for item in items:
        if isinstance(item, Mapping) and all(name in item for name in names):
            item = {name: item[name] for name in names}
        elif isinstance(item, Mapping):
            signature = _signature(module)
            parameters = signature.parameters if signature else ()
            item = example_feeds(model, module, (), {k: v for k, v in item.items() if k in parameters})
        yield item
        rows = next((len(leaf) for leaf in _leaves(item) if leaf.ndim), 1)
        most -= max(1, rows // batch) if isinstance(batch, int) and batch else 1
        if most <= 0:
            return


def calibration_source(items: Iterable[Any] | None, most: int) -> Feeds:
    """Returns a function from a model to feeds, for exports whose module is gone; None: random data."""
    return lambda model: None if items is None else calibration_feeds(model, None, items, most)


def _signature(module: Any) -> inspect.Signature | None:
    """The parameters of `forward`; None where Python cannot say."""
    try:
        return inspect.signature(getattr(module, "forward", module))
    except (TypeError, ValueError):
        return None


def _leaves(value: Any) -> list[Any]:
    """The tensors and arrays in nested arguments, in the order in which exporters flatten them."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, (torch.Tensor, np.ndarray))]


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
