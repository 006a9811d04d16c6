"""PyTorch: `torch.onnx.export` followed by the fix, as a function or for a block of existing code.

Raises:
    ImportError: PyTorch is not installed.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rewriter.hooks.fixing import (
    SAMPLES,
    Fixed,
    FixWarning,
    HookOptions,
    Kept,
    attempt,
    fix_export,
    fix_file,
    require,
    say,
)

torch = require("torch", "torch", __name__)

from rewriter.hooks.torch_feeds import calibration_feeds, example_feeds  # noqa: E402
from rewriter.hooks.torch_hints import nodes_of, rule, without_autocast  # noqa: E402
from rewriter.ir.errors import UsageError  # noqa: E402  # the message about PyTorch comes first
from rewriter.ir.model import Model  # noqa: E402

if TYPE_CHECKING:
    from contextlib import _GeneratorContextManager

__all__ = ["FixWarning", "Fixed", "export", "patched"]


def export(
    model: Any,
    args: Any = (),
    f: Any = None,
    *positional: Any,
    fix: Mapping[str, Any] | None = None,
    calibration: Iterable[Any] | None = None,
    samples: int = SAMPLES,
    fp32_modules: Sequence[str] = (),
    strict: bool = False,
    keep_raw: bool = False,
    quiet: bool = False,
    **kwargs: Any,
) -> Fixed:
    """Export a module with `torch.onnx.export` and fix the result in place.

    `model`, `args`, `f`, `positional` and `kwargs` are passed to `torch.onnx.export` unchanged. `f` may be a
    path, or None: the fixed model is then only in `result.proto`. The other arguments are those of
    `HookOptions`.

    Raises:
        Exception: the export failed, or the fix failed and `strict` is set.
    """
    options = HookOptions(dict(fix or {}), calibration, samples, fp32_modules, strict, keep_raw, quiet)
    given = (model, args, *(() if f is None and not positional else (f,)), *positional)
    call = ExportCall.of(torch.onnx.export, given, kwargs)
    kept = nodes_of(model, fp32_modules)
    return _fixed(call, _plain(call, options), options, kept)


def patched(
    preset: str | None = None, *, fix: Mapping[str, Any] | None = None, **options: Any
) -> _GeneratorContextManager[list[Fixed]]:
    """Fixes every export by `torch.onnx.export` in this block or decorated function, in this thread.

    `with patched(preset="trt-fp16") as exports:` collects a `Fixed` for each. An ONNXProgram that was
    exported without a file is fixed when its `save` is called. A name bound before the block by
    `from torch.onnx import export` is the plain exporter, which is not affected.

    Args:
        preset: Short for `fix={"preset": ...}`.
        options: Those of `HookOptions`.

    Raises:
        UsageError: an option does not exist.
    """
    return patched_with(HookOptions.of(preset, fix, options))


@dataclass(frozen=True)
class ExportCall:
    """One export.

    Attributes:
        run: Exports; returns None, or the ONNXProgram of the newer exporter.
        arguments: By parameter name, with the defaults of this release.
        target: A path, or None; what else there is cannot be fixed.
    """

    run: partial[Any]
    arguments: Mapping[str, Any]
    target: Any

    @classmethod
    def of(cls, exporter: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ExportCall:
        """Binds the arguments to PyTorch's exporter, beneath the replacements of `patched` blocks.

        Raises:
            TypeError: this PyTorch's exporter does not take these arguments.
        """
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
        kept = nodes_of(call.arguments["model"], options.fp32_modules)
        program = _plain(call, options)
        if call.target is None:
            return _fixed_when_saved(call, program, options, exports, kept)
        exports.append(_fixed(call, program, options, kept))
        return program

    dispatch.over = False  # type: ignore[attr-defined]
    torch.onnx.export = dispatch
    try:
        yield exports
    finally:
        dispatch.over = True  # type: ignore[attr-defined]
        if torch.onnx.export is dispatch:
            torch.onnx.export = before


def _plain(call: ExportCall, options: HookOptions) -> Any:
    """Export; returns None, or the ONNXProgram of the newer exporter.

    A module in training mode is exported in eval mode, unless `training=` was given. The older exporter does
    so itself; the newer one exports a live Dropout, whose random results nothing can be compared with.
    """
    model = call.arguments["model"]
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    live = any(module.training for module in modules) and "training" not in call.run.keywords
    live = live and bool(call.arguments.get("dynamo"))
    if live:
        say("the module is in training mode: it is exported in eval mode, and its mode is restored", options)
    with eval_mode(model) if live else nullcontext():
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


def _fixed(call: ExportCall, program: Any, options: HookOptions, kept: Kept) -> Fixed:
    """Fix the export wherever it went: a file, or an ONNXProgram."""
    feeds, target = partial(_feeds, call, options), call.target

    def in_memory() -> Fixed:
        if target is not None:
            raise UsageError("a stream cannot be fixed", where="f=", hint="export to a file, or with f=None")
        return Fixed(result=fix_export(program.model_proto, feeds, options, kept))

    with _same_randomness():
        options = _with_hints(call, options)
        if isinstance(target, (str, os.PathLike)):
            fixed = fix_file(Path(target), feeds, options, kept)
        else:
            fixed = attempt(in_memory, options, "the program" if target is None else "the stream")
    return replace(fixed, program=program)


def _with_hints(call: ExportCall, options: HookOptions) -> HookOptions:
    """The options with a rule for the modules that switch autocast off."""
    module = call.arguments["model"]
    if not isinstance(module, torch.nn.Module):
        return options
    with eval_mode(module):
        modules = without_autocast(module, *call.example)
    if not modules:
        return options
    say(f"modules that switch autocast off: {', '.join(modules)}", options)
    return replace(options, fix={**options.fix, "hazards": (*options.fix.get("hazards", ()), rule(modules))})


def _fixed_when_saved(
    call: ExportCall, program: Any, options: HookOptions, exports: list[Fixed], kept: Kept
) -> Any:
    """The program of an export without a file; the fix follows `program.save(path)`."""
    save = program.save

    @wraps(save)
    def saved(destination: Any, *args: Any, **kwargs: Any) -> Any:
        answer = save(destination, *args, **kwargs)
        exports.append(_fixed(replace(call, target=destination), program, options, kept))
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
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()) if on_gpu else [])
