"""PyTorch: `torch.onnx.export` followed by the fix, as a function or for a block of existing code.

The samples are arguments of the module.

Raises:
    ImportError: PyTorch is not installed.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import _GeneratorContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np

from rewriter.base.errors import InputsError, UsageError, nearest
from rewriter.hooks.fixing import (
    Feeds,
    Fixed,
    FixWarning,
    HookOptions,
    attempt,
    fix_export,
    fix_file,
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
    call, options = ExportCall.of(torch.onnx.export, args, kwargs), HookOptions(**own)
    return _fixed(call, _exported(call, options), options)


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
        program = _exported(call, options)
        if call.target is None:
            return _fixed_when_saved(call, program, options, exports)
        exports.append(_fixed(call, program, options))
        return program

    dispatch.over = False  # type: ignore[attr-defined]
    torch.onnx.export = dispatch
    try:
        yield exports
    finally:
        dispatch.over = True  # type: ignore[attr-defined]
        if torch.onnx.export is dispatch:
            torch.onnx.export = before


def _exported(call: ExportCall, options: HookOptions) -> Any:
    """Exports; returns None, or the ONNXProgram.

    A module is exported in eval mode, unless `training=` was given: the newer exporter exports a live Dropout
    otherwise, whose random results nothing can be compared with.

    Raises:
        UsageError: `fp32_modules` names no module.
    """
    module = call.arguments["model"]
    if not isinstance(module, torch.nn.Module):
        return call.run()
    check_names(module, options.fp32_modules)
    with nullcontext() if "training" in call.run.keywords else eval_mode(module):
        return call.run()


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
        what = (
            f"the model has {len(ports)} inputs ({', '.join(p.name for p in ports)}), the example arguments "
        )
        hint = "give calibration=[{input: array, ...}, ...]"
        raise InputsError(f"{what}contain {len(leaves)} tensors", where="args", hint=hint)
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


def check_names(module: Any, patterns: Iterable[str]) -> None:
    """Refuses the pattern of a name that no module has."""
    names = [name for name, _ in module.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            what = f"the model has no module {pattern!r}"
            raise UsageError(what, where="fp32_modules=", hint=nearest(pattern, names))
