"""The engines' code runs on the interface of every release, as far as it goes without the library."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_tensorrt import HALVES, Fake
from trt_surface import releases

from rewriter.runtime.engines import nvidia_driver, tensorrt_program
from rewriter.runtime.engines.build import NO_TF32, BuildOptions, build_here
from rewriter.runtime.engines.protocol import Kernel, Variant

GPU = nvidia_driver.Gpu("NVIDIA H100", (9, 0), (13, 0))
X = np.ones((2, 2), np.float32)


@dataclass
class HostStream:
    """A stream whose memory is the host's: enough for buffers, without a GPU."""

    handle: int = 7
    memory: dict[int, Any] = field(default_factory=dict)

    def call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        if name == "cudaMalloc":
            array = np.zeros(arguments[0], np.uint8)
            self.memory[array.ctypes.data] = array
            return (array.ctypes.data,)
        return ()

    def wait(self) -> None:
        """Nothing runs."""

    def copy(self, to: int, source: int, size: int, kind: str) -> None:
        """Nothing to copy: the values are not looked at."""

    def download(self, pointer: int, array: Any) -> None:
        array[...] = 0

    def elapsed_us(self, work: Callable[[], None]) -> float:
        work()
        return 100.0

    def captured(self, work: Callable[[], None]) -> Callable[[], object]:
        work()
        return lambda: None


@cache
def fake_of(place: int) -> Fake:
    return Fake(releases()[place])


@pytest.fixture(params=[pytest.param(place, id=str(release)) for place, release in enumerate(releases())])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    made = fake_of(request.param)
    release = made.release
    made.used.clear()
    monkeypatch.setitem(sys.modules, release.library, made.module)
    monkeypatch.setattr(nvidia_driver, "gpu", lambda: GPU)
    monkeypatch.setattr(tensorrt_program, "Stream", HostStream)
    for name, value in NO_TF32.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("REWRITER_CACHE", str(tmp_path / "cache"))
    return made


@pytest.mark.parametrize("gpu", [True, False], ids=["a GPU", "no GPU"])
def test_a_network_is_built(fake: Fake, gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia_driver, "gpu", lambda: GPU if gpu else None)
    options = BuildOptions(
        library=fake.release.library,
        shapes={"x": ((1, 2), (2, 2), (4, 2))},
        engine=tmp_path / "model.engine",
        timing_cache=True,
        tf32=False,
        outputs=["y"],
        unfused=True,
    )
    report = build_here(tmp_path / "model.onnx", options)
    assert (report.library, report.version) == (fake.release.library, fake.release.version)
    assert (report.engine_bytes, (tmp_path / "model.engine").read_bytes()) == (6, b"engine")
    assert (report.parser_errors[0].node, report.layers[0].node, report.notes) == ("relu", "relu", ())
    rtx = fake.release.library == "tensorrt_rtx"
    assert ("IBuilderConfig.set_compute_capability" in fake.used) == (rtx and not gpu)
    assert ("IBuilderConfig.create_timing_cache" in fake.used) == (gpu and not rtx)


def test_an_engine_is_loaded_and_run(fake: Fake, tmp_path: Path) -> None:
    engine = tmp_path / "model.engine"
    engine.write_bytes(b"engine")
    variant = Variant("fixed", tmp_path / "model.onnx", (), tf32=False, engine=engine)
    program = tensorrt_program.TensorRTProgram(fake.release.library, variant, ())
    outputs = program.run({"x": X})
    assert {name: array.shape for name, array in outputs.items()} == {"y": (2, 2), "sized": (3,)}
    assert program._host["y"].shape == (2, 2), "where the engine says that it is"
    eager = fake.release.find("", "DynamicShapesKernelSpecializationStrategy") is not None
    assert ("ICudaEngine.create_runtime_config" in fake.used) == eager
    assert "IExecutionContext.set_debug_listener" not in fake.used
    program.prepare({"x": X})
    assert (program.time_us(), program.cuda_graph) == (20.0, True), "5 runs in a row last 0.5 ms"
    program.close()


def test_a_run_gives_the_tensors_between_kernels(fake: Fake, tmp_path: Path) -> None:
    engine = tmp_path / "model.engine"
    engine.write_bytes(b"engine")
    variant = Variant("fixed", tmp_path / "model.onnx", (), engine=engine, unfused="run")
    program = tensorrt_program.TensorRTProgram(fake.release.library, variant, ())
    seen: dict[str, Any] = {}
    assert {*program.run({"x": X}, seen.__setitem__)} == {"y", "sized"}
    if fake.release.find("IExecutionContext", "unfused_tensors_debug_state") is None:
        assert (program.kernels, seen) == ((), {})
        return
    assert program.kernels == (Kernel((), ("moved",)), Kernel(("relu", "add"), ("inner",)))
    assert {name: array.tolist() for name, array in seen.items()} == {"inner": HALVES.tolist()}

    def full(name: str, array: Any) -> None:
        raise OSError("no space left")

    assert {*program.run({"x": X}, full)} == {"y", "sized"}
    assert program.notes == ["1 tensor could not be read: inner: no space left"]
