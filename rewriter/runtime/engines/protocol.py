"""The protocol of the engines: their input, their results, and what an engine must implement.

    samples = write_samples(folder / "samples", feeds)
    outcomes = measure([Variant("fixed", path, samples)], MeasureSettings("tensorrt-rtx"), folder)
    outcomes[0].values(0)["logits"], outcomes[0].latency.median_us

Every build runs in a child process of its own; then one child loads all engines, runs every sample, and times
them interleaved. Arrays stay in files, which are memory-mapped for reading.

A `Program` lives only in the child: it may import what it likes, crash, hang, or raise `EngineError`; all of
that becomes an `EngineOutcome`. Its obligations:

- `run` returns every output of the ONNX model under its ONNX name, in its ONNX type. It gives `keep` the
  `unfused` tensors as they come, so that memory holds one of them.
- `prepare` puts one sample where the device reads it. `time_us` runs on it, copies nothing, and returns the
  device's own time of the run.
- FP32 stays FP32 if `Variant.tf32` is False; an engine that cannot guarantee that raises `EngineError`.
- A failure after which the process cannot be trusted (a CUDA error) is a `CudaFault`: the parent then runs
  every variant in a process of its own, so that one does not spoil the others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from rewriter.ir.model import Array
from rewriter.runtime.engines.build import BuildReport
from rewriter.runtime.engines.tensor_files import Span, StoredTensors, read_tensors

INNER = "inner"
"""The folder of tensors between kernels, in the one of a sample's outputs."""

Status = Literal["ok", "refused", "error", "crashed", "timeout"]
"""`refused`: by parser or builder; `error`: built, but does not load or run; `crashed` and `timeout`: the
end of the child process that built or ran it."""


@dataclass(frozen=True)
class Variant:
    """One file to build and run."""

    name: str  # by which its outcomes are found
    path: Path  # the ONNX file, its external data next to it
    # folders from `write_samples` with its inputs; variants may share them or have their own
    samples: tuple[Path, ...]
    # whether FP32 MatMul and Conv may round their inputs to TF32, as TensorRT does by default; the reference
    # must not. It is a setting of the process: variants that differ in it run in two
    tf32: bool = True
    # profile of inputs with dynamic axes; the others' come from the samples
    shapes: Mapping[str, Span] = field(default_factory=dict)
    # tensors of the main graph that become outputs, too. TensorRT cannot fuse across them: mark few, and
    # compare the model's own outputs with a build that marks none
    outputs: tuple[str, ...] = ()
    # tensors between TensorRT's kernels, under its own names (`Kernel`): `built` so that a later run can give
    # them, or given by this `run`
    unfused: Literal["", "built", "run"] = ""
    engine: Path | None = None  # an existing engine file, which makes a build unnecessary


@dataclass(frozen=True)
class Timing:
    """How to time: on the first sample, all variants in turn (docs/engines.md#how-it-is-measured)."""

    warm_up: int = 20
    repeats: int = 100


@dataclass(frozen=True)
class MeasureSettings:
    """How to build and run all variants of one measurement."""

    engine: str
    # builders choose kernels by timing them, so two builds differ; several leave the timing cache out
    builds: int = 1
    timing: Timing | None = field(default_factory=Timing)  # None measures no latency
    plugins: tuple[Path, ...] = ()
    # a file for kernels that TensorRT-RTX compiles as it loads engines; None: each compiles its own
    kernels: Path | None = None
    timeout_s: float = 600.0  # for each build, and for the child that runs all of them


@dataclass(frozen=True)
class Latency:
    """Microseconds of runs, by the device's clock (CUDA events; on a CPU the wall clock).

    Without `cuda_graph`, they include the launch of each kernel.
    """

    median_us: float
    iqr_us: float
    repeats: int
    cuda_graph: bool


@dataclass(frozen=True)
class Kernel:
    """A kernel of an engine: the ONNX nodes that it computes, or parts of them, and the tensors it writes."""

    nodes: tuple[str, ...]
    outputs: tuple[str, ...]  # in the engine's names


@dataclass(frozen=True)
class EngineOutcome:
    """The result of one build of one variant."""

    variant: str
    build: int
    status: Status
    # problem, hint, log: if the status is not `ok`: reason, advice, end of the child's output
    problem: str = ""
    hint: str = ""
    log: str = ""
    device: str = ""  # the GPU and its driver, or the CPU, e.g. `NVIDIA H200, driver CUDA 13.0` or `CPU`
    library: str = ""
    report: BuildReport | None = None  # of TensorRT's parser and builder, if it got that far
    outputs: tuple[Path, ...] = ()  # folder of each sample's outputs
    kernels: tuple[Kernel, ...] = ()  # in the order of a run, from TensorRT 10.12 on, if `unfused` is `run`
    latency: Latency | None = None  # None if it did not run, or nothing was to be timed
    notes: tuple[str, ...] = ()  # remarks for the user: no CUDA graph, a tensor that is not in the network

    @property
    def ran(self) -> bool:
        return self.status == "ok"

    def values(self, sample: int) -> dict[str, Array]:
        """Outputs of one sample by ONNX name, memory-mapped: they live as long as the folder."""
        return read_tensors(self.outputs[sample])

    def inner(self, sample: int) -> Mapping[str, Array]:
        """The tensors between kernels of one sample, by their names in `kernels`."""
        return StoredTensors(self.outputs[sample] / INNER)


Keep = Callable[[str, Array], object]
"""Takes a tensor by its name."""


class Program(Protocol):
    """A built model in the child, loaded on its device; its buffers are its own.

    Its constructor raises `EngineError` if the device is missing, or the library does not load the engine.
    """

    device: str
    library: str
    kernels: tuple[Kernel, ...]
    notes: list[str]
    """Filled while it works; see `EngineOutcome.notes`."""

    cuda_graph: bool
    """True if `time_us` replays a CUDA graph; known after `prepare`."""

    def run(self, feeds: Mapping[str, Array], keep: Keep | None = None) -> dict[str, Array]: ...

    def prepare(self, feeds: Mapping[str, Array]) -> None: ...

    def time_us(self) -> float: ...

    def close(self) -> None: ...
