"""Measurements in real child processes: their results, and the outcome of every kind of failure."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from graphs import graph
from needs import needs_rtx

from rewriter.base.errors import EngineError, NativeError
from rewriter.ir.model import Array, save
from rewriter.runtime.engines.measure import Run, measure, summary
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.engines.protocol import EngineOutcome, MeasureSettings, Timing, Variant
from rewriter.runtime.engines.tensor_files import (
    TensorWriter,
    read_tensors,
    spans_of,
    write_samples,
    write_tensors,
)

DOUBLED = "g (float[n,4] x) => (float[n,4] y) { a = Relu(x)\n y = Add(a, a) }"

ENDLESS = """
    g (float[n,4] x) => (float[n,4] y)
    <int64 trips = {1000000000000}, bool go = {1}> {
        y = Loop (trips, go, x) <body = b (int64 i, bool c, float[n,4] h) => (bool again, float[n,4] next) {
            again = And(c, c) next = Add(h, h)
        }>
    }"""
"""ONNX Runtime would need some ten days for this model."""

FEEDS = [{"x": np.full((rows, 4), rows - 2.0, np.float32)} for rows in (1, 3)]
QUICK = Timing(warm_up=1, repeats=5)
ORT = MeasureSettings("onnxruntime", timing=QUICK)


@pytest.fixture
def samples(tmp_path: Path) -> tuple[Path, ...]:
    return write_samples(tmp_path / "samples", FEEDS)


def variant(text: str, folder: Path, samples: tuple[Path, ...], name: str = "one") -> Variant:
    return Variant(name, save(graph(text), folder / f"{name}.onnx"), samples)


def outcome(
    text: str, folder: Path, samples: tuple[Path, ...], settings: MeasureSettings = ORT
) -> EngineOutcome:
    (found,) = measure([variant(text, folder, samples)], settings, folder / "work")
    return found


def test_the_child_returns_outputs_of_every_sample(tmp_path: Path, samples: tuple[Path, ...]) -> None:
    found = outcome(DOUBLED, tmp_path, samples)
    assert (found.status, found.device, len(found.outputs)) == ("ok", "CPU", 2)
    assert found.library.startswith("onnxruntime ")
    np.testing.assert_array_equal(found.values(0)["y"], np.zeros((1, 4)))
    np.testing.assert_array_equal(found.values(1)["y"], np.full((3, 4), 2.0))
    assert found.latency is not None and found.latency.repeats == 5
    assert found.latency.median_us > 0.0 and not found.latency.cuda_graph


def test_inner_tensors_can_be_marked_as_outputs(tmp_path: Path, samples: tuple[Path, ...]) -> None:
    marked = replace(variant(DOUBLED, tmp_path, samples), outputs=("a",))
    (found,) = measure([marked], ORT, tmp_path / "work")
    assert sorted(found.values(1)) == ["a", "y"]
    np.testing.assert_array_equal(found.values(1)["a"], np.ones((3, 4)))


def test_several_builds_and_variants_are_returned_in_order(tmp_path: Path, samples: tuple[Path, ...]) -> None:
    variants = [variant(DOUBLED, tmp_path, samples, name) for name in ("first", "second")]
    found = measure(variants, MeasureSettings("onnxruntime", builds=2, timing=None), tmp_path / "work")
    assert [(o.variant, o.build) for o in found] == [("first", 0), ("first", 1), ("second", 0), ("second", 1)]
    assert len({o.outputs[0] for o in found}) == 4
    assert {o.latency for o in found} == {None}


def test_a_model_that_does_not_run_stops_no_other(tmp_path: Path, samples: tuple[Path, ...]) -> None:
    wrong = variant("g (float[n,3] x) => (float[n,3] y) { y = Relu(x) }", tmp_path, samples, "wrong")
    well = variant(DOUBLED, tmp_path, samples, "well")
    first, second = measure([wrong, well], ORT, tmp_path / "work")
    assert first.status == "error" and "x" in first.problem
    assert second.ran and second.latency is not None


def test_a_hang_is_killed_and_the_others_are_measured(tmp_path: Path, samples: tuple[Path, ...]) -> None:
    variants = [variant(ENDLESS, tmp_path, samples, "endless"), variant(DOUBLED, tmp_path, samples, "well")]
    for limit in (4.0, 60.0):  # children start in 2 s, but for a busy machine
        settings = MeasureSettings("onnxruntime", timing=QUICK, timeout_s=limit)
        endless, well = measure(variants, settings, tmp_path / f"{limit}")
        assert endless.status == "timeout" and f"no result within {limit:g} s" in endless.problem
        if well.ran and "sample 0" in endless.log:
            break
    assert "endless: sample 0" in endless.log
    assert well.ran and well.latency is not None


def test_a_crash_is_an_outcome_and_the_survivors_are_timed(
    tmp_path: Path, samples: tuple[Path, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = []

    def run(function: Any, group: Sequence[Run], settings: MeasureSettings, **options: Any) -> Any:
        groups.append((*(one.variant.name for one in group), settings.timing is not None))
        if any(one.variant.name == "bad" for one in group):
            raise NativeError("it crashed", hint="mend it", cause="SIGKILL", log="its log")
        return [replace(one.outcome, device="here") for one in group], ""

    monkeypatch.setattr("rewriter.base.sandbox.run", run)
    variants = [variant(DOUBLED, tmp_path, samples, name) for name in ("bad", "well", "fine")]
    bad, well, fine = measure(variants, ORT, tmp_path / "work")
    assert (bad.status, bad.problem, bad.hint, bad.log) == ("crashed", "it crashed", "mend it", "its log")
    assert (well.device, fine.device) == ("here", "here")
    assert groups[1:] == [("bad", False), ("well", False), ("fine", False), ("well", "fine", True)]


@needs_rtx
def test_tensorrt_builds_without_a_gpu_and_runs_on_none(tmp_path: Path, samples: tuple[Path, ...]) -> None:
    found = outcome(DOUBLED, tmp_path, samples, MeasureSettings("tensorrt-rtx", timing=QUICK))
    assert found.report is not None and found.report.engine_bytes
    if not found.ran:
        assert found.status == "error"
        assert "compute capability" in found.problem or "no GPU" in found.problem
        assert found.hint


@needs_rtx
def test_the_profile_spans_the_samples_unless_one_is_given(tmp_path: Path, samples: tuple[Path, ...]) -> None:
    assert spans_of(map(read_tensors, samples)) == {"x": ((1, 4), (3, 4), (3, 4))}
    profile = {"x": ((2, 5), (2, 5), (2, 5))}
    wrong = replace(variant(DOUBLED, tmp_path, samples), shapes=profile)
    (found,) = measure([wrong], MeasureSettings("tensorrt-rtx"), tmp_path / "work")
    assert found.status == "refused" and "profile has min=5" in found.problem


@needs_rtx
def test_tensors_of_the_network_can_be_marked(tmp_path: Path, samples: tuple[Path, ...]) -> None:
    marked = replace(variant(DOUBLED, tmp_path, samples), outputs=("a", "lost"))
    (found,) = measure([marked], MeasureSettings("tensorrt-rtx"), tmp_path / "work")
    assert found.report is not None and found.report.engine_bytes
    assert found.notes == ("tensor 'lost' is not in the parsed network: folded, or inside a subgraph",)


@needs_rtx
def test_a_refusal_of_the_parser_names_the_node(tmp_path: Path, samples: tuple[Path, ...]) -> None:
    text = "g (float[n,4] x) => (float[n,4] y) { y = Det(x) }"
    found = outcome(text, tmp_path, samples, MeasureSettings("tensorrt-rtx"))
    assert found.status == "refused" and "Det" in found.problem
    assert found.report is not None


@needs_rtx
def test_a_build_has_a_time_limit(tmp_path: Path, samples: tuple[Path, ...]) -> None:
    found = outcome(DOUBLED, tmp_path, samples, MeasureSettings("tensorrt-rtx", timeout_s=0.01))
    assert found.status == "timeout"
    assert found.problem.startswith("the TensorRT build gave no result")


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float16).reshape(2, 3),
        np.arange(6).astype(ml_dtypes.bfloat16),
        np.array(3, np.int64),
        np.array(2.5, ml_dtypes.bfloat16),
        np.empty((0, 4), np.float32),
        np.array([True, False]),
        np.arange(12, dtype=np.int32).reshape(3, 4).T,
    ],
    ids=["fp16", "bf16", "a scalar", "a bf16 scalar", "nothing", "bool", "not contiguous"],
)
def test_tensors_are_read_as_they_were_written(tmp_path: Path, array: Array) -> None:
    read = read_tensors(write_tensors(tmp_path, {"/model/layer:0": array, "other": np.zeros(1)}))
    assert list(read) == ["/model/layer:0", "other"]
    assert read["/model/layer:0"].dtype == array.dtype
    np.testing.assert_array_equal(read["/model/layer:0"], array)


def test_two_timings_have_a_spread() -> None:
    assert summary([10.0, 14.0], False).iqr_us > 0.0 == summary([10.0], False).iqr_us


def test_a_folder_without_tensors_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no tensors were written"):
        read_tensors(tmp_path)


def test_outputs_of_onnx_runtime_are_written_and_read_in_their_types(tmp_path: Path) -> None:
    """Its arrays have instances of NumPy's types that are not NumPy's own objects."""
    with Session(graph("g (float[2] x) => (float[2] y, int64[1] n) { y = Neg(x) n = Shape(x) }")) as session:
        written = session.run({"x": np.ones(2, np.float32)})
    read = read_tensors(write_tensors(tmp_path / "outputs", written))
    assert {name: array.dtype.name for name, array in read.items()} == {"y": "float32", "n": "int64"}
    np.testing.assert_array_equal(read["y"], written["y"])


def test_a_tensor_that_is_written_twice_takes_no_other_ones_file(tmp_path: Path) -> None:
    writer = TensorWriter(tmp_path)
    for name, value in (("a", np.float16(1)), ("a", np.float16(2)), ("b", np.float32(3))):
        writer.add(name, np.array(value))
    assert read_tensors(writer.close()) == {"a": 2, "b": 3}
