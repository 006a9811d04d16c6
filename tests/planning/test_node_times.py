"""Estimated times of single nodes, held to numbers that are written out here."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from math import ceil
from typing import Any

import pytest
from onnx import NodeProto, helper

from rewriter.hazards.planning.costs.node_times import base_us, is_attention, more_us, terms

Sizes = tuple[int, ...]


def node(op: str, *shapes: Sizes, **attributes: Any) -> tuple[NodeProto, dict[str, Sizes]]:
    """A node with the given shapes: of its inputs, then of its output `y`."""
    names = [f"t{place}" for place in range(len(shapes) - 1)]
    return helper.make_node(op, names, ["y"], **attributes), dict(zip([*names, "y"], shapes, strict=True))


WEIGHT: AbstractSet[str] = {"t1"}

TIMES = [
    pytest.param(node("MatMul", (4096, 4096), (4096, 4096), (4096, 4096)), 202.1, 1296.7, id="large MatMul"),
    pytest.param(node("MatMul", (128, 768), (768, 768), (128, 768)), 5.661, 6.189, id="one wave"),
    pytest.param(node("MatMul", (257, 64), (64, 8449), (257, 8449)), 3.582, 7.383, id="tiles are rounded up"),
    pytest.param(node("Gemm", (128, 768), (768, 768), (128, 768)), 5.661, 6.189, id="Gemm is a MatMul"),
    pytest.param(
        node("Conv", (1, 64, 56, 56), (64, 64, 3, 3), (1, 64, 56, 56)), 5.066, 3.909, id="Conv of 3 x 3"
    ),
    pytest.param(
        node("Conv", (1, 512, 14, 14), (512, 512, 1, 1), (1, 512, 14, 14)), 4.867, 1.512, id="Conv of 1 x 1"
    ),
    pytest.param(
        node("Conv", (1, 512, 56, 56), (512, 512, 3, 3), (1, 512, 56, 56)), 33.63, 53.42, id="large Conv"
    ),
    pytest.param(
        node("Conv", (1, 64, 56, 56), (64, 1, 3, 3), (1, 64, 56, 56), group=64), 3.28, 0.0, id="depthwise"
    ),
    pytest.param(
        node("LayerNormalization", (128, 768), (768,), (128, 768)), 5.319, 0.0819, id="LayerNormalization"
    ),
    pytest.param(node("Relu", (1, 64, 56, 56), (1, 64, 56, 56)), 0.2228, 0.1673, id="elementwise"),
    pytest.param(node("Transpose", (1, 64, 56, 56), (1, 56, 56, 64)), 0.0, 0.1673, id="a view"),
    pytest.param(node("DepthToSpace", (1, 64, 56, 56), (1, 16, 112, 112)), 0.2228, 0.1673, id="a shuffle"),
]


@pytest.mark.parametrize(("given", "fp16_us", "more_in_fp32_us"), TIMES)
def test_time_of_a_node(
    given: tuple[NodeProto, dict[str, Sizes]], fp16_us: float, more_in_fp32_us: float
) -> None:
    assert base_us(*given, WEIGHT) == pytest.approx(fp16_us, rel=1e-3)
    assert more_us(*given, WEIGHT) == pytest.approx(more_in_fp32_us, rel=1e-3)


@pytest.mark.parametrize("op", ["Relu", "MatMul", "LayerNormalization"])
def test_an_unknown_dimension_counts_as_64(op: str) -> None:
    weights = [(32, 32)] if op == "MatMul" else []
    known, sizes = node(op, (64, 32), *weights, (64, 32))
    unknown = {name: tuple(None if d == 64 else d for d in shape) for name, shape in sizes.items()}
    assert terms(known, unknown, WEIGHT) == terms(known, sizes, WEIGHT)


def test_the_products_of_a_large_attention_take_as_long_as_measured() -> None:
    scores = node("MatMul", (8, 12, 1024, 64), (8, 12, 64, 1024), (8, 12, 1024, 1024))
    values = node("MatMul", (8, 12, 1024, 1024), (8, 12, 1024, 64), (8, 12, 1024, 64))
    total = sum(base_us(*product, set(), attention=True) for product in (scores, values))
    assert total == pytest.approx(139.0, rel=5e-3)


@pytest.mark.parametrize(("rows", "ragged"), [(1024, 0.0), (1500, 0.5)])
def test_half_an_attention_of_unaligned_rows_is_ragged(rows: int, ragged: float) -> None:
    scores = node("MatMul", (12, rows, 64), (12, 64, rows), (12, rows, rows))
    assert terms(*scores, set(), attention=True) == {"attention": 12 * rows * rows * 64, "ragged": ragged}


def test_tiles_come_in_waves_of_all_multiprocessors() -> None:
    product = node("MatMul", (257, 64), (64, 8449), (257, 8449))
    assert terms(*product, WEIGHT)["waves"] == pytest.approx(64 * ceil(257 / 128) * ceil(8449 / 128) / 132)


WAVES = [
    pytest.param(node("MatMul", (2, 12000, 64), (64, 300), (2, 12000, 300)), 188 * 3, id="rows of a batch"),
    pytest.param(
        node("Conv", (1, 64, 112, 140), (512, 64, 1, 1), (1, 512, 112, 140)), 123 * 4, id="channels of a Conv"
    ),
    pytest.param(node("MatMul", (40000, 64), (64, 1), (40000, 1)), 313, id="one column"),
    pytest.param(node("MatMul", (64,), (64, 40000), (40000,)), 132, id="a vector: one wave"),
    pytest.param(node("MatMul", (128, 64), (64, 128), (128, 128)), 132, id="one tile: one wave"),
    pytest.param(node("MatMul", (0, 64), (64, 0), (0, 0)), 132, id="nothing: one wave"),
]


@pytest.mark.parametrize(("given", "tiles"), WAVES)
def test_tiles_are_of_128_rows_and_columns(given: tuple[NodeProto, dict[str, Sizes]], tiles: int) -> None:
    assert terms(*given, WEIGHT)["waves"] == pytest.approx(64 * tiles / 132)


CONVS = [
    pytest.param((8, 4, 1, 1), {"channels": 4.0}, id="a window of one element"),
    pytest.param((8, 4, 1, 2), {"depth": 8.0}, id="of two"),
    pytest.param((8, 4, 3, 1), {"depth": 12.0}, id="of three below each other"),
    pytest.param((8, 4, 3), {"depth": 12.0}, id="in one dimension"),
]


@pytest.mark.parametrize(("kernel", "depth"), CONVS)
def test_a_conv_is_priced_by_its_depth_or_its_channels(kernel: Sizes, depth: dict[str, float]) -> None:
    image = (9,) * (len(kernel) - 2)
    conv = node("Conv", (1, 4, *image), kernel, (1, 8, *image))
    found = terms(*conv, WEIGHT)
    (length,) = depth.values()
    count = 8 * 9 ** len(image) * length
    assert found == {"kernel": 1.0, "conv-products": count, "waves": length, **depth}


def test_the_products_of_a_depthwise_conv_do_not_count() -> None:
    conv = node("Conv", (1, 64, 9, 9), (64, 1, 3, 3), (1, 64, 9, 9), group=64)
    assert terms(*conv, WEIGHT) == {"kernel": 1.0, "conv-products": 0.0, "depth": 0.0, "waves": 0.0}


@pytest.mark.parametrize(
    ("rows", "ragged"),
    [
        pytest.param((64,), 0.0, id="a vector has no rows"),
        pytest.param((1500, 64), 0.5, id="a matrix"),
        pytest.param((3, 1504, 64), 0.0, id="a batch of aligned ones"),
    ],
)
def test_rows_of_an_attention_lie_along_the_last_axis_but_one(rows: Sizes, ragged: float) -> None:
    scores = node("MatMul", rows, (64, 32), (*rows[:-1], 32))
    assert terms(*scores, set(), attention=True)["ragged"] == ragged


def test_a_node_of_another_kind_costs_what_it_moves_and_norms_cost_a_kernel() -> None:
    relu, sizes = node("Relu", (3, 5), (3, 5))
    assert terms(relu, sizes, set()) == {"norm": 0.0, "moved": 30.0}
    total, shapes = node("Add", (3, 5), (5,), (3, 5))
    assert terms(total, shapes, WEIGHT) == {"norm": 0.0, "moved": 30.0}, "constants are not moved"
    for op in ("LayerNormalization", "ReduceMean"):
        norm, known = node(op, (3, 5), (3, 5))
        assert terms(norm, known, set()) == {"norm": 1.0, "moved": 30.0}
    assert terms(*node("Reshape", (3, 5), (2,), (5, 3)), WEIGHT) == {}


def test_a_product_of_unknown_rank_has_a_depth_of_64() -> None:
    product, _ = node("MatMul", (4, 4), (4, 4), (4, 4))
    assert terms(product, {"t0": None, "t1": (64, 128), "y": (128, 128)}, WEIGHT) == {
        "kernel": 1.0,
        "matmul": 1.0,
        "products": 128 * 128 * 64,
        "waves": 64.0,
    }


def test_only_products_of_two_computed_tensors_are_attention() -> None:
    product, _ = node("MatMul", (4, 4), (4, 4), (4, 4))
    assert is_attention(product, set())
    assert not is_attention(product, {"t0"}) and not is_attention(product, {"t1"})
    assert not is_attention(node("Gemm", (4, 4), (4, 4), (4, 4))[0], set())
