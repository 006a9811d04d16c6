"""The GPU of this machine, the installed libraries, and the best engine that runs here."""

from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import ClassVar

from rewriter.base import sandbox
from rewriter.base.errors import EngineError, NativeError, UsageError
from rewriter.runtime.engines import nvidia_driver
from rewriter.runtime.engines.nvidia_driver import Gpu
from rewriter.runtime.engines.onnxruntime_library import import_onnxruntime
from rewriter.runtime.engines.protocol import MeasureSettings, Program, Variant
from rewriter.target import Target, numbers, title

ASK_S = 60.0  # time limit for the driver; a GPU that wakes up needs a few seconds

REFUSES = (("tensorrt_rtx", (1, 7), (9, 0), "1.6.1"),)
"""Library, first release that does not load engines on a compute capability, and last release that does
(docs/engines.md#what-releases-do)."""

AUTO, EMULATION = "auto", "emulation"

INSTALL = {
    "tensorrt": "pip install tensorrt cuda-bindings, on a machine with a GPU",
    "tensorrt_rtx": "pip install tensorrt-rtx cuda-bindings",
    "cuda.bindings": "pip install cuda-bindings",
}


@dataclass(frozen=True)
class Choice:
    """The engine that runs here, None for emulation, and a sentence for each better one that does not."""

    engine: str | None
    reasons: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def gpu() -> Gpu | None:
    """The first GPU, or None; queried once, in a child process, which a machine without a driver spares."""
    if nvidia_driver.library() is not None:
        with suppress(NativeError):
            return sandbox.run(nvidia_driver.gpu, doing="NVIDIA's driver", limit_s=ASK_S)[0]
    return None


def choose(engine: str = AUTO) -> Choice:
    """The engine of this name, or for `auto` the best one that can run on this machine's GPU.

    Raises:
        UsageError: there is no engine of this name.
        EngineError: it cannot run here: no GPU, no library, or a release that does not run on this GPU.
    """
    if engine == EMULATION:
        return Choice(None, (f"`engine={EMULATION}`",))
    if engine in ENGINES:
        if problem := ENGINES[engine].obstacle():
            raise problem
        return Choice(engine)
    if engine != AUTO:
        names = ", ".join((AUTO, *ENGINES, EMULATION))
        raise UsageError(f"there is no engine {engine!r}", option="engine", hint=f"one of {names}")
    if gpu() is None:
        return Choice(None, ("there is no NVIDIA driver here, or it sees no GPU",))
    reasons: list[str] = []
    for candidate in filter(lambda engine: engine.builds, ENGINES.values()):
        if (problem := candidate.obstacle()) is None:
            return Choice(candidate.name, tuple(reasons))
        reasons.append(problem.what)
    return Choice(None, tuple(reasons))


@dataclass(frozen=True)
class Engine(ABC):
    """`builds` is False if it runs the ONNX file itself, `on_gpu` if it computes on the CPU."""

    name: str
    builds: ClassVar[bool] = True
    on_gpu: ClassVar[bool] = True

    def obstacle(self) -> EngineError | None:
        """The error for an engine that cannot run here; None if it can, judged without loading it."""
        if not self.on_gpu:
            return None
        device = gpu()
        no_gpu = nvidia_driver.no_gpu(f"{self.name} runs on a GPU")
        return no_gpu if device is None else self.obstacle_on(device)

    def obstacle_on(self, device: Gpu) -> EngineError | None:
        return None

    @abstractmethod
    def load(self, variant: Variant, settings: MeasureSettings) -> Program:
        """Loads what was built, in the process that runs it."""


class TensorRT(Engine):
    def obstacle_on(self, device: Gpu) -> EngineError | None:
        module = self.name.replace("-", "_")
        lacking = next((name for name in (module, "cuda.bindings") if not _installed(name)), None)
        if lacking is not None:
            return EngineError(f"{lacking} is not installed", hint=INSTALL[lacking])
        return refusal(module, _version(module), device)

    def load(self, variant: Variant, settings: MeasureSettings) -> Program:
        from rewriter.runtime.engines.tensorrt_program import TensorRTProgram

        return TensorRTProgram(self.name.replace("-", "_"), variant, settings.plugins, settings.kernels)


class OnnxRuntime(Engine):
    builds = on_gpu = False

    def load(self, variant: Variant, settings: MeasureSettings) -> Program:
        from rewriter.runtime.engines.local_session import OnnxRuntimeProgram

        return OnnxRuntimeProgram(variant, gpu=self.on_gpu)


class OnnxRuntimeCuda(OnnxRuntime):
    on_gpu = True

    def obstacle_on(self, device: Gpu) -> EngineError | None:
        ort = import_onnxruntime()
        if "CUDAExecutionProvider" in ort.get_available_providers():
            return None
        what = f"this ONNX Runtime ({ort.__version__}) is built without CUDA"
        return EngineError(what, hint="pip install onnxruntime-gpu")


ENGINES: dict[str, Engine] = {
    "tensorrt": TensorRT("tensorrt"),
    "tensorrt-rtx": TensorRT("tensorrt-rtx"),
    "onnxruntime": OnnxRuntime("onnxruntime"),
    "onnxruntime-cuda": OnnxRuntimeCuda("onnxruntime-cuda"),
}
"""The engines by their names; on a GPU, `auto` tries those that build, in this order."""


def refusal(module: str, release: str, device: Gpu) -> EngineError | None:
    """The error for a release that is known not to load engines on a GPU; avoids a build of minutes."""
    installed = numbers(release)[:2]
    for name, since, capability, last in REFUSES:
        if module == name and installed >= since and device.capability == capability:
            major, minor = capability
            return EngineError(
                f"{title(module)} {release} does not load engines on compute capability {major}.{minor} "
                f"({device.name}); {last} does",
                hint=f'pip install "{module.replace("_", "-")}<{since[0]}.{since[1]}"',
            )
    return None


def at_hand(target: Target) -> Target:
    """The target with this machine's release and GPU, unless it names others, and so another machine."""
    release = numbers(_version(target.library.replace("-", "_")))[:3]
    other = target.gpus or not release or release[: len(target.version)] != target.version
    device = None if other else gpu()
    return replace(target, version=target.version or release, gpus=(device.sm,)) if device else target


def parser_here(target: Target) -> Target:
    """The target, or the library whose parser stands in for it on this machine if it names no release."""
    for library in () if target.version else dict.fromkeys((target.library, "tensorrt-rtx")):
        release = numbers(_version(library.replace("-", "_")))[:3]
        if release and (library == "tensorrt-rtx" or gpu()):
            return replace(target, library=library, version=release)
    return target


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def _version(module: str) -> str:
    """The installed release; empty if no wheel has metadata."""
    plain = module.replace("_", "-")
    for name in (plain, f"{plain}-cu13", f"{plain}-cu12"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""
