"""The child's side of engines/build.py: parses and builds."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewriter.ir.errors import EngineError
from rewriter.runtime.engines import nvidia_driver
from rewriter.runtime.engines.build import TIMES_KERNELS, BuildReport, NetworkLayer, ParserError
from rewriter.runtime.engines.caches import gpu_turn, timing_cache
from rewriter.runtime.engines.tensorrt_library import (
    Log,
    import_tensorrt,
    load_plugins,
    logger,
    without_noise,
)

if TYPE_CHECKING:
    from rewriter.runtime.engines.build import BuildOptions

PORTABLE_CAPABILITY = "SM80"
"""Compute capability that TensorRT-RTX builds for without a GPU: a single one, so one set of kernels. 8.0 is
the oldest that its default engines cover."""


def build_here(path: Path, options: BuildOptions) -> BuildReport:
    """Parse and build in this process."""
    trt = import_tensorrt(options.library)
    log = Log()
    sink = logger(trt, log)
    builder = trt.Builder(sink)
    load_plugins(trt, builder.get_plugin_registry(), options.plugins)
    network = builder.create_network(_creation_flags(trt))
    parser = trt.OnnxParser(network, sink)
    start = time.perf_counter()
    parsed = bool(parser.parse_from_file(str(path)))
    report = BuildReport(
        trt.__name__,
        trt.__version__,
        parsed,
        layers=tuple(_layer(network.get_layer(i)) for i in range(network.num_layers)) if parsed else (),
        inputs=tuple(_tensor(network.get_input(i)) for i in range(network.num_inputs)),
        parser_errors=tuple(_parser_error(parser.get_error(i)) for i in range(parser.num_errors)),
        parse_s=time.perf_counter() - start,
        notes=tuple(_mark(network, options)) if parsed else (),
    )
    if parsed and not options.parse_only:
        report = replace(report, **_attempt(trt, builder, network, options))
    return replace(report, warnings=tuple(log.warnings), errors=tuple(log.errors))


def _attempt(trt: Any, builder: Any, network: Any, options: BuildOptions) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        outcome: dict[str, Any] = {"engine_bytes": _serialize(trt, builder, network, options)}
    except EngineError as error:
        outcome = {"obstacle": error.what, "hint": error.hint or ""}
    return {**outcome, "build_s": time.perf_counter() - start}


def _creation_flags(trt: Any) -> int:
    """STRONGLY_TYPED, which TensorRT 10 needs and the others ignore."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _parser_error(error: Any) -> ParserError:
    return ParserError(error.node_name(), error.node_operator(), without_noise(error.desc()))


def _layer(layer: Any) -> NetworkLayer:
    outputs = tuple(_tensor(layer.get_output(i)) for i in range(layer.num_outputs))
    return NetworkLayer(layer.name, layer.type.name, onnx_node(getattr(layer, "metadata", "")), outputs)


def _tensor(tensor: Any) -> tuple[str, str]:
    return tensor.name, tensor.dtype.name


def onnx_node(metadata: str) -> str:
    """The innermost node of a layer's metadata: `[ONNX Layer: node | branch (then_branch) | outer (If)]`."""
    match = re.match(r"\[ONNX Layer: (.*?)(?: \| .*)?\]$", metadata or "")
    return match[1] if match else ""


def _mark(network: Any, options: BuildOptions) -> Iterator[str]:
    """Mark further outputs and debug tensors; yields a note for each that cannot be marked."""
    missing = set(options.outputs)
    for layer in map(network.get_layer, range(network.num_layers)):
        for tensor in map(layer.get_output, range(layer.num_outputs)):
            if tensor.name in missing:
                missing.discard(tensor.name)
                if not tensor.is_network_output:
                    network.mark_output(tensor)
    for name in sorted(missing):
        yield f"tensor {name!r} is not in the parsed network: folded, or inside a subgraph"
    if options.debug:
        mark = getattr(network, "mark_unfused_tensors_as_debug_tensors", None)
        if mark is None:
            yield "this TensorRT has no unfused debug tensors (10.12 and later have)"
        else:
            mark()


def _serialize(trt: Any, builder: Any, network: Any, options: BuildOptions) -> int | None:
    """Build; size of the engine in bytes, or None if the builder gave up (its log says why)."""
    config = _configured(trt, builder, network, options)
    cache = timing_cache(trt, config) if options.timing_cache else None
    with gpu_turn() if trt.__name__ in TIMES_KERNELS else nullcontext():
        engine = builder.build_serialized_network(network, config)
    if engine is None:
        return None
    if cache is not None:
        cache.keep()
    if options.engine:
        Path(options.engine).write_bytes(memoryview(engine))
    return int(engine.nbytes)


def _configured(trt: Any, builder: Any, network: Any, options: BuildOptions) -> Any:
    config = builder.create_builder_config()
    capability = options.compute_capability or (None if nvidia_driver.has_gpu() else PORTABLE_CAPABILITY)
    capabilities = getattr(trt, "ComputeCapability", None)  # of TensorRT-RTX alone
    if capability and capabilities is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(_capability(trt, capabilities, capability), 0)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if not options.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    if options.details:
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    _add_profile(builder, network, config, options)
    return config


def _capability(trt: Any, capabilities: Any, name: str) -> Any:
    known = [n for n in dir(capabilities) if n.startswith("SM") or n == "CURRENT"]
    if name not in known:
        raise EngineError(
            f"{trt.__name__} {trt.__version__} cannot build for {name}", hint=f"one of {', '.join(known)}"
        )
    return getattr(capabilities, name)


def _add_profile(builder: Any, network: Any, config: Any, options: BuildOptions) -> None:
    profile = builder.create_optimization_profile()
    needed = False
    for tensor in (network.get_input(i) for i in range(network.num_inputs)):
        if tensor.is_shape_tensor:
            value = _given(options.values, tensor.name, "is a shape or a trip count", "its value")
            profile.set_shape_input(tensor.name, value, value, value)
            needed = True
        elif -1 in tuple(tensor.shape):
            span = _given(options.shapes, tensor.name, "has dynamic axes", "its shape")
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
            hint=f"give sample data (`inputs`), or `input-shapes={name}:1x3x224x224`",
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
