"""PyTorch: `torch.onnx.export` followed by the fix, as a function or for a block of existing code.

Raises:
    ImportError: PyTorch is not installed.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ContextDecorator, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import onnx

from rewriter.hooks.fixing import (
    SAMPLES,
    Fixed,
    FixWarning,
    HookOptions,
    attempt,
    fix_file,
    fix_proto,
    require,
    say,
)

torch = require("torch", "torch", __name__)

from rewriter.hooks.norms import Advice, advise, eval_mode  # noqa: E402
from rewriter.hooks.torch_feeds import calibration_feeds, example_feeds, is_blank  # noqa: E402
from rewriter.ir.errors import UsageError  # noqa: E402  # the message about PyTorch comes first
from rewriter.ir.model import Array, Model  # noqa: E402

__all__ = ["Advice", "Exported", "FixWarning", "advise", "export", "patched"]


@dataclass(frozen=True)
class Exported(Fixed):
    """Result of one export; see `Fixed`.

    Attributes:
        program: Result of `torch.onnx.export`: None, or an ONNXProgram with the plain export.
        advice: Norms written by hand that were found before the export.
    """

    program: Any = None
    advice: tuple[Advice, ...] = ()


def export(
    model: Any,
    args: Any = (),
    f: Any = None,
    *positional: Any,
    fix: Mapping[str, Any] | None = None,
    calibration: Iterable[Any] | None = None,
    samples: int = SAMPLES,
    strict: bool = False,
    keep_raw: bool = False,
    quiet: bool = False,
    **kwargs: Any,
) -> Exported:
    """Export a module with `torch.onnx.export` and fix the result in place.

    `model`, `args`, `f`, `positional` and `kwargs` are passed to `torch.onnx.export` unchanged. `f` may be a
    path, a stream, or None: the fixed model is then only in `result.proto`. The other arguments are those of
    `HookOptions`.

    Raises:
        Exception: the export failed, or the fix failed and `strict` is set.
    """
    options = HookOptions(dict(fix or {}), calibration, samples, strict, keep_raw, quiet)
    given = (model, args, *(() if f is None and not positional else (f,)), *positional)
    return _export(ExportCall.of(_original(), given, kwargs), options)


@dataclass(frozen=True)
class ExportCall:
    """The arguments of one export.

    Attributes:
        export: The exporter.
        args, kwargs: The arguments as they were given, which are passed on.
        named: The same by parameter name, with the defaults of this release.
    """

    export: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    named: Mapping[str, Any]

    @classmethod
    def of(cls, export: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ExportCall:
        """Binds the arguments.

        Raises:
            TypeError: this PyTorch's exporter does not take these arguments.
        """
        bound = inspect.signature(export).bind(*args, **kwargs)
        bound.apply_defaults()
        return cls(export, args, kwargs, bound.arguments)

    def run(self) -> Any:
        """Export; returns None, or the ONNXProgram of the newer exporter."""
        return self.export(*self.args, **self.kwargs)

    @property
    def model(self) -> Any:
        return self.named["model"]

    @property
    def target(self) -> Any:
        """A path, a stream, or None."""
        return self.named.get("f")

    @property
    def path(self) -> Path | None:
        """The target if it is a path, else None."""
        return None if self.target is None or hasattr(self.target, "write") else Path(self.target)

    @property
    def dynamo(self) -> bool:
        """True if the newer exporter runs; it is the default since PyTorch 2.9."""
        exported = isinstance(self.model, torch.export.ExportedProgram)
        return exported or bool(self.named.get("dynamo", False))

    @property
    def opset(self) -> int | None:
        """The requested operator set."""
        return self.named.get("opset_version")

    @property
    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments that the model is exported with.

        A dict at the end of the tuple holds keyword arguments, as in all releases of both exporters.
        """
        args, named = self.named.get("args", ()), dict(self.named.get("kwargs") or {})
        args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        if args and not named and isinstance(args[-1], dict):
            return args[:-1], args[-1]
        return args, named


class patched(ContextDecorator):  # noqa: N801  # a context manager that reads as a word
    """Fixes every export by `torch.onnx.export` in this block or function, in this thread.

    `with patched(preset="trt-fp16") as exports:` collects an `Exported` for each. An ONNXProgram that was
    exported without a file is fixed when its `save` is called. A name bound before the block by
    `from torch.onnx import export` is the plain exporter, which is not affected.

    Args:
        preset: Short for `fix={"preset": ...}`.
        options: Those of `HookOptions`.
    """

    def __init__(
        self, preset: str | None = None, *, fix: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self.options = HookOptions.of(preset, fix, options)

    def __enter__(self) -> list[Exported]:
        exports: list[Exported] = []
        _PATCH.enter(self.options, exports)
        return exports

    def __exit__(self, *error: object) -> None:
        _PATCH.leave()


class _Blocks(threading.local):
    """The active blocks of each thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[tuple[HookOptions, list[Exported]]] = []


class _Patch:
    """Replaces `torch.onnx.export` while any block is active; each thread has its own stack of blocks."""

    def __init__(self) -> None:
        self._lock, self._local = threading.Lock(), _Blocks()
        self._blocks = 0
        self._function: Callable[..., Any] | None = None
        self.original: Callable[..., Any] | None = None

    def enter(self, options: HookOptions, exports: list[Exported]) -> None:
        with self._lock:
            if not self._blocks:
                self.original = torch.onnx.export
                self._function = torch.onnx.export = self._dispatcher(torch.onnx.export)
            self._blocks += 1
        self._local.stack.append((options, exports))

    def leave(self) -> None:
        self._local.stack.pop()
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                if torch.onnx.export is self._function:  # else other code has wrapped it since
                    torch.onnx.export = self.original
                self._function = self.original = None

    def _dispatcher(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            if not self._local.stack:
                return original(*args, **kwargs)
            options, exports = self._local.stack[-1]
            call = ExportCall.of(original, args, kwargs)
            if call.target is None:
                return _fixed_when_saved(call, options, exports)
            exported = _export(call, options)
            exports.append(exported)
            return exported.program

        return dispatch


_PATCH = _Patch()


def _original() -> Callable[..., Any]:
    """PyTorch's exporter, even inside a `patched` block."""
    original: Callable[..., Any] = _PATCH.original or torch.onnx.export
    return original


def _export(call: ExportCall, options: HookOptions) -> Exported:
    return _fixed(call, *_plain(call, options), options)


def _plain(call: ExportCall, options: HookOptions) -> tuple[Any, tuple[Advice, ...]]:
    """The plain export, with the advice that is printed before it.

    A module in training mode is exported in eval mode, unless `training=` was given. The older exporter does
    so itself; the newer one exports a live Dropout, whose random results nothing can be compared with.
    """
    with _same_randomness():
        advice = advise(call.model, *call.example, opset_version=call.opset)
    for one in advice:
        say(f"before the export: {one}", options)
    modules = call.model.modules() if isinstance(call.model, torch.nn.Module) else ()
    live = call.dynamo and any(module.training for module in modules) and "training" not in call.kwargs
    if live:
        say("the module is in training mode: it is exported in eval mode, and its mode is restored", options)
    with eval_mode(call.model) if live else nullcontext():
        return call.run(), tuple(advice)


def _fixed(call: ExportCall, program: Any, advice: tuple[Advice, ...], options: HookOptions) -> Exported:
    """Fix the export wherever it went: a file, a stream, or an ONNXProgram."""
    feeds = partial(_feeds, call, options)

    def in_memory() -> Fixed:
        return fix_proto(program.model_proto, feeds, options, "it")

    with _same_randomness():
        if call.path is not None:
            fixed = fix_file(call.path, feeds, options)
        elif call.target is None:
            fixed = attempt(in_memory, options, "the program")
        else:
            fixed = attempt(lambda: _fix_stream(call.target, feeds, options), options, "the stream")
    return Exported(**vars(fixed), program=program, advice=advice)


def _fix_stream(stream: Any, feeds: Callable[[Model], Any], options: HookOptions) -> Fixed:
    """Replace the content of a readable stream, such as BytesIO."""
    if options.keep_raw:
        raise UsageError("a stream holds one model only", where="keep_raw=", hint="export to a file")
    stream.seek(0)
    proto = onnx.load_model_from_string(stream.read())
    fixed = fix_proto(proto, feeds, replace(options, strict=True), "the stream")
    if fixed.result is not None:
        data = fixed.result.proto.SerializeToString(deterministic=True)
        stream.seek(0)
        stream.truncate()
        stream.write(data)
    return fixed


def _fixed_when_saved(call: ExportCall, options: HookOptions, exports: list[Exported]) -> Any:
    """Export without a file; the fix follows `program.save(path)`."""
    program, advice = _plain(call, options)
    save = program.save

    @wraps(save)
    def saved(destination: Any, *args: Any, **kwargs: Any) -> Any:
        answer = save(destination, *args, **kwargs)
        written = replace(call, named={**call.named, "f": destination})
        exports.append(_fixed(written, program, advice, options))
        return answer

    program.save = saved
    return program


def _feeds(call: ExportCall, options: HookOptions, model: Model) -> Iterable[Mapping[str, Array]] | None:
    if options.calibration is not None:
        return calibration_feeds(model, call.model, options.calibration, options.samples)
    feeds = example_feeds(model, call.model, *call.example)
    if all(is_blank(array) for array in feeds.values()):
        say(
            "the example arguments are constant, so ranges come from random data; give calibration=",
            options,
        )
        return None
    return [feeds]


def _same_randomness() -> Any:
    """Returns a context that restores the random state, so that training is not affected."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = list(range(torch.cuda.device_count())) if on_gpu else []
    return torch.random.fork_rng(devices=devices) if hasattr(torch.random, "fork_rng") else nullcontext()
