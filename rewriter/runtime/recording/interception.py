"""Watches or replaces the calls that a script makes of ONNX Runtime in Python, in this process or in a child.

Methods of its classes are replaced, so that it does not matter how a script imported them. This module loads
in every Python process of a script, whose environment may have no package but NumPy.
"""

from __future__ import annotations

import codecs
import ctypes
import importlib
import importlib.abc
import importlib.util
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

if TYPE_CHECKING:
    from rewriter.ir.model import Array

Feeds = dict[str, Any]

SESSIONS = "onnxruntime.capi.onnxruntime_inference_collection"
"""The module that has ONNX Runtime's classes in Python."""

HOOK = "REWRITER_HOOK"
"""Environment variable with the hook of a child process: `[name, arguments]` as JSON."""


class Hook(Protocol):
    """Sees every session and every call; it may run something else in their place."""

    def load(self, session: Any, model: Any) -> Any:
        """Returns the model (path or bytes) that a new session loads in place of `model`.

        The session is not initialised yet: it serves as a key.
        """
        ...

    def call(
        self, session: Any, names: Sequence[str], feeds: Feeds, run: Callable[[], Sequence[Any]]
    ) -> Sequence[Any]:
        """Returns the outputs `names` of a call, by `run` or by other means, in the same types and shapes."""
        ...

    def finish(self) -> None:
        """The script ended."""
        ...


@dataclass(frozen=True)
class ScriptRun:
    """How a script ended: its exit code, and what it printed on standard output."""

    exit_code: int
    printed: str


SITE = """\
import importlib.util, sys
sys.path[:] = [path for path in sys.path if path != {folder!r}]
own = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # the environment's
except ImportError:
    sys.modules["sitecustomize"] = own
spec = importlib.util.spec_from_file_location("rewriter", {package!r})
sys.modules["rewriter"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["rewriter"])
from rewriter.runtime.recording.interception import attach
attach()
"""
"""Python imports a module of this name as it starts. The environment may have no `rewriter`, or another."""


def run_script(
    command: Sequence[str],
    hook: str,
    arguments: Mapping[str, Any],
    *,
    quiet: bool = False,
    limit_s: float | None = None,
) -> ScriptRun:
    """Runs a command; each Python process that it starts and that loads ONNX Runtime gets a hook.

    Args:
        hook: `module:Class`, a `Hook`.
        arguments: Of its constructor, as JSON has them.
        quiet: Do not pass on what it prints on standard output.
        limit_s: It is ended by SIGTERM after this time.

    Raises:
        OSError: the command cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="rewriter-site-") as folder:
        site = SITE.format(folder=folder, package=str(Path(__file__).parents[2] / "__init__.py"))
        Path(folder, "sitecustomize.py").write_text(site, encoding="utf-8")
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"PYTHONPATH": os.pathsep.join(paths), HOOK: json.dumps([hook, dict(arguments)])}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | environment) as process:
            assert process.stdout is not None
            timer = threading.Timer(limit_s or 0.0, process.terminate)
            if limit_s is not None:
                timer.start()
            decoder, parts = codecs.getincrementaldecoder("utf-8")("replace"), []
            try:
                while part := os.read(process.stdout.fileno(), 2**16):
                    parts.append(decoder.decode(part))
                    if not quiet:
                        sys.stdout.write(parts[-1])
                        sys.stdout.flush()
            except BaseException:  # Ctrl-C, or the end of this process
                process.terminate()
                raise
            finally:
                timer.cancel()
    return ScriptRun(process.returncode, "".join(parts))


def attach() -> None:
    """Hooks ONNX Runtime as soon as this process, a child of `run_script`, imports it."""
    sys.meta_path.insert(0, _Finder())
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, _frame: Any) -> None:
    """Ends this process with its children of `multiprocessing`, whose pools end theirs by a signal, too."""
    if processes := sys.modules.get("multiprocessing"):
        for child in processes.active_children():
            child.terminate()
        if processes.parent_process() is not None:
            if sys.modules["multiprocessing.util"].is_exiting():
                return  # they are running, and write the recording
            sys.exit(128 + number)  # its finalizers run
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def end_script(code: int) -> NoReturn:
    """Ends this process, and the one that started it with `multiprocessing`, which may wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = sys.modules["multiprocessing"].parent_process() if "multiprocessing" in sys.modules else None
    if parent is not None:
        os.kill(parent.pid, signal.SIGTERM)
    os._exit(code)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module of ONNX Runtime's classes, and replaces their methods as soon as it has run."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != SESSIONS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = spec and spec.loader
        if loader is not None:
            loader.exec_module = partial(_execute, loader.exec_module)
        return spec


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    name, arguments = json.loads(os.environ[HOOK])
    hook = pkgutil.resolve_name(name)(**arguments)
    _replace_methods(hook, module)
    _finish_in_process(hook)
    importlib.import_module("multiprocessing.util").register_after_fork(hook, _finish_in_process)


def _finish_in_process(hook: Hook) -> None:
    """Finishes a hook as this process ends; processes of `multiprocessing` do nothing of `atexit`."""

    def finish() -> None:
        # a pool sends the signal to all its processes, even to one that ends
        handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        hook.finish()
        signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)

    importlib.import_module("multiprocessing.util").Finalize(None, finish, exitpriority=0)


@contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """Hooks ONNX Runtime in this process for the length of the block, sessions that exist included."""
    undo = _replace_methods(hook, importlib.import_module(SESSIONS))
    try:
        yield
    finally:
        undo()
        hook.finish()


def model_of(session: Any) -> Any:
    """The path or the bytes that a session of ONNX Runtime was made from."""
    return getattr(session, "_model_path", None) or getattr(session, "_model_bytes", None)


def _replace_methods(hook: Hook, module: ModuleType) -> Callable[[], None]:
    """Replaces the methods of ONNX Runtime's classes; returns the function that puts them back."""
    originals: list[tuple[Any, str, Any]] = []
    for (owner_name, name), method in METHODS.items():
        owner = getattr(module, owner_name)
        if (original := vars(owner).get(name)) is not None:  # older releases have fewer
            originals.append((owner, name, original))
            setattr(owner, name, _method(hook, original, method))

    def undo() -> None:
        for owner, name, original in originals:
            setattr(owner, name, original)

    return undo


def _method(hook: Hook, original: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def replaced(self: Any, *args: Any, **more: Any) -> Any:
        return method(hook, partial(original, self), self, *args, **more)

    return replaced


def _run(
    hook: Hook, original: Any, session: Any, output_names: Any, input_feed: Any, run_options: Any = None
) -> Any:
    run = partial(original, output_names, input_feed, run_options)
    return hook.call(session, _names(session, output_names), _arrays(input_feed), run)


def _run_async(
    hook: Hook,
    original: Any,
    session: Any,
    output_names: Any,
    input_feed: Any,
    callback: Any,
    user_data: Any,
    run_options: Any = None,
) -> Any:
    def done(results: Any, data: Any, error: str) -> None:
        if not error:
            results = hook.call(session, _names(session, output_names), _arrays(input_feed), lambda: results)
        callback(results, data, error)

    return original(output_names, input_feed, done, user_data, run_options)


def _run_with_ort_values(
    hook: Hook,
    original: Any,
    session: Any,
    output_names: Any,
    input_dict_ort_values: Any,
    run_options: Any = None,
) -> Any:
    ran: list[Any] = []
    arrays: list[Array] = []

    def run() -> list[Array]:
        ran[:] = original(output_names, input_dict_ort_values, run_options)
        arrays[:] = [value.numpy() for value in ran]
        return arrays

    results = hook.call(session, _names(session, output_names), _arrays(input_dict_ort_values), run)
    from_numpy = importlib.import_module(SESSIONS).OrtValue.ortvalue_from_numpy
    return ran if results is arrays else [from_numpy(array) for array in results]


def _run_with_iobinding(
    hook: Hook, original: Any, session: Any, iobinding: Any, run_options: Any = None
) -> None:
    arrays: list[Array] = []

    def run() -> list[Array]:
        original(iobinding, run_options)
        arrays[:] = [value.numpy() for value in iobinding.get_outputs()]
        return arrays

    feeds = {}
    for name, read in _bound(iobinding, "inputs").items():
        with suppress(KeyError, OSError, RuntimeError):  # of a type or a device that cannot be read
            feeds[name] = read()
    results = hook.call(session, list(_bound(iobinding, "outputs")), feeds, run)
    if results is not arrays:
        run()  # it makes the buffers that are not there yet
        for value, array in zip(iobinding.get_outputs(), results, strict=True):
            value.update_inplace(array)


def _binds(kind: str, reader: Callable[..., Callable[[], Any]]) -> Callable[..., None]:
    """A method of IOBinding that remembers what it binds."""

    def bind(hook: Hook, original: Any, binding: Any, name: str, *args: Any, **more: Any) -> None:
        original(name, *args, **more)
        _bound(binding, kind)[name] = reader(*args, **more)

    return bind


def _clears(kind: str) -> Callable[..., None]:
    """A method of IOBinding that forgets it again."""

    def clear(hook: Hook, original: Any, binding: Any) -> None:
        original()
        _bound(binding, kind).clear()

    return clear


def _reader(
    device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
) -> Callable[[], Array]:
    """A function that reads a buffer of an address, in the memory of the host or of a GPU."""

    def read() -> Array:
        import numpy as np
        from onnx.helper import tensor_dtype_to_np_dtype

        named = tensor_dtype_to_np_dtype(element_type) if isinstance(element_type, int) else element_type
        array = np.empty(tuple(shape), named)
        if device_type == "cpu":
            ctypes.memmove(array.ctypes.data, buffer_ptr, array.nbytes)
        elif array.nbytes:
            driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
            size = ctypes.c_size_t(array.nbytes)
            if driver.cuMemcpyDtoH_v2(ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(buffer_ptr), size):
                raise RuntimeError(f"a buffer of device {device_type} cannot be read")
        return array

    return read


METHODS: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("InferenceSession", "__init__"): lambda hook, original, session, path_or_bytes, *args, **more: original(
        hook.load(session, path_or_bytes), *args, **more
    ),
    ("Session", "run"): _run,
    ("Session", "run_async"): _run_async,
    ("Session", "run_with_ort_values"): _run_with_ort_values,
    ("Session", "run_with_iobinding"): _run_with_iobinding,
    ("IOBinding", "bind_cpu_input"): _binds("inputs", lambda arr_on_cpu: lambda: arr_on_cpu),
    ("IOBinding", "bind_ortvalue_input"): _binds("inputs", lambda ortvalue: ortvalue.numpy),
    ("IOBinding", "bind_input"): _binds("inputs", _reader),
    ("IOBinding", "bind_output"): _binds("outputs", lambda *args, **more: lambda: None),
    ("IOBinding", "bind_ortvalue_output"): _binds("outputs", lambda ortvalue: lambda: None),
    ("IOBinding", "clear_binding_inputs"): _clears("inputs"),
    ("IOBinding", "clear_binding_outputs"): _clears("outputs"),
}
"""Functions that take the place of methods, with the names of their arguments. Before these: the hook, the
original, the object."""


def _names(session: Any, names: Any) -> list[str]:
    return list(names) if names else [output.name for output in session.get_outputs()]


def _arrays(feeds: Mapping[str, Any]) -> Feeds:
    """The feeds with arrays in place of ONNX Runtime's own values."""
    return {name: value.numpy() if hasattr(value, "numpy") else value for name, value in feeds.items()}


def _bound(iobinding: Any, kind: str) -> dict[str, Callable[[], Any]]:
    """The inputs or outputs that a binding has, each with a function that reads its value, in their order."""
    bound: dict[str, Callable[[], Any]] = iobinding.__dict__.setdefault(f"_rewriter_{kind}", {})
    return bound
