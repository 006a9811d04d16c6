"""TensorRT's parser and builder: options, the child process that runs them, and their report.

`tensorrt` (10, 11) and `tensorrt_rtx` (1.4 on) are one code path; the module's name is the only
difference that callers see. Networks are always strongly typed.
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rewriter.base import sandbox
from rewriter.base.errors import EngineError
from rewriter.runtime.engines import nvidia_driver
from rewriter.runtime.engines.caches import gpu_turn, timing_cache
from rewriter.runtime.engines.tensor_files import Span
from rewriter.runtime.engines.tensorrt_library import Log, import_tensorrt, load_plugins, logger, noiseless

PORTABLE = 80
"""Compute capability that TensorRT-RTX builds for without a GPU: a single one, so one set of kernels. 8.0 is
the oldest that its default engines cover."""

TYPED = {"FP8": (89, 89), "FP4": (100, 120), "E8M0": (100, 120)}
"""The first compute capability with kernels for a type, and the first of these that TensorRT-RTX has."""


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build."""

    # smallest, usual and largest shape of each input with dynamic axes; of an input that is a shape or a trip
    # count itself, the values that the user gave
    shapes: Mapping[str, Span] = field(default_factory=dict)
    # the same of the values, in the samples, of inputs that may be shapes or trip counts
    values: Mapping[str, Span] = field(default_factory=dict)
    # `tensorrt` or `tensorrt_rtx`; None: `tensorrt` if a GPU is there, else `tensorrt_rtx`
    library: str | None = None
    engine: Path | None = None
    outputs: Sequence[str] = ()
    # whether runs can give the tensors between kernels, which changes none (docs/engines.md#what-releases-do)
    unfused: bool = False
    # whether FP32 may be computed in TF32; `build` sets `NO_TF32` in the child's environment, too
    tf32: bool = True
    plugins: Sequence[Path] = ()
    gpus: Sequence[str] = ()  # compute capabilities, such as `sm_89`, that a build without a GPU is for
    # use the cache of kernel timings in the user's cache folder; `tensorrt` on a GPU only
    timing_cache: bool = False


@dataclass(frozen=True)
class NetworkLayer:
    """A layer of the parsed network."""

    name: str
    type: str  # name in `LayerType`, e.g. `NORMALIZATION`
    node: str  # ONNX node that it was made from; "" if unknown
    # name and type (in `DataType`, e.g. `HALF`) of each output; tensors of the ONNX graph have its names
    outputs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ParserError:
    """A node (or initializer) that the parser refuses; `node` and `op` may be ""."""

    node: str
    op: str
    message: str

    def __str__(self) -> str:
        return f"node {self.node or '(unnamed)'} ({self.op}): {self.message}" if self.op else self.message


@dataclass(frozen=True)
class BuildReport:
    """The parsed network, and the result of its build."""

    library: str
    version: str
    parsed: bool
    layers: tuple[NetworkLayer, ...] = ()  # the parsed network; empty if the parser refused the model
    inputs: tuple[tuple[str, str], ...] = ()
    parser_errors: tuple[ParserError, ...] = ()
    # warnings, errors: distinct messages of parser and builder, in order
    warnings: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    # obstacle, hint: what a parsed model lacks for a build, such as an input's shape, and advice; else ""
    obstacle: str = ""
    hint: str = ""
    engine_bytes: int | None = None
    # requests that could not be met, such as an output that is not in the network
    notes: tuple[str, ...] = ()
    build_s: float = 0.0
    log: str = ""

    def count(self, layer_type: str) -> int:
        return sum(layer.type == layer_type for layer in self.layers)

    @property
    def refusal(self) -> str:
        reasons = [str(error) for error in self.parser_errors]
        reasons = reasons or ([self.obstacle] if self.obstacle else list(self.errors[-3:]))
        return "; ".join(reasons) or "the builder gave no engine and no reason"

    def types(self) -> Iterator[tuple[str, str, str]]:
        """Tensor name, type in `DataType`, and ONNX node (or layer) of all inputs and layer outputs."""
        yield from ((name, dtype, "an input") for name, dtype in self.inputs)
        for layer in self.layers:
            yield from ((name, dtype, layer.node or layer.name) for name, dtype in layer.outputs)


NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Environment in which NVIDIA's libraries compute FP32 in FP32; the builder's flag by itself is not enough
(docs/engines.md#what-releases-do)."""


def build(path: Path, options: BuildOptions | None = None, *, timeout_s: float) -> BuildReport:
    """Parse and build an ONNX file in a child process (see `sandbox.run`); EngineError: no library."""
    options = options or BuildOptions()
    report, log = sandbox.run(
        build_here,
        path,
        options,
        doing="the TensorRT build",
        limit_s=timeout_s,
        env=None if options.tf32 else NO_TF32,
    )
    return replace(report, log=log)


def build_here(path: Path, options: BuildOptions) -> BuildReport:
    trt = import_tensorrt(options.library)
    log = Log()
    sink = logger(trt, log)
    builder = trt.Builder(sink)
    load_plugins(trt, builder.get_plugin_registry(), options.plugins)
    # 10 needs it, others ignore it
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = trt.OnnxParser(network, sink)
    parsed = bool(parser.parse_from_file(str(path)))
    report = BuildReport(
        trt.__name__,
        trt.__version__,
        parsed,
        layers=tuple(_layer(network.get_layer(i)) for i in range(network.num_layers)) if parsed else (),
        inputs=tuple(_tensor(network.get_input(i)) for i in range(network.num_inputs)),
        parser_errors=tuple(_refused(parser.get_error(i), log) for i in range(parser.num_errors)),
        notes=tuple(_mark(network, options.outputs)) if parsed else (),
    )
    if parsed:
        start = time.perf_counter()
        try:
            report = replace(report, engine_bytes=_serialize(trt, builder, network, options))
        except EngineError as error:
            report = replace(report, obstacle=error.what, hint=error.hint)
        if any(LACKS_TYPE in error for error in log.errors):
            hint = "name a GPU that has these types with `target`: sm_89 (FP8), sm_120 (FP4)"
            report = replace(report, hint=hint)
        report = replace(report, build_s=time.perf_counter() - start)
    return replace(report, warnings=tuple(log.warnings), errors=tuple(log.errors))


def _refused(error: Any, log: Log) -> ParserError:
    node, op = (error.node_name(), error.node_operator()) if error.node_operator() else log.parsing
    return ParserError(node, op, noiseless(error.desc()))


def _layer(layer: Any) -> NetworkLayer:
    outputs = tuple(_tensor(layer.get_output(i)) for i in range(layer.num_outputs))
    return NetworkLayer(layer.name, layer.type.name, onnx_node(getattr(layer, "metadata", "")), outputs)


def _tensor(tensor: Any) -> tuple[str, str]:
    return tensor.name, tensor.dtype.name


def onnx_node(metadata: str) -> str:
    """The innermost node of a layer's metadata: `[ONNX Layer: node | branch (then_branch) | outer (If)]`."""
    match = re.match(r"\[ONNX Layer: (.*?)(?: \| .*)?\]$", metadata or "")
    return match[1] if match else ""


def _mark(network: Any, names: Iterable[str]) -> Iterator[str]:
    """Mark further outputs; yields a note for each that cannot be marked."""
    missing = set(names)
    for layer in map(network.get_layer, range(network.num_layers)):
        for tensor in map(layer.get_output, range(layer.num_outputs)):
            if tensor.name in missing:
                missing.discard(tensor.name)
                if not tensor.is_network_output:
                    network.mark_output(tensor)
    for name in sorted(missing):
        yield f"tensor {name!r} is not in the parsed network: folded, or inside a subgraph"


def _serialize(trt: Any, builder: Any, network: Any, options: BuildOptions) -> int | None:
    """Build; size of the engine in bytes, or None if the builder gave up (its log says why)."""
    config = builder.create_builder_config()
    if hasattr(trt, "ComputeCapability") and nvidia_driver.gpu() is None:  # only TensorRT-RTX has it
        config.num_compute_capabilities = 1
        layers = map(network.get_layer, range(network.num_layers))
        types = {dtype for layer in layers for _, dtype in _layer(layer).outputs}
        offered = [int(name[2:]) for name in dir(trt.ComputeCapability) if re.fullmatch(r"SM\d+", name)]
        capability = f"SM{portable_capability(types, options.gpus, offered)}"
        config.set_compute_capability(getattr(trt.ComputeCapability, capability), 0)
    if options.unfused and hasattr(network, "mark_unfused_tensors_as_debug_tensors"):  # from 10.12 on
        network.mark_unfused_tensors_as_debug_tensors()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # kernels name their nodes
    if not options.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    _add_profile(builder, network, config, options)
    cached = timing_cache(trt, config) if options.timing_cache else nullcontext()
    times_kernels = trt.__name__ == "tensorrt"  # on the GPU: no other work beside it
    with gpu_turn() if times_kernels else nullcontext(), cached:
        engine = builder.build_serialized_network(network, config)
    if engine is None:
        return None
    if options.engine is not None:
        options.engine.write_bytes(memoryview(engine))
    return int(engine.nbytes)


def portable_capability(types: Iterable[str], gpus: Iterable[str], offered: Iterable[int]) -> int:
    """The compute capability of a build without a GPU: the first that has the network's types.

    With target `gpus`, the newest of those `offered` that runs on all of them; a type that they lack fails.
    """
    needs = [TYPED[dtype] for dtype in types if dtype in TYPED]
    first, kernels = max((need for need, _ in needs), default=0), max((k for _, k in needs), default=PORTABLE)
    target = min((int(name.removeprefix("sm_")) for name in gpus), default=None)
    if target is None:
        return kernels
    fitting = max((number for number in offered if number <= target), default=PORTABLE)
    return max(fitting, kernels) if needs and target >= first else fitting


def _add_profile(builder: Any, network: Any, config: Any, options: BuildOptions) -> None:
    profile = builder.create_optimization_profile()
    needed = False
    for tensor in (network.get_input(i) for i in range(network.num_inputs)):
        if tensor.is_shape_tensor:
            span = options.shapes.get(tensor.name)
            if span is None or set(span) == {tuple(tensor.shape)}:  # no values of the user's
                span = _required(options.values, tensor.name, "is a shape or a trip count", "its value")
            profile.set_shape_input(tensor.name, *(list(values) for values in span))
            needed = True
        elif -1 in tuple(tensor.shape):
            span = _required(options.shapes, tensor.name, "has dynamic axes", "its shape")
            profile.set_shape(tensor.name, *(tuple(shape) for shape in span))
            needed = True
    if needed:
        config.add_optimization_profile(profile)


def _required(table: Mapping[str, Any], name: str, why: str, what: str) -> Any:
    if name not in table:
        hint = f"give sample data (`inputs`), or `input-shapes={name}:1x3x224x224`"
        raise EngineError(f"input {name!r} {why}, and nothing says {what}", where=name, hint=hint)
    return table[name]


LACKS_TYPE = "HW-specific datatypes"
"""Part of the builder's error for a GPU without kernels for a type."""

NORM_IN_FP16 = "layernorm nodes in FP16"
"""Part of the builder's warning about a decomposed norm whose squares may overflow."""

ROUTINE = (
    "Int64 binding",
    "will not be queryable",
    "after self-attention with FP16 Reduce or Pow",
    "encountered issues when converting weights between types",
)
"""Parts of warnings that a user can do nothing about, or that only repeat another one."""

PRECISION = (
    (
        r"overflow in FP16|Clipping to finite FP16 range",
        "a weight does not fit FP16 and was clipped: keep the node that reads it in FP32 (`keep-fp32`)",
    ),
    (
        r"less than smallest positive FP16|minimum subnormal",
        "weights are too small for FP16 and were rounded up or to 0: their products lose what they held",
    ),
    (r"[Ss]ubnormal FP16", "weights are subnormal in FP16 and keep only a few bits"),
    (r"out of range\. Clamping to", "an integer constant does not fit INT32 and was clamped"),
)
"""Patterns of warnings, as TensorRT's builder and its ONNX parser write them, and what each means. A line of
the log may hold several."""


def warnings_for_users(warnings: Iterable[str]) -> list[str]:
    """Warnings about precision, explained, then others, except routine ones and what `build_check` judges."""
    precision, others = [], []
    for warning in warnings:
        meanings = [meaning for pattern, meaning in PRECISION if re.search(pattern, warning)]
        if meanings:
            precision.append(f"precision: {'; '.join(meanings)} (TensorRT: {warning})")
        elif not any(part in warning for part in (*ROUTINE, NORM_IN_FP16)):
            others.append(f"warning: {warning}")
    return [*precision, *others]
