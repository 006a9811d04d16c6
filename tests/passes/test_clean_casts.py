"""clean-casts: Casts that are removed, Casts that stay, and values that never change."""

import numpy as np
import pytest
from graphs import apply, graph, ops, run
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from rewriter.ir.model import Model, load
from rewriter.ir.model.schemas import embeds
from rewriter.passes.clean_casts import CleanCasts

F32, F16, BF16, F64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE
I8, U8, BOOL = TensorProto.INT8, TensorProto.UINT8, TensorProto.BOOL
I32, I64 = TensorProto.INT32, TensorProto.INT64


BYTES = """
g (uint8[1,4,4,3] x) => (float[1,3,2,4] y, REST) <int64[1] a = {0}, int64[1] b = {2}, int64[1] axis = {2}> {
    t = Transpose<perm = [0, 3, 1, 2]>(x) s = Slice(t, a, b, axis) c = Cast<to = 1>(s) y = Neg(c) OTHER }"""


def test_an_image_of_bytes_is_cast_before_it_is_moved() -> None:
    before = graph(BYTES.replace(", REST", "").replace("OTHER", ""))
    after, changes = apply(CleanCasts(), before)
    assert ops(after) == ["Cast", "Transpose", "Slice", "Neg"] and len(changes.changes) == 2
    feeds = {"x": np.arange(48, dtype=np.uint8).reshape(1, 4, 4, 3) * 5}
    np.testing.assert_array_equal(run(after, feeds)[0], run(before, feeds)[0])


def test_a_result_is_cast_to_bytes_after_it_is_moved_and_padded() -> None:
    before = graph("""
    g (float[2,3] x) => (uint8[N,M] y)
    <int64[2] n = {1, 2}, int64[4] pads = {0, 1, 2, 0}, uint8 white = {255}> {
        c = Cast<to = 2>(x) t = Transpose(c) s = Tile(t, n) y = Pad(s, pads, white) }""")
    after, changes = apply(CleanCasts(), before)
    assert ops(after) == ["Transpose", "Tile", "Pad", "Cast"] and len(changes.changes) == 3
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 3) * 40.7}
    np.testing.assert_array_equal(run(after, feeds)[0], run(before, feeds)[0])


def test_bytes_that_something_else_reads_stay_and_are_named() -> None:
    text = BYTES.replace("REST", "uint8[1,3,4,4] z").replace("OTHER", "z = Identity(t)")
    after, result = apply(CleanCasts(), graph(text))
    assert ops(after) == ["Transpose", "Cast", "Slice", "Neg", "Identity"]
    assert [(one.node, one.reason.split(":")[0]) for one in result.refusals] == [
        ("Transpose(t)", "t is UINT8, and not only read by one Cast")
    ]


WIDER = [(F16, F32), (BF16, F32), (F32, F64), (I8, F16), (I8, BF16), (I32, F64), (I32, I64)]
WIDER += [(BOOL, I8), (BOOL, F16)]
NOT_WIDER = [(F16, BF16), (BF16, F16), (I32, F32), (I64, F64), (F16, I64), (I8, U8), (U8, I8)]


@pytest.mark.parametrize(("narrow", "wide"), [(t, t) for t in (F16, BF16, I64)] + WIDER)
def test_embeds(narrow: int, wide: int) -> None:
    assert embeds(narrow, wide)


@pytest.mark.parametrize(("narrow", "wide"), NOT_WIDER + [(b, a) for a, b in WIDER])
def test_does_not_embed(narrow: int, wide: int) -> None:
    assert not embeds(narrow, wide)


TYPES = st.sampled_from([F16, F32, F64, BF16, I8, I32, I64, BOOL])


@given(st.sampled_from([F16, F32, F64, I8, I32, I64, BOOL]), st.lists(TYPES, min_size=1, max_size=6))
def test_no_chain_of_casts_changes_a_value(start: int, chain: list[int]) -> None:
    before = _chain(start, chain)
    after, _ = apply(CleanCasts(), before)
    _, second = apply(CleanCasts(), after)
    assert not second.changes
    assert ops(after).count("Cast") <= len(chain) + 1
    # within int8, so that no conversion is undefined; with fractions and ties where the type has them
    values = np.array([0, 1, -1, 2, 100, -128, 0.5, 1 / 3, -2.7, 1 + 2**-11, 1 + 2**-9, 1e-7])
    feeds = {"t0": values.astype(helper.tensor_dtype_to_np_dtype(start))}
    for a, b in zip(run(before, feeds), run(after, feeds), strict=True):
        np.testing.assert_array_equal(a, b)


def _chain(start: int, chain: list[int]) -> Model:
    """x, cast on and on, the last tensor made float64 so that NumPy can compare it."""
    casts = " ".join(f"t{i + 1} = Cast<to = {kind}>(t{i})" for i, kind in enumerate(chain))
    body = f"{{ {casts} d = Cast<to = {F64}>(t{len(chain)}) y = Neg(d) }}"
    source = graph(f"g (float[12] t0) => (double[12] y) {body}").whole()
    source.graph.input[0].type.tensor_type.elem_type = start
    return load(source)
