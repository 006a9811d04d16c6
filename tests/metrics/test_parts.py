"""Parts of outputs: which there are, and that each is judged against its own scale."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rewriter.ir.model import Array
from rewriter.report.checks import part_lines
from rewriter.runtime.metrics.metrics import by_parts, detections
from rewriter.runtime.metrics.outputs import ROUNDING_NOISE, OutputComparison, compare
from rewriter.runtime.metrics.parts import chance, parts, parts_of
from rewriter.runtime.metrics.probabilities import Probabilities
from rewriter.verification.verdict import Check

FP16 = 5e-3
DRAWN = np.random.default_rng(0)
FLOOR = float(np.finfo(np.float32).min)


def normal(*shape: int) -> Array:
    return DRAWN.normal(size=shape).astype(np.float32)


def scaled(shape: tuple[int, ...], axis: int, scales: Array) -> Array:
    others = [other for other in range(len(shape)) if other != axis]
    return np.asarray(normal(*shape) * np.expand_dims(scales, others))


def masked(value: float, size: float = 3.0) -> Array:
    logits = size * normal(4, 300)
    logits.reshape(-1)[::7] += value
    return logits


HEAD = scaled((1, 84, 100), 1, np.r_[[300.0] * 4, [0.2] * 80])
CLIPS = scaled((3, 500), 0, np.array([1.0, 1e-3, 0.8]))
PADDED = np.concatenate(
    [np.abs(scaled((1, 200, 6), 2, np.array([300.0] * 4 + [0.3, 30]))), np.zeros((1, 100, 6))], 1
)
RELU = np.maximum(normal(1, 8, 400) + np.array([0, 0, 0, 0, 0, 0, 0, -3.0])[None, :, None], 0.0)


@pytest.mark.parametrize(
    ("array", "names"),
    [
        pytest.param(HEAD, ["rows 4 to 83 of axis 1"], id="boxes and scores"),
        pytest.param(PADDED, ["column 4 of axis 2"], id="detections, padded with rows of 0"),
        pytest.param(scaled((200, 2), 1, np.array([50.0, 0.01])), ["column 1 of axis 1"], id="mu and sigma"),
        pytest.param(CLIPS, ["item 1 of axis 0"], id="a quiet clip"),
        pytest.param(
            scaled((1, 900, 16), 1, np.r_[400.0, [1.0] * 899]),
            ["rows 1 to 899 of axis 1"],
            id="tokens by a sink",
        ),
        pytest.param(np.array([[640.0, 480.0, 0.9]], np.float32), ["column 2 of axis 1"], id="a vector"),
        pytest.param(masked(-1e4), ["without entries beyond 8.2e+03"], id="-1e4 added to scores"),
        pytest.param(
            np.where(np.arange(300) % 7, masked(0.0), FLOOR), ["without entries beyond 3e+38"], id="min"
        ),
        pytest.param(normal(4, 10), [], id="a vector of one scale, some entries small by chance"),
        pytest.param(RELU, [], id="a channel that is mostly below 0 before a Relu"),
        pytest.param(np.maximum(CLIPS, 0.0), ["item 1 of axis 0"], id="a dark picture behind a Relu"),
        pytest.param(scaled((1, 4, 300), 1, np.array([1.0, 0.3, 1.0, 0.0])), [], id="a channel of 0"),
        pytest.param(
            scaled((1, 4, 300), 1, np.array([600.0, 1.0, 1.0, 1e-6])), ["rows 1 to 3 of axis 1"], id="noise"
        ),
        pytest.param(
            scaled((1, 7, 300), 1, np.array([1e4, 1e4, 30.0, 30.0, 0.05, 0.05, 0.0])),
            ["rows 2 to 6 of axis 1", "rows 4 to 5 of axis 1"],
            id="a row of 0 goes with the first part",
        ),
        pytest.param(np.arange(12).reshape(1, 12), [], id="whole numbers"),
        pytest.param(np.zeros((0, 4), np.float32), [], id="nothing"),
    ],
)
def test_parts_are_slices_of_another_scale(array: Array, names: list[str]) -> None:
    assert [str(part) for part in parts([array])] == names


@pytest.mark.parametrize("seed", range(30))
def test_outputs_of_one_scale_have_no_parts(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    for shape in ((1, 3), (1, 10), (1, 1000), (2, 5), (1, 4, 20), (3, 40, 7)):
        assert parts([drawn.normal(size=shape)]) == (), shape


def test_samples_together_show_a_part_that_each_of_them_might_have_by_chance() -> None:
    one = [np.array([[a, b, 0.02 * c]]) for a, b, c in np.random.default_rng(0).normal(1.0, 1.0, (8, 3))]
    assert parts(one[:1]) == ()
    assert [str(part) for part in parts(one)] == ["column 2 of axis 1"]
    assert parts([one[0] * factor for factor in range(1, 9)]) == (), "copies show no more than one of them"


def test_a_batch_of_copies_has_no_parts_by_chance() -> None:
    drawn = np.random.default_rng(0)
    for copies, length in ((8, 10), (8, 1000), (2, 800)):
        assert parts([np.tile(drawn.normal(size=length), (copies, 1))]) == ()


@pytest.mark.parametrize("seed", range(5))
def test_small_means_of_similar_images_are_the_tail_of_one_distribution(seed: int) -> None:
    """Scores of 1,000 classes for images that a network hardly tells apart: each class has a mean."""
    rng = np.random.default_rng(seed)
    means = rng.standard_normal(1000)
    assert parts([means + 0.003 * rng.standard_normal((32, 1000))]) == ()
    means[::4] *= 0.01  # a quarter of the classes, far below the others
    assert parts([means + 0.003 * rng.standard_normal((32, 1000))])


def test_columns_in_turn_are_parts() -> None:
    drawn, kinds = np.random.default_rng(0), np.array([1.0, 1.0, 1.0, 0.01, 0.01])
    (part,) = parts([(drawn.uniform(5.0, 250.0, (33, 5)) * kinds).reshape(1, 165)])
    assert str(part) == "66 columns from 3 to 164 of axis 1"


def test_axes_of_other_lengths_and_samples_without_a_part() -> None:
    long, short = scaled((1, 84, 100), 1, np.r_[[300.0] * 4, [0.2] * 80]), HEAD[:, :3]
    (part,) = parts([long, short])
    assert str(part) == "rows 4 to 83 of axis 1" and part.of(short).size == 0


def judged(expected: Array, actual: Array, kind: Probabilities | None = None) -> list[OutputComparison]:
    own, kinds = {"y": parts([expected])}, {"y": kind} if kind else {}
    return [one for one, _ in compare({"y": expected}, {"y": actual}, FP16, kinds=kinds, parts=own)]


def fp16(array: Array) -> Array:
    """As FP16 arithmetic leaves it: three roundings of every value."""
    for factor in (1.3, 0.7, 1.0 / 0.91):
        with np.errstate(over="ignore"):
            array = (array * np.float32(factor)).astype(np.float16).astype(np.float32)
    return array


def put(array: Array, at: Any, value: Any) -> Array:
    other = array.copy()
    other[at] = value
    return other


@pytest.mark.parametrize(
    ("expected", "broken"),
    [
        pytest.param(HEAD, lambda x: put(x, np.s_[:, 4:], 1e-4), id="scores destroyed"),
        pytest.param(PADDED.astype(np.float32), lambda x: put(x, np.s_[..., 4], x[..., 4] / 2), id="halved"),
        pytest.param(CLIPS, lambda x: put(x, 1, 0.0), id="a quiet clip is silent"),
        pytest.param(masked(-1e4), lambda x: np.where(x < -1e3, x, -x), id="logits negated beside a mask"),
        pytest.param(
            np.array([[640.0, 480.0, 0.9]], np.float32),
            lambda x: put(x, np.s_[0, 2], 0.1),
            id="an entry of a vector",
        ),
    ],
)
def test_a_part_fails_by_itself(expected: Array, broken: Callable[[Array], Array]) -> None:
    right = judged(expected, fp16(expected))
    assert len(right) > 1 and all(one.passed for one in right)
    whole, *own = judged(expected, broken(expected))
    assert whole.passed or whole.relative_l2 < 0.05
    assert not all(one.passed for one in own) and max(one.relative_l2 for one in own) > 0.4


def test_masks_are_compared_by_position() -> None:
    expected = np.tile(masked(-1e9), (1000, 1)).astype(np.float32)
    moved = expected.copy()
    moved[:20][moved[:20] < -1e8] = 3.0
    assert judged(expected, moved)[1].relative_l2 == pytest.approx(0.005, rel=0.01), "20 of 4000 rows"


def test_masks_beyond_fp16_may_be_infinite() -> None:
    expected = masked(FLOOR)
    with np.errstate(over="ignore"):
        plain = expected.astype(np.float16).astype(np.float32)
    assert np.isinf(plain).any() and all(one.passed for one in judged(expected, plain))
    broken = [np.where(np.isinf(plain), np.inf, plain), np.where(expected > 2.0, -np.inf, plain)]
    assert not any(judged(expected, wrong)[0].finite for wrong in broken), "of the other sign, or no mask"


def test_rounding_noise_of_a_larger_computation_passes() -> None:
    """A dead class at 1e-6 beside others: half of FP16's smallest step is 3 % of it."""
    scores = scaled((1, 8, 500), 1, np.array([0.3] * 7 + [1e-6]))
    noisy = scores + np.where(np.arange(8) == 7, 2e-8, 0.0)[None, :, None] * np.sign(normal(1, 8, 500))
    dead = judged(scores, noisy)[1]
    assert dead.passed and dead.relative_l2 == 0.0 and dead.note == ROUNDING_NOISE
    assert not judged(scores, put(scores, np.s_[:, 7], 3e-6))[1].passed


def test_errors_of_a_few_scores_do_not_hide_in_the_rounding_of_all() -> None:
    """Ten of 8000 scores beside boxes are found: half of each is 1e-3, FP32's rounding of a box 6e-5."""
    found = put(np.full(HEAD.shape, 1e-6), np.s_[:, :4], HEAD[:, :4])
    found[0, 4:14, 0] = 2e-3
    halved = judged(found, put(found, np.s_[:, 4:], found[:, 4:] / 2))
    assert halved[0].passed and not halved[1].passed and halved[1].relative_l2 > 0.4


def test_a_tail_is_judged_by_its_use() -> None:
    """Scales that fall off without a step: rims of Gaussian maps change by more than their middle."""
    maps = np.exp(-((np.arange(64) - 32.0) ** 2) / 18.0)[None, :] * np.abs(normal(50, 64)).astype(np.float64)
    whole, *rims = judged(maps, maps * (1.0 + 0.02 * (maps < 0.05)))
    assert whole.passed and rims and all(one.passed for one in rims) and rims[0].relative_l2 > FP16
    assert not judged(maps, maps * (maps > 0.05))[1].passed


def test_scores_beside_boxes_pass_by_their_differences() -> None:
    scores = np.abs(HEAD) % 1.0
    expected = put(scores, np.s_[:, :4], HEAD[:, :4])
    kind = Probabilities("a Sigmoid", partly=True)
    dim = put(expected, np.s_[:, 4:], 0.3 * scores[:, 4:])
    nearly = put(dim, np.s_[:, 4:], dim[:, 4:] * 1.02)
    assert [one.passed for one in judged(dim, nearly)] == [True, False]
    assert [one.passed for one in judged(dim, nearly, kind)] == [True, True]
    assert not judged(dim, put(dim, np.s_[:, 4:], dim[:, 4:] * 1.2), kind)[1].passed


def test_places_and_classes_of_a_probability_map_in_which_nothing_is_found() -> None:
    """A page's margins are no part of a text detector's map, and a class below 0.01 is found by nobody."""
    page = np.where(np.arange(64)[:, None] < 40, 1e-4, np.abs(normal(64, 64)) % 1.0)[None, None]
    other = np.where(page < 1e-3, 1.5e-4, page)
    alone = Probabilities("a Sigmoid")
    assert [one.passed for one in judged(page, other)] == [True, False]
    assert [one.passed for one in judged(page, other, alone)] == [True]
    classes = np.concatenate([page, np.abs(normal(1, 1, 64, 64)) % 2e-3], axis=1)
    faint = put(classes, np.s_[:, 1], classes[:, 1] * 1.3)
    assert [one.passed for one in judged(classes, faint, alone)] == [True, True]
    assert not judged(classes, put(classes, np.s_[:, 1], 0.02), alone)[1].passed


@pytest.mark.parametrize(("entries", "quantile"), [(1, 2.58), (4, 1.82), (16, 1.41), (1000, 1.05)])
def test_few_entries_may_be_off_by_chance(entries: int, quantile: float) -> None:
    assert chance(entries) == pytest.approx(quantile, rel=0.03)


def test_whole_numbers_are_compared_by_slices() -> None:
    maps = np.zeros((40, 100, 100), bool)
    maps[:, 20:80, 20:80] = True
    maps[7] = False
    maps[7, :3, :3] = True
    frayed, lost = maps.copy(), maps.copy()
    frayed[3, 20, 20:40], frayed[7, 2, 2] = False, False
    lost[7] = False
    assert all(one.passed for one in judged(maps, frayed))
    whole, *slices = judged(maps, lost)
    assert whole.passed and not slices[0].passed and slices[0].note.startswith("slice 7 of axis 0 (")
    frayed[7] = maps[7]
    (line,) = part_lines(Check("emulation", True, (), outputs=(*judged(maps, frayed),)))
    whole_axis = "slice 3 of axis 0 (share of its entries that are not 0)"
    assert line == f"y: 5e-05, of its parts {whole_axis}: 0.0053", "axes without a wrong slice are left out"


def test_detections_count_parts_that_are_of_no_use() -> None:
    wrong = {"y": put(HEAD, np.s_[:, 4:], 1e-4)}
    assert detections({"y": HEAD}, wrong) == pytest.approx(1.0, abs=0.01)
    assert detections({"y": HEAD}, {"y": fp16(HEAD)}) < 1e-3
    rows = np.abs(PADDED[:, :200])
    assert detections({"y": rows}, {"y": rows[:, ::-1]}) < 1e-6, "a set"
    assert detections({"y": rows}, {"y": put(rows, np.s_[..., 4], 0.0)[:, ::-1]}) > 0.5


def test_a_search_sees_parts_as_its_judge_does() -> None:
    def metric(own: float) -> float:
        tf32 = put(HEAD, np.s_[:, 4:], HEAD[:, 4:] * (1.0 + own))
        other = put(HEAD, np.s_[:, 4:], HEAD[:, 4:] * 1.02)
        search = by_parts([{"y": HEAD}], lambda: [{"y": tf32}], 1.41, FP16, {}, parts_of([{"y": HEAD}]))
        return search.worst({"y": HEAD}, {"y": other})

    assert metric(0.0) == pytest.approx(0.02, rel=0.05)
    assert metric(0.01) == pytest.approx(0.02 * FP16 / 0.0145, rel=0.1)
    assert metric(0.02) < FP16
