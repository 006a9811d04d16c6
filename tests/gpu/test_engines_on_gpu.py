"""Everything that needs a GPU: `python -m pytest tests/gpu -m gpu -s` prints a table of the results.

Each test runs on every engine that can use the GPU. TensorRT is left out where it is not installed.
"""

import math
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import graph
from paths import MODELS

import rewriter
from benchmarks.surroundings import Suite, table
from rewriter.ir.model import Array, Model, save
from rewriter.jobs.search import effort
from rewriter.pipeline.options import Runner
from rewriter.runtime.engines.measure import measure
from rewriter.runtime.engines.protocol import EngineOutcome, MeasureSettings, Variant
from rewriter.runtime.engines.tensor_files import read_tensors, write_samples
from rewriter.runtime.engines.this_machine import ENGINES
from rewriter.target import quirks
from rewriter.target.quirks import Quirk
from rewriter.verification.locate.kernels import recognised, written

pytestmark = pytest.mark.gpu
FULL: tuple[Runner, ...] = ("tensorrt",) if find_spec("tensorrt") else ()
TENSORRT: tuple[Runner, ...] = (*FULL, "tensorrt-rtx")
NAMES: tuple[Runner, ...] = (*TENSORRT, "onnxruntime-cuda")
ROWS: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def _table() -> object:
    yield
    print("\n" + "\n".join(ROWS))  # noqa: T201 - the table is what the run is for


@pytest.fixture(params=NAMES)
def engine(request: pytest.FixtureRequest) -> Runner:
    name: Runner = request.param
    if problem := ENGINES[name].obstacle():
        pytest.skip(problem.what)
    return name


tensorrt_only = pytest.mark.parametrize("engine", TENSORRT, indirect=True)


def matmul(width: int, dtype: str = "float") -> Model:
    """Two MatMuls and a Relu with a dynamic batch size and random weights."""
    source = graph(
        f"g ({dtype}[n,{width}] x, {dtype}[{width},{width}] w) => ({dtype}[n,{width}] y) {{"
        " a = MatMul(x, w)\n b = Relu(a)\n y = MatMul(b, w) }"
    )
    kind = np.float32 if dtype == "float" else np.float16
    weight = (np.random.default_rng(0).normal(size=(width, width)) / width**0.5).astype(kind)
    source.proto.graph.initializer.append(source.detached_tensor("w", weight))
    del source.proto.graph.input[1]
    return source


def feeds(width: int, kind: type = np.float32, batches: tuple[int, ...] = (8, 16)) -> list[dict[str, Array]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(size=(batch, width)).astype(kind)} for batch in batches]


def measured(
    engine: Runner, source: Model, samples: tuple[Path, ...], folder: Path, builds: int = 1, **fields: Any
) -> list[EngineOutcome]:
    """The outcomes of all builds of one model."""
    variant = Variant("m", save(source, folder / "m.onnx"), samples, **fields)
    return measure([variant], MeasureSettings(engine, builds=builds), folder / "work")


def record(test: str, outcome: EngineOutcome, error: float | None = None) -> None:
    latency = outcome.latency
    time = f"{latency.median_us:8.1f} us +- {latency.iqr_us:.1f}" if latency else "not timed"
    graphed = "graph" if latency and latency.cuda_graph else "launches"
    shown = f"{error:.2e}" if error is not None else outcome.problem
    ROWS.append(
        f"{test:30} {outcome.library:26} {outcome.status:8} error {shown:10} {time} ({graphed}) "
        f"{'; '.join(outcome.notes)}"
    )


def relative(outcome: EngineOutcome, source: Model, samples: tuple[Path, ...]) -> float:
    """Largest relative L2 error of y over the samples, against float64."""
    weight = source.weights["w"].astype(np.float64)
    errors = []
    for number, sample in enumerate(map(read_tensors, samples)):
        exact = np.maximum(sample["x"].astype(np.float64) @ weight, 0.0) @ weight
        errors.append(float(np.linalg.norm(outcome.values(number)["y"] - exact) / np.linalg.norm(exact)))
    return max(errors)


def test_fp32_errors_with_and_without_tf32(engine: Runner, tmp_path: Path) -> None:
    source, samples = matmul(1024), write_samples(tmp_path / "s", feeds(1024))
    path = save(source, tmp_path / "m.onnx")
    variants = [Variant("tf32", path, samples), Variant("fp32", path, samples, tf32=False)]
    tf32, fp32 = measure(variants, MeasureSettings(engine), tmp_path / "work")
    for outcome in (tf32, fp32):
        assert outcome.ran, f"{outcome.problem}\n{outcome.log}"
        record(f"MatMul 1024, {outcome.variant}", outcome, relative(outcome, source, samples))
    assert relative(fp32, source, samples) < 2e-5, "TF32 was not switched off"


def test_the_next_engine_finds_compiled_kernels(tmp_path: Path) -> None:
    if problem := ENGINES["tensorrt-rtx"].obstacle():
        pytest.skip(problem.what)
    source, samples, kernels = matmul(1024), write_samples(tmp_path / "s", feeds(1024)), tmp_path / "kernels"
    settings, variant = (
        MeasureSettings("tensorrt-rtx"),
        Variant("m", save(source, tmp_path / "m.onnx"), samples),
    )
    sizes, errors = [], []
    for number in range(2):
        (outcome,) = measure([variant], replace(settings, kernels=kernels), tmp_path / str(number))
        assert outcome.ran, f"{outcome.problem}\n{outcome.log}"
        sizes.append(kernels.stat().st_size)
        errors.append(relative(outcome, source, samples))
    assert sizes[0] == sizes[1] > 10_000, "nothing was kept, or the same kernels were compiled again"
    assert errors[0] == errors[1]


def test_fp16_and_fp32_are_timed_side_by_side(engine: Runner, tmp_path: Path) -> None:
    variants, sources = [], {}
    for name, dtype, kind in (("fp16", "float16", np.float16), ("fp32", "float", np.float32)):
        sources[name] = matmul(1024, dtype)
        samples = write_samples(tmp_path / f"s{name}", feeds(1024, kind))
        variants.append(Variant(name, save(sources[name], tmp_path / f"{name}.onnx"), samples))
    for variant, outcome in zip(
        variants, measure(variants, MeasureSettings(engine), tmp_path / "work"), strict=True
    ):
        assert outcome.ran, f"{outcome.problem}\n{outcome.log}"
        assert outcome.latency is not None
        error = relative(outcome, sources[variant.name], variant.samples)
        record(f"interleaved, {variant.name}", outcome, error)
        assert error < 1e-2


@tensorrt_only
def test_a_cuda_graph_is_replayed_in_every_build(engine: Runner, tmp_path: Path) -> None:
    source, samples = matmul(512), write_samples(tmp_path / "s", feeds(512))
    for outcome in measured(engine, source, samples, tmp_path, builds=3):
        assert outcome.ran, f"{outcome.problem}\n{outcome.log}"
        record(f"build {outcome.build} of 3", outcome, relative(outcome, source, samples))
        assert outcome.latency is not None and outcome.latency.cuda_graph


@tensorrt_only
def test_outputs_may_have_shapes_that_depend_on_the_data(engine: Runner, tmp_path: Path) -> None:
    source = graph("g (float[4] x) => (int64[1,k] y) { y = NonZero(x) }")
    samples = write_samples(
        tmp_path / "s", [{"x": np.array(x, np.float32)} for x in ([1, 0, 2, 0], [1, 1, 1, 0])]
    )
    (outcome,) = measured(engine, source, samples, tmp_path)
    record("NonZero", outcome, 0.0 if outcome.ran else None)
    if outcome.status == "refused":
        pytest.skip(f"this library does not take NonZero: {outcome.problem}")
    assert outcome.ran, f"{outcome.problem}\n{outcome.log}"
    assert [outcome.values(i)["y"].tolist() for i in range(2)] == [[[0, 2]], [[0, 1, 2]]]


@tensorrt_only
def test_marked_tensors_are_returned(engine: Runner, tmp_path: Path) -> None:
    source, samples = matmul(256), write_samples(tmp_path / "s", feeds(256))
    (outcome,) = measured(engine, source, samples, tmp_path, outputs=("b",))
    assert outcome.ran, f"{outcome.problem}\n{outcome.log}"
    assert outcome.values(0)["b"].shape == (8, 256)
    record("a marked tensor", outcome, relative(outcome, source, samples))


@tensorrt_only
def test_tensors_between_kernels_are_given_and_change_nothing(engine: Runner, tmp_path: Path) -> None:
    source, samples = matmul(256, "float16"), write_samples(tmp_path / "s", feeds(256, np.float16))
    (plain,) = measured(engine, source, samples, tmp_path)
    kept = [plain.values(number)["y"].copy() for number in range(2)]
    (outcome,) = measured(engine, source, samples, tmp_path, unfused="run")
    assert outcome.ran, f"{outcome.problem}\n{outcome.log}"
    record("tensors between kernels", outcome, relative(outcome, source, samples))
    if not outcome.kernels:
        pytest.skip("this release gives none")
    for number, fed in enumerate(map(read_tensors, samples)):
        np.testing.assert_array_equal(outcome.values(number)["y"], kept[number])
        products = fed["x"].astype(np.float32) @ source.weights["w"].astype(np.float32)
        exact = {"a": products, "b": np.maximum(products, 0)}
        results = [r for r in written(source, outcome.kernels, exact) if r.name in outcome.inner(number)]
        found, _ = recognised(results, outcome.inner(number), exact, {n: n for n in exact}, 5e-3)
        assert found, "at least one of two products is in a kernel of its own"


@tensorrt_only
def test_a_shape_outside_the_profile_is_an_error_with_a_hint(engine: Runner, tmp_path: Path) -> None:
    samples = write_samples(tmp_path / "s", feeds(64))
    (outcome,) = measured(engine, matmul(64), samples, tmp_path, shapes={"x": ((1, 64), (8, 64), (8, 64))})
    record("outside the profile", outcome)
    assert outcome.status == "error" and "outside the engine's profile" in outcome.problem


@tensorrt_only
def test_a_broken_engine_does_not_stop_the_others(engine: Runner, tmp_path: Path) -> None:
    source, samples = matmul(64), write_samples(tmp_path / "s", feeds(64))
    path = save(source, tmp_path / "m.onnx")
    broken = tmp_path / "broken.engine"
    broken.write_bytes(b"no engine" * 1000)
    variants = [Variant("broken", path, samples, engine=broken), Variant("well", path, samples)]
    first, second = measure(variants, MeasureSettings(engine), tmp_path / "work")
    record("a broken engine file", first)
    record("beside it", second, relative(second, source, samples) if second.ran else None)
    assert not first.ran and first.problem
    assert second.ran, f"{second.problem}\n{second.log}"


def test_verify_and_fix_run_the_engine(engine: Runner, tmp_path: Path) -> None:
    original = save(matmul(256), tmp_path / "original.onnx")
    done = rewriter.fix(original, tmp_path / "fixed.onnx", inputs=feeds(256), engine=engine)
    ROWS.extend(f"fix: {check.name:26} {check.passed} {check.summary}" for check in done.checks)
    assert [check.name for check in done.checks if check.passed][-1] == "run"
    result = rewriter.verify(original, tmp_path / "fixed.onnx", inputs=feeds(256), engine=engine, builds=3)
    ROWS.extend(f"verify: {check.name:23} {check.passed} {check.summary}" for check in result.checks)
    assert result.passed and "compute capability" in result.device
    assert result.reference_latency is not None


DEFECTS = [quirk for quirk in quirks.table() if quirk.library == "tensorrt-rtx" and quirk.case]


@pytest.mark.parametrize("quirk", DEFECTS, ids=lambda quirk: quirk.id)
def test_fix_is_right_where_the_library_has_a_defect(quirk: Quirk, tmp_path: Path) -> None:
    """On the row's own graph, in FP32, with the row's remedy or by the repairs of `fix`."""
    if problem := ENGINES["tensorrt-rtx"].obstacle():
        pytest.skip(problem.what)
    for case in quirk.case:
        source, inputs = case.proto(fp32=True), case.feeds(fp32=True)
        done = rewriter.fix(source, tmp_path / "fixed.onnx", inputs=inputs, engine="tensorrt-rtx")
        low = [f"{d.op} ({d.rule})" for d in done.plan.decisions] if done.plan else []
        ROWS.append(f"{quirk.id}, {case.name}: {done.ending}; FP32: {', '.join(low)}; {done.repairs}")
        assert done.verified, str(done.verdict)


@pytest.mark.parametrize("name", ["convnext", "bert", "rtdetr"])
def test_references_on_cuda_give_the_same_types(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if problem := ENGINES["onnxruntime-cuda"].obstacle():
        pytest.skip(problem.what)
    done = {}
    for work in (0.0, math.inf):
        monkeypatch.setattr(effort, "CUDA_WORK", work)
        done[work] = rewriter.fix(MODELS / f"{name}.onnx", inputs=MODELS / f"{name}.npz", engine="emulation")
    cuda, cpu = done.values()
    assert not any("CUDA" in warning for warning in cuda.warnings)
    assert cuda.verified and cpu.verified
    assert cuda.plan is not None and cpu.plan is not None and cuda.plan.fp32 == cpu.plan.fp32


def test_passes_and_rules_are_right_in_surroundings(tmp_path: Path) -> None:
    if problem := ENGINES["tensorrt-rtx"].obstacle():
        pytest.skip(problem.what)
    suite = Suite(tmp_path, 0, time.monotonic() + 300, gpu=True)
    suite.run(["fuse-layer-norm", "merge-projections", "fp32-softmax", "fp32-epilogue"], 3, 4)
    ROWS.extend(table(suite.found))
    results = [row["ours"] for rows in suite.found.values() for row in rows.values()]
    assert len(results) == 12
    assert all("error" in one and "symptom" not in one for one in results)
