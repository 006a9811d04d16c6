"""TensorRT in Python: its import, log and plugins; used in child processes only."""

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rewriter.base.errors import EngineError
from rewriter.runtime.engines import nvidia_driver

LIBRARIES = ("tensorrt", "tensorrt_rtx")

MESSAGE_LIMIT = 200  # distinct warnings, and as many errors, that are kept


def import_tensorrt(name: str | None) -> Any:
    """Imports the module `name`, or the best one that can build here."""
    gpu = nvidia_driver.gpu() is not None
    wanted = (name,) if name else (LIBRARIES if gpu else LIBRARIES[1:])
    failures = []
    for candidate in wanted:
        try:
            return import_module(candidate)
        except (ImportError, OSError) as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == candidate
            failures.append(f"{candidate} " + ("is not installed" if missing else f"does not load: {error}"))
    unusable = "" if gpu or name else " (tensorrt itself needs a GPU)"
    hint = "pip install tensorrt-rtx, which builds without a GPU"
    raise EngineError("; ".join(failures) + unusable, hint=hint)


class Log:
    """Prints messages, and keeps warnings and errors; `parsing` has the current node and its operator."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.errors: list[str] = []
        self.parsing: tuple[str, str] = ("", "")

    def add(self, severity: str, message: str) -> None:
        sys.stderr.write(f"[{severity}] {message}\n")
        sys.stderr.flush()
        if severity != "INFO" and (text := noiseless(message)):
            lines = self.warnings if severity == "WARNING" else self.errors
            if text not in lines and len(lines) < MESSAGE_LIMIT:
                lines.append(text)


def logger(trt: Any, log: Log) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.INFO:
                log.add(severity.name, message)
            elif found := re.match(r"Parsing node: (.*) \[(.*)\]$", message):
                log.parsing = (found[1], found[2])
            elif "] outputs: [" in message:
                log.parsing = ("", "")

    return Logger()


def noiseless(message: str) -> str:
    """The message on one line, without source positions and complaints about a missing GPU driver."""
    lines = [line for line in message.splitlines() if "catchCudaError" not in line]
    return re.sub(r"\.? +In \w+ at /?[\w./]+:\d+|^\w+\.[ch]pp:\d+: ", "", " ".join(lines)).strip()


def load_plugins(trt: Any, registry: Any, plugins: Sequence[Path]) -> None:
    """Loads the library's own plugins and the files `plugins`; an EngineError for a file that has none."""
    if hasattr(trt, "init_libnvinfer_plugins"):
        trt.init_libnvinfer_plugins(None, "")
    for plugin in plugins:
        problem = "it registered no plugin: another library did, or the loader refused it"
        try:
            loaded = registry.load_library(str(plugin))
        except Exception as error:  # the bindings raise several types
            loaded, problem = None, f"it does not load as a TensorRT plugin library: {error}"
        if loaded is None:
            hint = "build it for this TensorRT and platform; `ldd` lists the libraries that it misses"
            raise EngineError(problem, where=str(plugin), hint=hint)
