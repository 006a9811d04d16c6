"""The child's side of engines/tensorrt.py: the only code that imports TensorRT."""

from __future__ import annotations

import ctypes
import re
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rewriter.errors import EngineError

LIBRARIES = ("tensorrt", "tensorrt_rtx")

INSTALL_HINT = 'pip install "rewriter[rtx]" (TensorRT-RTX builds without a GPU)'

MESSAGE_LIMIT = 200
"""Distinct warnings, and as many errors, that are kept."""


def build_here(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Parse and build in this process; the fields of `BuildReport` as JSON."""
    trt = _library(options["library"])
    log = _Log()
    logger = _logger(trt, log)
    builder = trt.Builder(logger)
    network = builder.create_network(_creation_flags(trt))
    parser = trt.OnnxParser(network, logger)
    start = time.perf_counter()
    parsed = bool(parser.parse_from_file(path))
    result = {
        "library": trt.__name__,
        "version": trt.__version__,
        "parsed": parsed,
        "layers": [_layer(network.get_layer(i)) for i in range(network.num_layers)] if parsed else [],
        "inputs": [_tensor(network.get_input(i)) for i in range(network.num_inputs)],
        "parser_errors": [_parser_error(parser.get_error(i)) for i in range(parser.num_errors)],
        "parse_s": time.perf_counter() - start,
    }
    if parsed and not options["parse_only"]:
        result |= _attempt(trt, builder, network, options)
    return {**result, "warnings": log.warnings, "errors": log.errors}


def _attempt(trt: Any, builder: Any, network: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        outcome: dict[str, Any] = {"engine_bytes": _serialize(trt, builder, network, options)}
    except EngineError as error:
        outcome = {"obstacle": error.what, "hint": error.hint or ""}
    return {**outcome, "build_s": time.perf_counter() - start}


def _library(name: str | None) -> Any:
    """The module `name`, or the best one that can build here."""
    gpu = _has_gpu()
    wanted = (name,) if name else (LIBRARIES if gpu else LIBRARIES[1:])
    failures = []
    for candidate in wanted:
        try:
            return import_module(candidate)
        except (ImportError, OSError) as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == candidate
            failures.append(f"{candidate} " + ("is not installed" if missing else f"does not load: {error}"))
    unusable = "" if gpu or name else " (tensorrt itself needs a GPU)"
    raise EngineError("; ".join(failures) + unusable, hint=INSTALL_HINT)


def _has_gpu() -> bool:
    """Whether the NVIDIA driver is there and sees a device."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


class _Log:
    """Distinct warnings and errors in order; everything from INFO on goes to stderr as it comes."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.errors: list[str] = []

    def add(self, severity: str, message: str) -> None:
        sys.stderr.write(f"[{severity}] {message}\n")
        sys.stderr.flush()
        if severity != "INFO" and (told := without_noise(message)):
            kept = self.warnings if severity == "WARNING" else self.errors
            if told not in kept and len(kept) < MESSAGE_LIMIT:
                kept.append(told)


def _logger(trt: Any, log: _Log) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.INFO:
                log.add(severity.name, message)

    return Logger()


def _creation_flags(trt: Any) -> int:
    """STRONGLY_TYPED, which TensorRT 10 must be told and the others ignore."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _parser_error(error: Any) -> tuple[str, str, str]:
    return error.node_name(), error.node_operator(), without_noise(error.desc())


def without_noise(message: str) -> str:
    """One line, without the complaint that there is no GPU driver, and without source positions."""
    lines = [line for line in message.splitlines() if "catchCudaError" not in line]
    return re.sub(r"\.? +In \w+ at /?[\w./]+:\d+|^\w+\.[ch]pp:\d+: ", "", " ".join(lines)).strip()


def _layer(layer: Any) -> tuple[str, str, str, list[tuple[str, str]]]:
    outputs = [_tensor(layer.get_output(i)) for i in range(layer.num_outputs)]
    return layer.name, layer.type.name, onnx_node(getattr(layer, "metadata", "")), outputs


def _tensor(tensor: Any) -> tuple[str, str]:
    return tensor.name, tensor.dtype.name


def onnx_node(metadata: str) -> str:
    """The innermost node of a layer's metadata: `[ONNX Layer: node | branch (then_branch) | outer (If)]`."""
    match = re.match(r"\[ONNX Layer: (.*?)(?: \| .*)?\]$", metadata or "")
    return match[1] if match else ""


def _serialize(trt: Any, builder: Any, network: Any, options: Mapping[str, Any]) -> int | None:
    """Build; size of the engine in bytes, or None if the builder gave up (its log says why)."""
    config = builder.create_builder_config()
    if hasattr(config, "num_compute_capabilities"):
        config.num_compute_capabilities = 1
        config.set_compute_capability(_capability(trt, options["compute_capability"]), 0)
    if options["optimization_level"] is not None:
        config.builder_optimization_level = options["optimization_level"]
    _add_profile(builder, network, config, options)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        return None
    if options["engine"]:
        Path(options["engine"]).write_bytes(memoryview(engine))
    return int(engine.nbytes)


def _capability(trt: Any, name: str) -> Any:
    known = [n for n in dir(trt.ComputeCapability) if n.startswith("SM") or n == "CURRENT"]
    if name not in known:
        raise EngineError(
            f"{trt.__name__} {trt.__version__} cannot build for {name}", hint=f"one of {', '.join(known)}"
        )
    return getattr(trt.ComputeCapability, name)


def _add_profile(builder: Any, network: Any, config: Any, options: Mapping[str, Any]) -> None:
    profile = builder.create_optimization_profile()
    needed = False
    for tensor in (network.get_input(i) for i in range(network.num_inputs)):
        if tensor.is_shape_tensor:
            value = _given(options["values"], tensor.name, "is a shape or a trip count", "its value")
            profile.set_shape_input(tensor.name, value, value, value)
            needed = True
        elif -1 in tuple(tensor.shape):
            span = _given(options["shapes"], tensor.name, "has dynamic axes", "its shape")
            _require_fit(tensor.name, tuple(tensor.shape), span)
            profile.set_shape(tensor.name, *(tuple(shape) for shape in span))
            needed = True
    if needed:
        config.add_optimization_profile(profile)


def _given(table: Mapping[str, Any], name: str, why: str, what: str) -> Any:
    if name not in table:
        raise EngineError(
            f"input {name!r} {why}, and nothing says {what}",
            where=name,
            hint=f"give sample data (--inputs), or --input-shape {name}:1x3x224x224",
        )
    return table[name]


def _require_fit(name: str, declared: tuple[int, ...], span: Sequence[Sequence[int]]) -> None:
    for shape in span:
        fits = len(shape) == len(declared) and all(d in (-1, s) for d, s in zip(declared, shape, strict=True))
        if not fits:
            raise EngineError(
                f"shape {tuple(shape)} does not fit input {name!r}, which is {declared}",
                where=name,
                hint="-1 stands for an axis that may have any size",
            )
