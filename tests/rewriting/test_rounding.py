"""Rounding weights together: the grid, both forms of the Cholesky factor, and the rows of a Conv."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from graphs import graph
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info
from weighted import weighted, weights

from rewriter.engines.onnxruntime import Session
from rewriter.model import Array
from rewriter.rewriting.rounding import (
    FittingData,
    Grid,
    Layer,
    Rounded,
    RowSource,
    Skipped,
    Window,
    compensate,
)
from rewriter.rewriting.rounding.blas import one_thread
from rewriter.rewriting.rounding.nearest_plane import (
    LEAST_DAMPING,
    MOST_DAMPING,
    Dense,
    LowRank,
    cholesky,
    damping,
    round_together,
)
from rewriter.rewriting.rounding.rows import Reader
from rewriter.rewriting.rounding.segments import segment

FP16, BF16, TF32 = 10, 16, 1


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_the_grid_rounds_as_numpy_converts(dtype: int, bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    values = np.where(np.isfinite(values), values, np.float32(0.0))
    grid, kind = Grid(dtype), {FP16: np.float16, BF16: ml_dtypes.bfloat16}[dtype]
    wanted = np.clip(values, -grid.largest, grid.largest).astype(kind).astype(np.float32)
    np.testing.assert_array_equal(grid.nearest(values).view(np.uint32), wanted.view(np.uint32))


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_tf32_has_the_significand_of_fp16_and_the_exponents_of_fp32(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    values = np.where(np.abs(values) < 3.4e38, values, np.float32(0.0))
    found = Grid(TF32).nearest(values)
    assert not np.any(found.view(np.uint32) & np.uint32(2**13 - 1))
    _, exponents = np.frexp(values)
    spacing = np.ldexp(1.0, np.maximum(exponents - 11, -136))  # the least one is of FP32's subnormal numbers
    assert np.all(np.abs(found.astype(np.float64) - values) <= spacing / 2)
    assert Grid(TF32).holds(found)


def test_fp16_rounds_all_numbers_and_all_midpoints_as_numpy() -> None:
    own = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    own = np.sort(own[np.isfinite(own)])
    middles = ((own[1:].astype(np.float64) + own[:-1]) / 2).astype(np.float32)
    for values in (own, middles):
        wanted = values.astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(Grid(FP16).nearest(values), wanted)


@settings(deadline=None, max_examples=20)
@given(count=st.integers(3, 90), channels=st.integers(1, 150), seed=st.integers(0, 9))
def test_both_forms_of_the_cholesky_factor_round_alike(count: int, channels: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((count, 3)) @ rng.standard_normal((3, channels))).astype(np.float32)
    rows += rng.standard_normal(rows.shape).astype(np.float32)
    matrix = rng.standard_normal((1, channels, 5)).astype(np.float32)
    share = damping(count, channels) * np.square(rows).sum() / channels
    forms = (LowRank.of(rows, float(share)), Dense.of(rows[None], np.array([share])))
    errors = [np.linalg.norm(rows @ (round_together(matrix, f, Grid(FP16)) - matrix)[0]) for f in forms]
    assert errors[0] == pytest.approx(errors[1], rel=0.2)


def test_fewer_rows_mean_more_damping() -> None:
    found = [damping(rows, 768) for rows in (10**6, 4 * 768, 768, 256, 1)]
    assert found == sorted(found) and found[0] == LEAST_DAMPING and found[-1] == MOST_DAMPING


def windows(x: Array, window: Window) -> Array:
    """Rows of a 2-D Conv at all positions, [groups, rows, K], by plain loops."""
    top, left, bottom, right = window.pads
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    rows = []
    spans = [(k - 1) * d + 1 for k, d in zip(window.kernel, window.dilations, strict=True)]
    for image in x:
        for i in range(0, x.shape[2] - spans[0] + 1, window.strides[0]):
            for j in range(0, x.shape[3] - spans[1] + 1, window.strides[1]):
                seen = image[
                    :, i : i + spans[0] : window.dilations[0], j : j + spans[1] : window.dilations[1]
                ]
                rows.append(seen.reshape(window.groups, -1))
    return np.stack(rows, axis=1)


@pytest.mark.parametrize("groups", [1, 2])
def test_rows_of_a_conv_are_the_contents_of_its_windows(groups: int) -> None:
    source = graph("g (float[2,4,9,8] x) => (float[2,4,9,8] y) { y = Relu(x) }")
    x = np.random.default_rng(0).standard_normal((2, 4, 9, 8)).astype(np.float32)
    window = Window((3, 2), (2, 1), (1, 3), (1, 0, 2, 1), groups)
    asked = RowSource("x", 4 * 6, window)
    all_rows = Reader(source, [{"x": x}], {}, 0).read({asked: 4096})[asked].samples[0]
    np.testing.assert_array_equal(all_rows, windows(x, window))
    some = Reader(source, [{"x": x}], {}, 0).read({asked: 20})[asked].samples[0]
    assert some.shape == (groups, 20, 24 // groups)
    known = {row.tobytes() for row in all_rows[0]}
    assert {row.tobytes() for row in some[0]} <= known
    assert len({row.tobytes() for row in some[0]}) == 20


def test_zero_or_huge_rows_have_no_factor() -> None:
    assert cholesky(np.zeros((1, 8, 4), np.float32)) is None
    assert cholesky(np.full((1, 8, 4), 1e30, np.float32)) is None


def test_rows_of_samples_with_other_shapes_and_of_shapes_that_depend_on_values() -> None:
    source = graph(
        "g (float[N,M] x) => (float[P,K] y) { kept = NonZero(x)  found = Transpose(kept)"
        "  y = Cast<to = 1>(found)  z = Relu(x) }"
    )
    first, second = np.eye(3, 4, dtype=np.float32), np.ones((2, 4), np.float32)
    of_values, of_shapes = RowSource("y", 2), RowSource("z", 4)
    rows = Reader(source, [{"x": first}, {"x": second}], {}, 0).read({of_values: 99, of_shapes: 99})
    np.testing.assert_array_equal(rows[of_values].samples[0][0], [[0, 0], [1, 1], [2, 2]])
    assert rows[of_values].samples[1].shape == (1, 8, 2)
    for read, given_ in zip(rows[of_shapes].samples, (first, second), strict=True):
        np.testing.assert_array_equal(read[0], given_)


def test_as_few_samples_are_chosen_as_have_enough_rows() -> None:
    source = graph("g (float[N,4] x) => (float[N,4] y) { y = Relu(x) }")
    for rows, runs in ((2000, {0, 4, 9}), (50, {0, 2, 4, 5, 7, 9})):
        samples = [{"x": np.ones((rows, 4), np.float32)}] * 10
        assert FittingData(source, samples, 10, 2048, (RowSource("x", 4),)).chosen == runs


@pytest.mark.parametrize(("width", "again"), [(4, 0), (2**20, 2)], ids=["small samples", "large samples"])
def test_small_samples_are_read_once(width: int, again: int) -> None:
    class Counted:
        count = 0

        def __iter__(self) -> Iterator[dict[str, Array]]:
            self.count += 1
            return iter([{"x": np.ones((3, width), np.float32)}] * 3)

    source, samples = graph(f"g (float[3,{width}] x) => (float[3,{width}] y) {{ y = Relu(x) }}"), Counted()
    asked = RowSource("x", width)
    data = FittingData(source, samples, 3, 2048, (asked,))
    reader = data.reader({})
    before = samples.count
    for _ in range(2):
        found = reader.read({asked: 1})[asked]
        assert [rows.shape for rows in found.samples] == [(1, 1, width)] * 3
    assert samples.count - before == again


def test_one_thread_limits_numpy() -> None:
    def threads() -> dict[str, int]:
        return {lib["filepath"]: lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}

    with one_thread():  # SciPy's library may have come after the first use: it is not looked for again
        limited = {path for path, number in threads().items() if number == 1}
    before = threads()
    with one_thread():
        assert threads() == before | dict.fromkeys(limited, 1)
    assert threads() == before
    assert limited, "numpy has no BLAS library that threadpoolctl knows"


BRANCHED = """g (float[N,4] x) => (float[N,4] y) <float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 1,1,1,2}> {
    a = Tanh(x)  n = NonZero(a)  b = MatMul(a, w)  c = Relu(b)  d = MatMul(c, w)  e = Add(d, a)
    f = MatMul(e, w)  t = Transpose(n)  y = Add(f, b) }"""
"""A later part reads `a`, too; the shape of `n` depends on values."""


@pytest.mark.parametrize(
    ("room", "held"),
    [
        pytest.param(10**6, [{"a"}, {"e", "b"}, set()], id="room"),
        pytest.param(6 * 4 * 4, [{"a"}, {"a"}, set()], id="room for the first cut alone"),
        pytest.param(0, [set(), set(), set()], id="no room"),
    ],
)
def test_running_in_parts_reads_the_same_rows_as_one_run(room: int, held: list[set[str]]) -> None:
    source, rng = graph(BRANCHED), np.random.default_rng(3)
    samples = [{"x": rng.standard_normal((rows, 4)).astype(np.float32)} for rows in (6, 9)]
    shapes = dict.fromkeys("abcdefy", (6, 4))
    asked = [RowSource(name, 4) for name in ("a", "c", "e", "y")]
    whole = Reader(source, samples, shapes, room).read(dict.fromkeys(asked, 5))
    reader = Reader(source, samples, shapes, room)
    for index, (sources, left) in enumerate(zip((asked[:1], asked[1:3], asked[3:]), held, strict=True)):
        later = [s.tensor for s in asked[(1, 3, 4)[index] :]]
        for one, rows in reader.read(dict.fromkeys(sources, 5), later).items():
            for part, expected in zip(rows.samples, whole[one].samples, strict=True):
                np.testing.assert_array_equal(part, expected)
        assert [set(tensors) for tensors in reader.held] == [left, left], index


@pytest.mark.parametrize(
    ("room", "kept"), [pytest.param(10**6, {"e", "b"}, id="room"), pytest.param(0, set(), id="no room")]
)
def test_outputs_come_from_tensors_held_if_there_is_room(room: int, kept: set[str]) -> None:
    source = graph(BRANCHED.replace("float[N,4] y)", "float[N,4] y, float[N,4] e)"))
    rng = np.random.default_rng(3)
    samples = [{"x": rng.standard_normal((rows, 4)).astype(np.float32)} for rows in (6, 9)]
    shapes = dict.fromkeys("abcdefy", (6, 4))
    reader = Reader(source, samples, shapes, room, outputs=("y", "e"))
    reader.read({RowSource("e", 4): 5})
    assert reader.held[-1].keys() == kept
    with Session(source) as session:
        whole = session.run(samples[-1])
    found = reader.results()
    assert list(found) == ["y", "e"] and not reader.held
    for name, array in whole.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_weight_with_several_consumers_is_rounded_when_the_graph_has_reached_the_last() -> None:
    source = weighted(
        "g (float[64,4] x) => (float[64,4] y) { a = MatMul(x, w)  b = MatMul(a, u)  y = MatMul(b, w) }",
        w=(4, 4),
        u=(4, 4),
    )
    found = [
        Layer("w", "first", (RowSource("x", 4), RowSource("b", 4))),
        Layer("u", "second", (RowSource("a", 4),)),
    ]
    samples = [{"x": np.random.default_rng(3).standard_normal((64, 4)).astype(np.float32)}]
    data = FittingData(source, samples, 1, 64, tuple(s for layer in found for s in layer.sources))
    values = {name: weights(source)[name] for name in ("w", "u")}
    done = list(compensate(values, found, data, data.reader(values), {}))
    assert [one.layer.weight for one in done if isinstance(one, Rounded)] == ["u", "w"]


def two_layers() -> tuple[dict[str, Array], list[Layer], FittingData]:
    """Values, layers and data of two products in a row."""
    source = weighted(
        "g (float[64,8] x) => (float[64,8] y) { a = MatMul(x, w)  b = Relu(a)  y = MatMul(b, u) }",
        w=(8, 8),
        u=(8, 8),
    )
    found = [Layer("w", "first", (RowSource("x", 8),)), Layer("u", "second", (RowSource("b", 8),))]
    samples = [{"x": np.random.default_rng(3).standard_normal((64, 8)).astype(np.float32)}]
    data = FittingData(source, samples, 1, 64, tuple(s for layer in found for s in layer.sources))
    return {name: weights(source)[name] for name in ("w", "u")}, found, data


def stored(done: Sequence[Rounded | Skipped]) -> dict[str, Array]:
    return {name: value for one in done if isinstance(one, Rounded) for name, value in one.stored().items()}


def test_what_was_rounded_for_one_plan_serves_another(monkeypatch: pytest.MonkeyPatch) -> None:
    values, found, data = two_layers()
    kept: dict[Any, Any] = {}
    alone = stored(list(compensate(values, found[1:], data, data.reader(values), {})))
    first = stored(list(compensate(values, found[:1], data, data.reader(values), kept)))
    both = stored(list(compensate(values, found, data, data.reader(values), kept)))
    assert first.keys() | alone.keys() == both.keys() == {"w", "u"}
    for name, value in (first | alone).items():
        np.testing.assert_array_equal(both[name], value)
    monkeypatch.setattr(Reader, "read", None)  # no sample runs again
    again = stored(list(compensate(values, found, data, data.reader(values), kept)))
    assert all(again[name] is both[name] for name in both)


def test_large_weights_are_not_kept_for_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["rewriter.rewriting.rounding.compensate"]  # the package has a function of that name
    monkeypatch.setattr(module, "KEPT_BYTES", 8 * 8 * 4)
    values, found, data = two_layers()
    kept: dict[Any, Any] = {}
    assert len(list(compensate(values, found, data, data.reader(values), kept))) == 2
    assert not kept


def test_a_segment_keeps_tensors_that_later_parts_read() -> None:
    source = graph(BRANCHED)
    part = segment(source.proto.graph, ["c"], ["t"], frozenset())
    assert (part.given, part.later, part.size({"a": (6, 4)})) == ((), ("a",), 96)
    part = segment(source.proto.graph, ["n"], ["t"], {"a"})
    assert [node.op_type for node in part.nodes] == ["NonZero"]
    assert (part.given, part.later, part.size({"a": (6, 4)})) == (("a",), ("n",), None)
