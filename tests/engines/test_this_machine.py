"""Which engine runs on a machine, by its driver and the installed libraries, and why others do not."""

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from graphs import graph
from needs import needs_rtx, without_gpu
from tables import values

from rewriter.base.errors import EngineError
from rewriter.ir.model import save
from rewriter.pipeline.options import Runner
from rewriter.runtime.engines import nvidia_driver, this_machine
from rewriter.runtime.engines.caches import VARIABLE, gpu_turn, timing_cache, user_cache
from rewriter.runtime.engines.local_session import OnnxRuntimeProgram
from rewriter.runtime.engines.measure import Run, build_variant, run_here
from rewriter.runtime.engines.nvidia_driver import Gpu
from rewriter.runtime.engines.onnxruntime_library import import_onnxruntime
from rewriter.runtime.engines.protocol import MeasureSettings, Program, Variant
from rewriter.runtime.engines.tensor_files import write_samples
from rewriter.runtime.engines.this_machine import AUTO, EMULATION, ENGINES, Choice, OnnxRuntime
from rewriter.target import Target

H200 = Gpu("NVIDIA H200", (9, 0), (13, 0))
ADA = Gpu("NVIDIA L4", (8, 9), (13, 0))

NO_TRT, NO_RTX, NO_CUDA = (
    f"{name} is not installed" for name in ("tensorrt", "tensorrt_rtx", "cuda.bindings")
)
NO_GPU = "there is no NVIDIA driver here, or it sees no GPU"
REFUSED = "TensorRT-RTX 1.7 does not load engines on compute capability 9.0 (NVIDIA H200); 1.6.1 does"
TRT, RTX_6, RTX_7, CUDA = (
    {"tensorrt": "10.15"},
    {"tensorrt_rtx": "1.6"},
    {"tensorrt_rtx": "1.7"},
    {"cuda.bindings": "13"},
)

Machine = Callable[[Gpu | None, dict[str, str]], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Sets the GPU, and the releases of the modules that are installed."""

    def with_libraries(gpu: Gpu | None, releases: dict[str, str]) -> None:
        monkeypatch.setattr(this_machine, "gpu", lambda: gpu)
        monkeypatch.setattr(this_machine, "_installed", lambda module: module in releases)
        monkeypatch.setattr(this_machine, "_version", lambda module: releases[module])

    return with_libraries


CHOICES: dict[str, tuple[Gpu | None, dict[str, str], Choice]] = {
    "TensorRT": (H200, TRT | CUDA, Choice("tensorrt")),
    "both: TensorRT is better": (H200, TRT | RTX_6 | CUDA, Choice("tensorrt")),
    "RTX alone": (ADA, RTX_7 | CUDA, Choice("tensorrt-rtx", (NO_TRT,))),
    "without CUDA's bindings": (ADA, RTX_7, Choice(None, (NO_TRT, NO_CUDA))),
    "no library": (ADA, {}, Choice(None, (NO_TRT, NO_RTX))),
    "a release that does not load engines there": (H200, RTX_7 | CUDA, Choice(None, (NO_TRT, REFUSED))),
    "no GPU": (None, TRT | CUDA, Choice(None, (NO_GPU,))),
}


@pytest.mark.parametrize(("gpu", "releases", "expected"), CHOICES.values(), ids=CHOICES.keys())
def test_the_best_engine_is_chosen(
    gpu: Gpu | None, releases: dict[str, str], expected: Choice, machine: Machine
) -> None:
    machine(gpu, releases)
    assert this_machine.choose() == expected


def test_an_engine_that_was_named_is_taken_or_refused_with_advice(machine: Machine) -> None:
    machine(ADA, RTX_7 | CUDA)
    assert this_machine.choose("tensorrt-rtx") == Choice("tensorrt-rtx")
    with pytest.raises(EngineError, match=NO_TRT) as caught:
        this_machine.choose("tensorrt")
    assert caught.value.hint == "pip install tensorrt cuda-bindings, on a machine with a GPU"


class Mine(OnnxRuntime):
    def load(self, variant: Variant, settings: MeasureSettings) -> Program:
        program = OnnxRuntimeProgram(variant, gpu=False)
        program.library = "mine 1.0"
        return program


def test_a_new_engine_is_one_class_and_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(ENGINES, "mine", Mine("mine"))
    assert this_machine.choose("mine") == Choice("mine")
    model = graph("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    samples = write_samples(tmp_path / "samples", [{"x": np.array([-1, 2], np.float32)}])
    variant = Variant("small", save(model, tmp_path / "model.onnx"), samples)
    built, outcome = build_variant(variant, MeasureSettings("mine"), tmp_path / "engine")
    (outcome,) = run_here([Run(built, tmp_path / "outputs", outcome)], MeasureSettings("mine", timing=None))
    assert (outcome.library, outcome.values(0)["y"].tolist()) == ("mine 1.0", [0.0, 2.0])


def test_the_option_offers_every_engine() -> None:
    assert get_args(Runner) == (AUTO, *ENGINES, EMULATION)


@values
def test_onnx_runtime_on_a_gpu_needs_its_cuda_build(
    providers: list[str], refused: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(ADA, {})
    runtime = import_onnxruntime()
    monkeypatch.setattr(runtime, "get_available_providers", lambda: providers)
    problem = ENGINES["onnxruntime-cuda"].obstacle()
    assert (problem is not None) is refused
    assert problem is None or "is built without CUDA" in str(problem)


@pytest.mark.parametrize(
    ("module", "release", "gpu", "refused"),
    [
        ("tensorrt_rtx", "1.7.1.116", H200, True),
        ("tensorrt_rtx", "1.8.0", H200, True),
        ("tensorrt_rtx", "1.6.1.120", H200, False),
        ("tensorrt_rtx", "1.7.1.116", ADA, False),
        ("tensorrt", "11.0.0", H200, False),
        ("tensorrt_rtx", "", H200, False),
    ],
    ids=["1.7 on Hopper", "1.8 on Hopper", "1.6 on Hopper", "1.7 on Ada", "tensorrt", "unknown release"],
)
def test_releases_that_do_not_load_are_refused(module: str, release: str, gpu: Gpu, refused: bool) -> None:
    problem = this_machine.refusal(module, release, gpu)
    assert (problem is not None) == refused


def test_the_refusal_says_what_to_do() -> None:
    problem = this_machine.refusal("tensorrt_rtx", "1.7.1.116", H200)
    assert str(problem) == (
        "TensorRT-RTX 1.7.1.116 does not load engines on compute capability 9.0 (NVIDIA H200); 1.6.1 does\n"
        '  what to do: pip install "tensorrt-rtx<1.7"'
    )


@without_gpu
def test_without_a_gpu_only_onnx_runtime_is_available() -> None:
    assert nvidia_driver.gpu() is None
    choice = this_machine.choose()
    assert choice.engine is None
    assert choice.reasons == ("there is no NVIDIA driver here, or it sees no GPU",)
    for engine in ("tensorrt", "tensorrt-rtx", "onnxruntime-cuda"):
        with pytest.raises(EngineError, match=f"{engine} runs on a GPU"):
            this_machine.choose(engine)


@needs_rtx
def test_a_target_gets_the_release_and_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "gpu", lambda: Gpu("Some GPU", (9, 0), (13, 0)))
    found = this_machine.at_hand(Target("tensorrt-rtx"))
    assert (found.version[:1], found.gpus) == ((1,), ("sm_90",))
    for other in ("tensorrt-rtx 1.0", "tensorrt-rtx sm_89", "jetpack-6.2"):
        assert this_machine.at_hand(Target.parse(other)) == Target.parse(other)
    monkeypatch.setattr(this_machine, "gpu", lambda: None)
    assert this_machine.at_hand(Target("tensorrt-rtx")) == Target("tensorrt-rtx")


def test_modules_and_their_releases_are_found_without_loading_them() -> None:
    installed = map(this_machine._installed, ["numpy", "no_such_module", "no_such_package.inside"])
    assert [*installed] == [True, False, False]
    assert [*map(this_machine._version, ["numpy", "no_such_module"])] == [np.__version__, ""]


class Driver:
    """libcuda with two devices; functions that are named in `failing` return an error."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 999 if name in self.failing else self._done(name, *arguments)

    @staticmethod
    def _done(name: str, *given: Any) -> int:
        arguments = list(given)
        capability = {75: 9, 76: 0}
        if name == "cuDeviceGetName":
            arguments[0].value = f"GPU {arguments[2]}".encode()
        elif name != "cuInit":
            numbers = {
                "cuDriverGetVersion": 12080,
                "cuDeviceGetCount": 2,
                "cuDeviceGet": arguments[-1],
                "cuDeviceGetAttribute": capability.get(arguments[1]) if len(arguments) > 1 else None,
            }
            arguments[0]._obj.value = numbers[name]
        return 0


def seen(monkeypatch: pytest.MonkeyPatch, *failing: str) -> Gpu | None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Driver(*failing))
    return nvidia_driver.gpu()


def test_the_first_gpu_is_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(monkeypatch) == Gpu("GPU 0", (9, 0), (12, 8))


def test_a_gpu_describes_itself() -> None:
    assert str(H200) == "NVIDIA H200 (compute capability 9.0, driver for CUDA 13.0)"


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGetCount"])
def test_a_driver_that_does_not_start_has_no_gpu(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(monkeypatch, failing) is None
    with pytest.raises(EngineError, match="no GPU: there is no NVIDIA driver here"):
        nvidia_driver.runtime()


def test_what_the_driver_does_not_answer_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    found = seen(monkeypatch, "cuDriverGetVersion", "cuDeviceGetAttribute")
    assert found == Gpu("GPU 0", (0, 0), (0, 0))


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_name: str) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert nvidia_driver.gpu() is None


class Timings:
    """The three calls of TensorRT's builder config for its cache, which is bytes here."""

    cache = b""

    def create_timing_cache(self, stored: bytes) -> bytes:
        return stored

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        self.cache = cache
        return not ignore_mismatch

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: self.cache + b" and more")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(nvidia_driver, "gpu", lambda: Gpu("NVIDIA L4", (8, 9), (13, 0)))
    return tmp_path / "cache"


def found_by_a_build(name: str = "tensorrt", version: str = "10.13.3") -> bytes:
    config = Timings()
    with timing_cache(SimpleNamespace(__name__=name, __version__=version), config):
        return config.cache


def test_the_next_build_uses_the_timings_of_the_last(folder: Path) -> None:
    assert [found_by_a_build(), found_by_a_build(), found_by_a_build(version="11.0.0")] == [
        b"",
        b" and more",
        b"",
    ]
    names = sorted(file.name for file in (folder / "timing").iterdir())
    assert names == ["tensorrt_10.13.3_NVIDIA_L4.cache", "tensorrt_11.0.0_NVIDIA_L4.cache"]


def test_rtx_and_a_machine_without_a_gpu_have_no_timings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_by_a_build("tensorrt_rtx")
    monkeypatch.setattr(nvidia_driver, "gpu", lambda: None)
    found_by_a_build()
    assert not folder.exists()


def test_a_file_that_cannot_be_used_is_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert found_by_a_build() == b""
    assert list((folder / "timing").iterdir()) == []
    monkeypatch.setenv(VARIABLE, __file__)
    assert found_by_a_build() == b""


def test_the_cache_folder_can_be_chosen(folder: Path) -> None:
    path = user_cache("timing", "tensorrt 10.3 NVIDIA H200/0.cache")
    assert path == folder / "timing" / "tensorrt_10.3_NVIDIA_H200_0.cache"
    assert path.parent.is_dir()


HOLDER = """
import sys
from rewriter.runtime.engines.caches import gpu_turn
with gpu_turn():
    print("mine", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder() -> Iterator[Any]:
    """A process that asks for the turn, and keeps it until its input ends or it is killed."""
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.usefixtures("folder")
def test_a_second_process_waits_for_the_first() -> None:
    with holder() as second:
        with gpu_turn():
            second.stdin.close()
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(2.0)
        assert second.stdout.read() == "mine\n"


@pytest.mark.usefixtures("folder")
def test_a_turn_is_waited_for_a_while_and_a_killed_process_gives_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with holder() as first:
        assert first.stdout.readline() == "mine\n"
        with monkeypatch.context() as patch:
            patch.setattr("rewriter.runtime.engines.caches.MOST_S", 0.2)
            with gpu_turn():
                assert first.poll() is None
        first.kill()
        with gpu_turn():
            pass


def test_nothing_waits_where_no_lock_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, __file__)
    with gpu_turn():
        pass
