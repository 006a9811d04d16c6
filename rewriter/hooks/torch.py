"""`torch.onnx.export`, followed by the pipeline: as a function, or for a block of other people's code.

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

from rewriter.hooks.library import needed

torch = needed("torch", "torch", __name__)

from rewriter.errors import UsageError  # noqa: E402  # the message about PyTorch comes first
from rewriter.hooks.advice import Advice, advise, look  # noqa: E402
from rewriter.hooks.calls import Call  # noqa: E402
from rewriter.hooks.core import Fixed, FixWarning, attempt, fix_file, fix_proto, say  # noqa: E402
from rewriter.hooks.feeds import calibration_feeds, example_feeds, is_blank  # noqa: E402
from rewriter.hooks.settings import SAMPLES, Settings  # noqa: E402
from rewriter.hooks.swaps import Swap, prepared  # noqa: E402
from rewriter.model import Array, Model  # noqa: E402

__all__ = ["Advice", "Exported", "FixWarning", "advise", "export", "patched"]


@dataclass(frozen=True)
class Exported(Fixed):
    """What came of one export: see `Fixed`.

    Attributes:
        program: What `torch.onnx.export` returned: None, or an ONNXProgram, which holds the plain export.
        advice: What was seen in the module before the export.
        swaps: The modules that were exchanged for the export (`prepare`).
    """

    program: Any = None
    advice: tuple[Advice, ...] = ()
    swaps: tuple[Swap, ...] = ()


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
    """Export a module with `torch.onnx.export` and fix what it wrote, in its place.

    `model`, `args`, `f`, `positional` and `kwargs` are handed to `torch.onnx.export` as they are. `f` may be
    a path, a stream, or None: the fixed model is then in `result.proto` alone. The other arguments are those
    of `Settings`.

    Raises:
        Exception: the export itself failed, or the fix did with `strict`.
    """
    settings = Settings(dict(fix or {}), calibration, samples, prepare, strict, keep_raw, quiet)
    given = (model, args, *(() if f is None and not positional else (f,)), *positional)
    return _export(Call.of(_original(), given, kwargs), settings)


class patched(ContextDecorator):  # noqa: N801  # a context manager that reads as a word
    """Fix whatever `torch.onnx.export` writes in this block, or this function, and this thread.

    `with patched(preset="trt-fp16") as exports:` gathers an `Exported` for each. An ONNXProgram that was
    exported without a file is fixed when its `save` is called. Code that said `from torch.onnx import
    export` before the block holds the plain exporter and is not reached.

    Args:
        preset: Short for `fix={"preset": ...}`.
        options: Those of `Settings`.
    """

    def __init__(
        self, preset: str | None = None, *, fix: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        self.settings = Settings({**({"preset": preset} if preset else {}), **(fix or {})}, **options)

    def __enter__(self) -> list[Exported]:
        exports: list[Exported] = []
        _PATCH.enter(self.settings, exports)
        return exports

    def __exit__(self, *error: object) -> None:
        _PATCH.leave()


class _Patch:
    """Puts one function in the place of `torch.onnx.export`; which blocks are active, each thread knows."""

    def __init__(self) -> None:
        self._lock, self._local = threading.Lock(), threading.local()
        self._blocks = 0
        self._function: Callable[..., Any] | None = None
        self.original: Callable[..., Any] | None = None

    def enter(self, settings: Settings, exports: list[Exported]) -> None:
        with self._lock:
            if not self._blocks:
                self.original = torch.onnx.export
                self._function = torch.onnx.export = self._dispatcher(torch.onnx.export)
            self._blocks += 1
        self._stack().append((settings, exports))

    def leave(self) -> None:
        self._stack().pop()
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                if torch.onnx.export is self._function:  # else somebody wrapped it since: theirs to undo
                    torch.onnx.export = self.original
                self._function = self.original = None

    def _stack(self) -> list[tuple[Settings, list[Exported]]]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[tuple[Settings, list[Exported]]] = self._local.stack
        return stack

    def _dispatcher(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            stack = self._stack()
            if not stack:
                return original(*args, **kwargs)
            settings, exports = stack[-1]
            call = Call.of(original, args, kwargs)
            if call.target is None:
                return _fixed_when_saved(call, settings, exports)
            exported = _export(call, settings)
            exports.append(exported)
            return exported.program

        return dispatch


_PATCH = _Patch()


def _original() -> Callable[..., Any]:
    """The exporter of PyTorch, also inside a `patched` block."""
    original: Callable[..., Any] = _PATCH.original or torch.onnx.export
    return original


def _export(call: Call, settings: Settings) -> Exported:
    advice, swaps, program = _plain(call, settings)
    with _same_randomness():
        fixed = _fixed(call, program, settings)
    return Exported(fixed.path, fixed.result, fixed.error, fixed.raw, program, advice, swaps)


def _plain(call: Call, settings: Settings) -> tuple[tuple[Advice, ...], tuple[Swap, ...], Any]:
    """Look at the module, say what was seen, and export it, prepared if that works."""
    with _same_randomness():
        seen = look(call.model, *call.example, opset_version=call.opset, dynamo=call.dynamo)
    swaps = seen.swaps if settings.prepare else ()
    for advice in seen.advice:
        if advice.kind != "norm" or not set(advice.modules) <= {swap.name for swap in swaps}:
            say(f"before the export: {advice}", settings)
    if swaps:
        try:
            with prepared(swaps):
                program = call.run()
            say(_told(swaps), settings)
            return seen.advice, swaps, program
        except Exception as error:
            if settings.strict:
                raise
            say(f"prepare: exported without it, for the prepared module failed: {error}", settings)
    return seen.advice, (), call.run()


def _told(swaps: Sequence[Swap]) -> str:
    names = ", ".join(swap.name for swap in swaps[:3]) + (", ..." if len(swaps) > 3 else "")
    worst = max(swap.error for swap in swaps)
    return f"prepared {len(swaps)} norms ({names}), each as one operator, the same to {worst:.1g}"


def _fixed(call: Call, program: Any, settings: Settings) -> Fixed:
    feeds = partial(_feeds, call, settings)
    if call.path is not None:
        return fix_file(call.path, feeds, settings)
    if call.target is None:
        return attempt(lambda: fix_proto(program.model_proto, feeds, settings, "it"), settings, "the program")
    return attempt(lambda: _fix_stream(call.target, feeds, settings), settings, "the stream")


def _fix_stream(stream: Any, feeds: Callable[[Model], Any], settings: Settings) -> Fixed:
    """Replace what the exporter wrote into a stream that can be read again, such as BytesIO."""
    if settings.keep_raw:
        raise UsageError("a stream has no place beside it", where="keep_raw=", hint="export to a file")
    stream.seek(0)
    proto = onnx.load_model_from_string(stream.read())
    fixed = fix_proto(proto, feeds, replace(settings, strict=True), "the stream")
    if fixed.result is not None:
        data = fixed.result.proto.SerializeToString(deterministic=True)
        stream.seek(0)
        stream.truncate()
        stream.write(data)
    return fixed


def _fixed_when_saved(call: Call, settings: Settings, exports: list[Exported]) -> Any:
    """Export without a file: the fix follows `program.save(path)`."""
    advice, swaps, program = _plain(call, settings)
    save = program.save

    @wraps(save)
    def saved(destination: Any, *args: Any, **kwargs: Any) -> Any:
        answer = save(destination, *args, **kwargs)
        with _same_randomness():
            written = replace(call, named={**call.named, "f": destination})
            fixed = _fixed(written, program, settings)
        exports.append(Exported(fixed.path, fixed.result, fixed.error, fixed.raw, program, advice, swaps))
        return answer

    program.save = saved
    return program


def _feeds(call: Call, settings: Settings, model: Model) -> Iterable[Mapping[str, Array]] | None:
    if settings.calibration is not None:
        return calibration_feeds(model, call.model, settings.calibration, settings.samples)
    feeds = example_feeds(model, call.model, *call.example)
    if all(is_blank(array) for array in feeds.values()):
        say(
            "the example arguments are constants, so ranges come from random data; give calibration=",
            settings,
        )
        return None
    return [feeds]


def _same_randomness() -> Any:
    """Training goes on with the random numbers that it would have had."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = list(range(torch.cuda.device_count())) if on_gpu else []
    return torch.random.fork_rng(devices=devices) if hasattr(torch.random, "fork_rng") else nullcontext()
