"""PyTorch: `torch.onnx.export` followed by the fix, as a function or for a block of existing code.

Raises:
    ImportError: PyTorch is not installed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ContextDecorator, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import onnx

from rewriter.hooks.library import require

torch = require("torch", "torch", __name__)

from rewriter.errors import UsageError  # noqa: E402  # the message about PyTorch comes first
from rewriter.hooks.advice import Advice, advise, inspect_module  # noqa: E402
from rewriter.hooks.export_call import ExportCall  # noqa: E402
from rewriter.hooks.fixing import Fixed, FixWarning, attempt, fix_file, fix_proto, say  # noqa: E402
from rewriter.hooks.hook_options import SAMPLES, HookOptions  # noqa: E402
from rewriter.hooks.norm_modules import NormModule, replaced  # noqa: E402
from rewriter.hooks.observe import eval_mode  # noqa: E402
from rewriter.hooks.torch_feeds import calibration_feeds, example_feeds, is_blank  # noqa: E402
from rewriter.model import Array, Model  # noqa: E402

__all__ = ["Advice", "Exported", "FixWarning", "advise", "export", "patched"]


@dataclass(frozen=True)
class Exported(Fixed):
    """Result of one export; see `Fixed`.

    Attributes:
        program: Result of `torch.onnx.export`: None, or an ONNXProgram with the plain export.
        advice: Problems found in the module before the export.
        swaps: Norms that were replaced during the export (`prepare`).
    """

    program: Any = None
    advice: tuple[Advice, ...] = ()
    swaps: tuple[NormModule, ...] = ()


def export(
    model: Any,
    args: Any = (),
    f: Any = None,
    *positional: Any,
    fix: Mapping[str, Any] | None = None,
    calibration: Iterable[Any] | None = None,
    samples: int = SAMPLES,
    prepare: bool = False,
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
    options = HookOptions(dict(fix or {}), calibration, samples, prepare, strict, keep_raw, quiet)
    given = (model, args, *(() if f is None and not positional else (f,)), *positional)
    return _export(ExportCall.of(_original(), given, kwargs), options)


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


@dataclass(frozen=True)
class _Plain:
    """The plain export, with what the inspection before it found."""

    program: Any
    advice: tuple[Advice, ...]
    swaps: tuple[NormModule, ...] = ()


def _export(call: ExportCall, options: HookOptions) -> Exported:
    return _fixed(call, _plain(call, options), options)


def _plain(call: ExportCall, options: HookOptions) -> _Plain:
    """Inspect the module, print advice, and export it, with `prepare` if that works."""
    with _same_randomness():
        seen = inspect_module(call.model, *call.example, opset_version=call.opset, dynamo=call.dynamo)
    norms = seen.norms if options.prepare else ()
    for advice in seen.advice:
        if advice.kind != "norm" or not set(advice.modules) <= {norm.name for norm in norms}:
            say(f"before the export: {advice}", options)
    if norms:
        try:
            with replaced(norms), _as_deployed(call, options):
                program = call.run()
            say(_prepared(norms), options)
            return _Plain(program, seen.advice, norms)
        except Exception as error:
            if options.strict:
                raise
            say(f"prepare: exported without it, since the prepared module failed: {error}", options)
    with _as_deployed(call, options):
        return _Plain(call.run(), seen.advice)


def _as_deployed(call: ExportCall, options: HookOptions) -> Any:
    """Returns a context in which a module in training mode is in eval mode, unless `training=` was given.

    The older exporter does so itself. The newer one exports a live Dropout, whose random results nothing can
    be compared with.
    """
    modules = call.model.modules() if isinstance(call.model, torch.nn.Module) else ()
    live = call.dynamo and any(module.training for module in modules)
    if not live or "training" in call.kwargs:
        return nullcontext()
    say("the module is in training mode: it is exported in eval mode, and its mode is restored", options)
    return eval_mode(call.model)


def _prepared(norms: Sequence[NormModule]) -> str:
    names = ", ".join(norm.name for norm in norms[:3]) + (", ..." if len(norms) > 3 else "")
    worst = max(norm.error for norm in norms)
    return f"prepared {len(norms)} norms ({names}), each as one operator, equal to {worst:.1g}"


def _fixed(call: ExportCall, plain: _Plain, options: HookOptions) -> Exported:
    """Fix the export wherever it went: a file, a stream, or an ONNXProgram."""
    feeds = partial(_feeds, call, options)

    def in_memory() -> Fixed:
        return fix_proto(plain.program.model_proto, feeds, options, "it")

    with _same_randomness():
        if call.path is not None:
            fixed = fix_file(call.path, feeds, options)
        elif call.target is None:
            fixed = attempt(in_memory, options, "the program")
        else:
            fixed = attempt(lambda: _fix_stream(call.target, feeds, options), options, "the stream")
    return Exported(**vars(fixed), **vars(plain))


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
    plain = _plain(call, options)
    save = plain.program.save

    @wraps(save)
    def saved(destination: Any, *args: Any, **kwargs: Any) -> Any:
        answer = save(destination, *args, **kwargs)
        written = replace(call, named={**call.named, "f": destination})
        exports.append(_fixed(written, plain, options))
        return answer

    plain.program.save = saved
    return plain.program


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
