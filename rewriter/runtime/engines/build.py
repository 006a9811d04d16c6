"""TensorRT's parser and builder: options, the child process that runs them, and their report.

`tensorrt` (10, 11) and `tensorrt_rtx` (1.4 on) are one code path; the module's name is the only
difference that callers see. Networks are always strongly typed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rewriter.ir import children

if TYPE_CHECKING:
    from rewriter.runtime.engines.tensor_files import Span


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build.

    Attributes:
        shapes: Smallest, usual and largest shape of each input with dynamic axes.
        values: Values of the inputs that are shapes or trip counts themselves.
        parse_only: Read the network, build nothing.
        library: `tensorrt` or `tensorrt_rtx`; None: `tensorrt` if a GPU is there, else `tensorrt_rtx`.
        compute_capability: Name in `ComputeCapability`, for TensorRT-RTX only; None: its default where there
            is a GPU, which runs on that one, else `build_in_child.PORTABLE_CAPABILITY`.
        optimization_level: 0 (quick) to 5; None: the library's default. Without a GPU it changes
            neither the time nor the engine of TensorRT-RTX 1.6.
        engine: Where to write the engine; None: nowhere.
        outputs: Further tensors to mark as outputs of the network.
        debug: Mark the unfused tensors as debug tensors, where the library can.
        tf32: Whether FP32 may be computed in TF32. False needs `NO_TF32` in the child's environment,
            too: `build` sees to it.
        details: Keep the details of layers for the engine inspector.
        plugins: Shared libraries with plugins.
        timing_cache: Use the cache of kernel timings in the user's cache folder; `tensorrt` on a GPU only.
    """

    shapes: Mapping[str, Span] = field(default_factory=dict)
    values: Mapping[str, Sequence[int]] = field(default_factory=dict)
    parse_only: bool = False
    library: str | None = None
    compute_capability: str | None = None
    optimization_level: int | None = None
    engine: str | None = None
    outputs: Sequence[str] = ()
    debug: bool = False
    tf32: bool = True
    details: bool = False
    plugins: Sequence[str] = ()
    timing_cache: bool = False


@dataclass(frozen=True)
class NetworkLayer:
    """A layer of the parsed network.

    Attributes:
        type: Name in `LayerType`, e.g. `NORMALIZATION`.
        node: ONNX node that it was made from; "" if unknown.
        outputs: Name and type (in `DataType`, e.g. `HALF`) of each output. A tensor has its ONNX
            name if it is one of the ONNX graph's.
    """

    name: str
    type: str
    node: str
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
    """The parsed network, and the result of its build.

    Attributes:
        layers: The parsed network; empty if the parser refused the model.
        inputs: Name and type of each network input.
        warnings, errors: Distinct messages of parser and builder, in order.
        obstacle, hint: Reason and advice if the model was parsed but not built because something is missing,
            such as the shape of an input; else "".
        engine_bytes: Size of the engine; None if none was built.
        notes: Requests that could not be met, such as an output that is not in the network.
        log: End of what the child printed.
        parse_s, build_s: Wall time.
    """

    library: str
    version: str
    parsed: bool
    layers: tuple[NetworkLayer, ...] = ()
    inputs: tuple[tuple[str, str], ...] = ()
    parser_errors: tuple[ParserError, ...] = ()
    warnings: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    obstacle: str = ""
    hint: str = ""
    engine_bytes: int | None = None
    notes: tuple[str, ...] = ()
    parse_s: float = 0.0
    build_s: float = 0.0
    log: str = ""

    def count(self, layer_type: str) -> int:
        """Number of layers of a type in the parsed network."""
        return sum(layer.type == layer_type for layer in self.layers)

    def types(self) -> Iterator[tuple[str, str, str]]:
        """Tensor name, type in `DataType`, and ONNX node (or layer) of all inputs and layer outputs."""
        yield from ((name, dtype, "an input") for name, dtype in self.inputs)
        for layer in self.layers:
            yield from ((name, dtype, layer.node or layer.name) for name, dtype in layer.outputs)


NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Environment in which NVIDIA's libraries compute FP32 in FP32; the builder's flag alone is not enough
(docs/engines.md#what-releases-do)."""


def build(
    path: Path,
    options: BuildOptions | None = None,
    *,
    timeout_s: float,
    memory_bytes: int | None = None,
) -> BuildReport:
    """Parse and build an ONNX file in a child process with these limits (see `children.run`).

    Raises:
        EngineError: no library is installed, or it lacks what the options ask for.
        NativeError: the child crashed, ran out of time, or raised another exception.
    """
    from rewriter.runtime.engines.build_in_child import build_here  # which reads this module

    chosen = options or BuildOptions()
    report, log = children.run(
        build_here,
        path,
        chosen,
        doing="the TensorRT build",
        limit_s=timeout_s,
        env=None if chosen.tf32 else NO_TF32,
        memory_bytes=memory_bytes,
    )
    return replace(report, log=log)


TIMES_KERNELS = frozenset({"tensorrt"})
"""Engines whose builder times kernels on the GPU: no other work beside it."""

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


def precision_warnings(warnings: Iterable[str]) -> Iterator[str]:
    """Explanations of the warnings about precision, each with TensorRT's text."""
    for warning in warnings:
        meanings = [meaning for pattern, meaning in PRECISION if re.search(pattern, warning)]
        if meanings:
            yield f"precision: {'; '.join(meanings)} (TensorRT: {warning})"


def other_warnings(warnings: Iterable[str]) -> Iterator[str]:
    """Warnings that are neither routine nor about precision, nor judged in `build_check`."""
    known = "|".join(pattern for pattern, _ in PRECISION)
    for warning in warnings:
        if not any(part in warning for part in (*ROUTINE, NORM_IN_FP16)) and not re.search(known, warning):
            yield f"warning: {warning}"
