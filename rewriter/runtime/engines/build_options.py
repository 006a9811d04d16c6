"""The options of a TensorRT build."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rewriter.runtime.engines.protocol import Span


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
