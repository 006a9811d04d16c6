"""Checks that TensorRT builds a file, and compares the parsed network with the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from onnx import TensorProto

from rewriter.base.errors import EngineError, NativeError
from rewriter.ir.graph import is_op
from rewriter.ir.graph.ops import NORMS
from rewriter.ir.model import Array, Model, walk_graphs
from rewriter.ir.model.schemas import logical_name
from rewriter.runtime.engines.build import NORM_IN_FP16, BuildOptions, BuildReport, build, warnings_for_users
from rewriter.runtime.engines.measure import shape_values
from rewriter.runtime.engines.tensor_files import Shape, Span
from rewriter.verification.verdict import ORIGINAL, Check, log_lines

NORMALIZATIONS = NORMS - {"RMSNormalization", "SimplifiedLayerNormalization"}
"""Operators that become one NORMALIZATION layer each (docs/engines.md#what-releases-do)."""

NETWORK_TYPES = {
    int(TensorProto.FLOAT): "FLOAT",
    int(TensorProto.FLOAT16): "HALF",
    int(TensorProto.BFLOAT16): "BF16",
}
"""TensorRT's `DataType` for each float type that a plan gives."""

LACKING = (
    "dtype == myelinTypeBF16 || dtype == myelinTypeFP8E4M3) failed",  # of a Conv in INT8: 1.6.1
    "plugin was not found",
    "Plugin not found",
    "plugin creator version",
    "has no runners",
    "No importer registered",
    "is not supported in TensorRT",
    "Error Code 1: Cuda Runtime",
)
"""Parts of the messages of TensorRT-RTX 1.4 to 1.7 for an operator that another TensorRT may support
(NonMaxSuppression, RoiAlign, NonZero, a plugin), or for a network that it cannot build without a GPU (1.4,
quantised networks)."""

LISTED = 10
"""Most findings of one kind that are listed."""


@dataclass(frozen=True)
class BuildExpectation:
    """Requirements on the parsed network.

    Attributes:
        layer_normalizations: Smallest number of NORMALIZATION layers.
        tensor_types: TensorProto.DataType of float tensors by ONNX name, without names that have different
            types in different graphs.
        norms_in_range: As in the plan: a warning about these reductions is no finding.
    """

    layer_normalizations: int = 0
    tensor_types: Mapping[str, int] = field(default_factory=dict)
    norms_in_range: frozenset[str] = frozenset()


def expectation(model: Model, norms_in_range: frozenset[str] = frozenset()) -> BuildExpectation:
    """Returns the norms and tensor types that the network of a model must have."""
    nodes = [node for graph in walk_graphs(model.proto.graph) for node in graph.node]
    norms = sum(is_op(n, *NORMALIZATIONS) for n in nodes)
    types: dict[str, set[int]] = {}
    for scope in model.facts().scopes:
        for name, facts in scope.items():
            types.setdefault(name, set()).add(facts.dtype)
    in_functions = {name for f in model.proto.functions for node in f.node for name in node.output}
    return BuildExpectation(
        norms,
        {
            name: dtype
            for name, (dtype, *others) in types.items()
            if not others and dtype in NETWORK_TYPES and name not in in_functions
        },
        norms_in_range,
    )


def check_build(path: Path, expected: BuildExpectation, options: BuildOptions, timeout_s: float) -> Check:
    """Builds the file at `path` and compares the parsed network with `expected`.

    Args:
        timeout_s: Limit after which the builder is killed and the check fails.

    Returns:
        A check whose `passed` is None if no library is installed, it lacks an operator, or the shape of an
        input is not known. A plugin that does not load is a failure.
    """
    return _built(path, options, timeout_s, lambda report: judged_report(report, expected))


def check_original_build(path: Path, options: BuildOptions, timeout_s: float) -> Check:
    """Checks that the user's own file gives an engine.

    Returns:
        A check `ORIGINAL`, whose details are the library's reasons; `passed` is None if no library is there.
    """

    def judged(report: BuildReport) -> Check:
        built = report.engine_bytes is not None
        words = f"{report.library} {report.version} {'builds' if built else 'does not build'}"
        details, refused = tuple(_refusals(report)), () if built else _refused(report)
        summary = f"{words} the model as it came"
        return Check(ORIGINAL, built, summary, details=details, built=built, refused=refused)

    return replace(_built(path, options, timeout_s, judged), name=ORIGINAL)


def _built(
    path: Path, options: BuildOptions, timeout_s: float, judge: Callable[[BuildReport], Check]
) -> Check:
    """Builds a file and judges the report, or what came instead of one."""
    start = time.perf_counter()
    try:
        check = judge(build(path, options, timeout_s=timeout_s))
    except NativeError as error:  # a crash or a hang; an exception in the child's Python is no failure
        summary = error.what if error.cause else f"not built: {error.what}"
        built = False if error.cause else None
        check = Check("build", built, summary, details=log_lines(error.log), built=built)
    except EngineError as error:
        named = error.where in [str(plugin) for plugin in options.plugins]  # a plugin that was to be used
        summary = f"not built: {error.what}" + (f" ({error.where})" if error.where else "")
        details, advice = _advice(error.hint), error.hint or ""
        check = Check("build", False if named else None, summary, details=details, advice=advice)
    return replace(check, seconds=time.perf_counter() - start)


def build_options(
    sample: Mapping[str, Array],
    spans: Mapping[str, Span],
    *,
    plugins: Sequence[Path] = (),
    engine: Path | None = None,
    library: str | None = None,
) -> BuildOptions:
    """Returns the options of a build for one sample's shapes, and its values of inputs that are shapes.

    Args:
        spans: Smallest, usual and largest shape of inputs, known from several samples.
        plugins: Shared libraries with plugins.
        engine: File for the engine; None: it is not kept.
        library: As in `BuildOptions`.
    """
    shapes = {name: (array.shape,) * 3 for name, array in sample.items()} | dict(spans)
    return BuildOptions(
        shapes={name: tuple(map(_plain, span)) for name, span in shapes.items()},  # type: ignore[misc]
        values={name: _plain(value) for name, value in shape_values(sample).items()},
        plugins=plugins,
        engine=engine,
        library=library,
        timing_cache=True,
    )


def _plain(shape: Iterable[int]) -> Shape:
    return tuple(int(axis) for axis in shape)  # NumPy's integers become Python's


def _advice(hint: str | None) -> tuple[str, ...]:
    return (f"what to do: {hint}",) if hint else ()


def judged_report(report: BuildReport, expected: BuildExpectation) -> Check:
    """Judges a finished build by its report."""
    faults = [*_refusals(report), *_network_faults(report, expected)]
    details = (*faults, *_advice(report.hint), *warnings_for_users(report.warnings)[:LISTED])
    passed = None if not faults and report.obstacle else not faults
    if _is_lacking(report):
        passed, details = None, (*details, "another TensorRT, or this one on a GPU, may build it")
    built = report.engine_bytes is not None
    summary, refused = _summary(report, len(faults), passed), _refused(report)
    return Check("build", passed, summary, details=details, built=built, refused=refused, advice=report.hint)


def _refused(report: BuildReport) -> tuple[tuple[str, str], ...]:
    return tuple((error.node, error.op) for error in report.parser_errors if error.op)


def _summary(report: BuildReport, faults: int, passed: bool | None) -> str:
    library = f"{report.library} {report.version}"
    count = f"{faults} finding{'s' * (faults > 1)}"
    if report.engine_bytes is None and passed is None:
        return f"not built: {report.obstacle or f'{library} lacks what this model needs'}"
    if not report.parsed:
        return f"{library} refuses the model"
    if report.engine_bytes is None:
        return f"{library} did not build the model: {count}"
    norms = report.count("NORMALIZATION")
    what = f"{len(report.layers)} layers" + (f", {norms} of them NORMALIZATION" if norms else "")
    engine = f"{library} built {what}, {report.engine_bytes / 2**20:.2g} MiB, in {report.build_s:.1f} s"
    return f"{engine}; {count}" if faults else f"{engine}; types as planned"


def _refusals(report: BuildReport) -> Iterator[str]:
    """Yields the reasons of the parser or the builder for building no engine."""
    yield from map(str, report.parser_errors)
    if report.parsed and report.engine_bytes is None and not report.obstacle:
        yield from report.errors[-LISTED:] or ["no engine, and no error message"]


def _is_lacking(report: BuildReport) -> bool:
    """True if the only fault is that this library lacks operators."""
    messages = [e.message for e in report.parser_errors]
    if report.parsed and report.engine_bytes is None:
        messages = list(report.errors)
    return bool(messages) and all(any(part in message for part in LACKING) for message in messages)


def _network_faults(report: BuildReport, expected: BuildExpectation) -> Iterator[str]:
    """Yields the differences between the parsed network and the model."""
    if not report.parsed:
        return
    norms, wanted = report.count("NORMALIZATION"), expected.layer_normalizations
    if norms < wanted:
        yield f"the model has {wanted} normalisation operators, the network {norms} NORMALIZATION layers"
    mismatches = [
        f"tensor {name} of {node} is {dtype}, planned {planned}"
        for name, dtype, node in report.types()
        if (planned := NETWORK_TYPES.get(expected.tensor_types.get(name, 0))) not in (None, dtype)
    ]
    yield from mismatches[:LISTED]
    if len(mismatches) > LISTED:
        yield f"and {len(mismatches) - LISTED} more tensors of another type than planned"
    halves = [  # the warning names no nodes
        layer.node or layer.name
        for layer in report.layers
        if layer.type == "REDUCE"
        and any(d == "HALF" and logical_name(t) not in expected.norms_in_range for t, d in layer.outputs)
    ]
    warned = any(NORM_IN_FP16 in warning for warning in report.warnings)
    if warned and (halves or not expected.norms_in_range):
        listed = ", ".join(halves[:LISTED]) or "none"
        yield (
            "TensorRT warns of a decomposed norm in FP16, whose squares may overflow; "
            f"reductions in FP16: {listed}"
        )
