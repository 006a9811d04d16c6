"""FP16 accumulators: errors as measured on a GPU, partial sums bit for bit, and every geometry of Conv."""

from itertools import product

import graphs
import numpy as np
import pytest
from tables import values

import rewriter
from rewriter.base import sandbox
from rewriter.ir.model import Array, Model
from rewriter.ir.plan import Plan
from rewriter.runtime.emulation import Accumulation, accumulate, emulation
from rewriter.runtime.emulation.accumulate import CHUNK, DOMAIN
from rewriter.runtime.engines.onnxruntime import on_cuda
from rewriter.runtime.metrics.pairwise_error import relative_l2
from rewriter.verification.expected import run_all


def emulated(
    source: Model, feeds: dict[str, Array], accumulation: Accumulation = "fp16", *, backwards: bool = False
) -> Array:
    (outputs,) = run_all(emulation(source, accumulation, backwards=backwards), [feeds])
    return next(iter(outputs.values()))


def split_nodes(source: Model) -> int:
    made = emulation(source, "fp16")
    return sum(n.domain == DOMAIN for g in [made.proto.graph] for n in g.node)


def calls(source: Model) -> set[str]:
    """The local functions that an emulation calls."""
    return {n.op_type for n in emulation(source, "fp16").proto.graph.node if n.domain == DOMAIN}


def low(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
@pytest.mark.parametrize(("depth", "measured"), [(768, 1.05e-3), (3072, 2.05e-3), (4096, 2.36e-3)])
def test_errs_as_measured_on_an_h200(op: str, depth: int, measured: float) -> None:
    source = graphs.graph(f"""
        g (float16[64,{depth}] x, float16[{depth},128] w) => (float16[64,128] y) {{ y = {op}(x, w) }}""")
    rng = np.random.default_rng(0)
    feeds = {"x": low(rng, 64, depth), "w": low(rng, depth, 128)}
    exact = feeds["x"].astype(np.float64) @ feeds["w"].astype(np.float64)
    assert relative_l2(exact, emulated(source, feeds)) == pytest.approx(measured, rel=0.05)
    assert relative_l2(exact, emulated(source, feeds, "fp32")) < 2.5e-4


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("depth", "rows", "columns"),
    [
        *((depth, 3, 4) for depth in (1, 15, 16, 17, 40, 333)),
        *((40, 2100, 80), (40, 70, 2100), (40, 3, 0), (40, 0, 4)),
    ],
)
def test_partial_sums_are_rounded_after_every_sixteen_products(
    depth: int, rows: int, columns: int, backwards: bool
) -> None:
    """Integers keep FP32 exact, so that the order within a chunk plays no part. 2100 rows or columns are
    3 tiles."""
    source = graphs.graph(f"""
        g (float16[2,R,{depth}] x, float16[2,{depth},C] w) => (float16[2,R,C] y) {{ y = MatMul(x, w) }}""")
    rng = np.random.default_rng(depth)
    shapes = (2, rows, depth), (2, depth, columns)
    x, w = (rng.integers(-40, 41, s).astype(np.float16) for s in shapes)
    expected = np.zeros((2, rows, columns), np.float16)
    starts = range(0, depth, CHUNK)
    for start in reversed(starts) if backwards else starts:
        part = np.s_[start : start + CHUNK]
        partial = x[..., part].astype(np.float32) @ w[:, part].astype(np.float32)
        expected = (expected.astype(np.float32) + partial).astype(np.float16)
    np.testing.assert_array_equal(emulated(source, {"x": x, "w": w}, backwards=backwards), expected)
    assert split_nodes(source) == (depth > CHUNK), "one chunk is a product as it is"


@pytest.mark.parametrize("tile", [0, accumulate.TILE], ids=["unfolded", "in boxes"])
@values
def test_conv_sums_every_product_once(
    channels: int,
    filters: int,
    kernel: tuple[int, int],
    group: int,
    stride: int,
    dilation: int,
    pad: int,
    tile: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With small integers all partial sums are exact in FP16: both accumulators agree to the bit."""
    monkeypatch.setattr(accumulate, "TILE", tile)
    height, width = kernel
    source = graphs.graph(f"""
        g (float16[2,{channels},16,17] x, float16[{filters},{channels // group},{height},{width}] w,
           float16[{filters}] b) => (float16[n,c,h,v] y) {{
            y = Conv<strides = [{stride},{stride}], dilations = [{dilation},{dilation}],
                     pads = [{pad},{pad - pad // 2},{pad},{pad}], group = {group}>(x, w, b)
        }}""")
    rng = np.random.default_rng(0)
    shapes = {"x": (2, channels, 16, 17), "w": (filters, channels // group, *kernel), "b": (filters,)}
    feeds: dict[str, Array] = {n: rng.integers(-2, 3, s).astype(np.float16) for n, s in shapes.items()}
    assert split_nodes(source) == 1
    exact = emulated(source, feeds, "fp32")
    for backwards in (False, True):
        np.testing.assert_array_equal(emulated(source, feeds, backwards=backwards), exact)


@pytest.mark.parametrize("tile", [0, accumulate.TILE], ids=["unfolded", "in boxes"])
@pytest.mark.parametrize("dims", ["64,8", "64,4,4", "64,4,4,4"], ids=["1-D", "2-D", "3-D"])
def test_conv_of_any_rank_rounds_partial_sums(dims: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulate, "TILE", tile)
    spatial = dims.count(",")
    kernel = ",".join(["1"] * spatial)
    source = graphs.graph(f"""
        g (float16[1,{dims}] x, float16[1,64,{kernel}] w) => (float16[1,1,{dims[3:]}] y) {{
            y = Conv(x, w) }}""")
    sizes = [int(d) for d in dims.split(",")]
    x = np.ones((1, *sizes), np.float16)
    x[:, 0] = 2048
    x[:, 16:] = 0.0625
    feeds = {"x": x, "w": np.ones((1, 64, *[1] * spatial), np.float16)}
    found = emulated(source, feeds).flat[0]
    assert found == 2064.0, "2048 + 15 ties to 2064, and three times 1, half the spacing there, is lost"
    assert emulated(source, feeds, "fp32").flat[0] == 2066.0


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_large_conv_is_unfolded_in_strips_to_the_same_bits(
    stride: int, backwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result has more elements than a tile, in two images."""
    source = graphs.graph(f"""
        g (float16[2,20,64,65] x, float16[96,20,3,3] w) => (float16[2,C,H,W] y) {{
            y = Conv<strides = [{stride},1], pads = [1,1,1,1]>(x, w) }}""")
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {"x": low(rng, 2, 20, 64, 65), "w": low(rng, 96, 20, 3, 3)}
    unfolded = emulated(source, feeds, backwards=backwards)
    assert calls(source) == {"UnfoldedConv"}
    monkeypatch.setattr(accumulate, "TILE", 2**30)
    assert calls(source) == {"Conv"}
    np.testing.assert_array_equal(unfolded, emulated(source, feeds, backwards=backwards))


GEMM = """
    g (float16[{x}] x, float16[{w}] w, float16[3] c) => (float16[2,3] y) {{
        y = Gemm<transA = {a}, transB = {b}>(x, w, c) }}"""


@pytest.mark.parametrize("cuda", [False, True])
def test_only_a_processor_gets_tiles(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "inside", False)  # a worker has no GPU
    model = graphs.graph(
        "g (float16[8,256,64] x, float16[64,128] w) => (float16[8,256,128] y) { y = MatMul(x, w) }"
    )
    with on_cuda(cuda):
        assert calls(model) == {"MatMul" if cuda else "TiledMatMul"}


@pytest.mark.parametrize(("a", "b"), list(product((0, 1), (0, 1))))
def test_gemm_keeps_its_attributes(a: int, b: int) -> None:
    source = graphs.graph(GEMM.format(x="20,2" if a else "2,20", w="3,20" if b else "20,3", a=a, b=b))
    rng = np.random.default_rng(1)
    shapes = {p.name: tuple(d for d in p.shape or () if isinstance(d, int)) for p in source.signature.inputs}
    feeds: dict[str, Array] = {n: rng.integers(-3, 4, s).astype(np.float16) for n, s in shapes.items()}
    np.testing.assert_array_equal(emulated(source, feeds), emulated(source, feeds, "fp32"))


@pytest.mark.parametrize(("text", "opset", "split"), graphs.cases("emulation/accumulate.txt"))
def test_products_that_sum_in_fp16(
    text: str, opset: str, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chunk in ("CHUNK", "FUSED_CHUNK"):
        monkeypatch.setattr(accumulate, chunk, 1)  # the graphs are small
    source = graphs.graph(text, opset=int(opset))
    assert split_nodes(source) == int(split)
    same = emulation(source, "fp16").same_as(emulation(source))
    assert same is (split == "0")


EPILOGUE = """
    g (float16[64,{depth}] x, float16[{depth},128] w, float[128] b) => (float16[64,128] y) {{
        m = {op}(x, w)
        c = Cast<to = 1>(m) a = Add(c, b) y = Cast<to = 10>(a) }}"""


@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
@pytest.mark.parametrize("depth", [768, 3072])
def test_an_fp32_bias_leaves_the_final_rounding_alone(op: str, depth: int) -> None:
    """Measured on an H200: 2.07e-4 at both depths."""
    rng = np.random.default_rng(0)
    x, w = low(rng, 64, depth), (rng.standard_normal((depth, 128)) / np.sqrt(depth)).astype(np.float16)
    b = rng.standard_normal(128).astype(np.float32)
    source = graphs.with_weights(EPILOGUE.format(op=op, depth=depth), {"w": w, "b": b})
    exact = x.astype(np.float64) @ w.astype(np.float64) + b
    both: tuple[Accumulation, ...] = ("fp16", "fp32")
    for accumulation in both:
        error = relative_l2(exact, emulated(source, {"x": x}, accumulation))
        assert error == pytest.approx(2.07e-4, rel=0.03)


ATTENTION = """
    g (float16[1,2,{tokens},64] q, float16[1,2,64,{tokens}] k, float16[1,2,{tokens},64] v)
        => (float16[1,2,{tokens},64] y) <float[1] f = {{0.125}}, float16[1] h = {{12288}}> {{
        m = MatMul(q, k)
        {softmax}
        y = MatMul(p, v) }}"""
SOFTMAX = {
    "fp16": "s = Mul(m, h)\n p = Softmax<axis = -1>(s)",
    "alone": "s = Mul(m, h)\n t = Cast<to = 1>(s)\n u = Softmax<axis = -1>(t)\n p = Cast<to = 10>(u)",
    "scaled": "t = Cast<to = 1>(m)\n s = Mul(t, f)\n u = Softmax<axis = -1>(s)\n p = Cast<to = 10>(u)",
}


@values
def test_attention_errs_as_measured_on_an_h200(tokens: int, softmax: str, measured: float) -> None:
    text = ATTENTION.format(tokens=tokens, softmax=SOFTMAX[softmax])
    rng = np.random.default_rng(0)
    q, v = low(rng, 1, 2, tokens, 64), low(rng, 1, 2, tokens, 64)
    k = low(rng, 1, 2, 64, tokens)
    scores = q.astype(np.float64) @ k.astype(np.float64) / 8
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    exact = shares / shares.sum(-1, keepdims=True) @ v.astype(np.float64)
    found = emulated(graphs.graph(text), {"q": q, "k": k, "v": v})
    assert relative_l2(exact, found) == pytest.approx(measured, rel=0.3)


def test_a_subgraphs_products_accumulate_in_fp16_too() -> None:
    source = graphs.graph("""
        g (float16[2,48] x, float16[48,2] w, bool c) => (float16[2,2] y) {
            y = If(c) <
                then_branch = t () => (float16[2,2] p) { p = MatMul(x, w) },
                else_branch = e () => (float16[2,2] q) { a = MatMul(x, w)\n q = Neg(a) }
            >
        }""")
    x = np.zeros((2, 48), np.float16)
    x[:, [0, 16, 32]] = 60000, 60000, -60000
    feeds: dict[str, Array] = {"x": x, "w": np.ones((48, 2), np.float16)}
    for branch, expected in ((True, np.inf), (False, -np.inf)):
        assert emulated(source, {**feeds, "c": np.asarray(branch)})[0, 0] == expected


ONES = ", ".join(["1.0"] * 96)
PEAK = f"g (float[2,48] x) => (float[2,2] y) <float[48,2] w = {{{ONES}}}> {{ m = MatMul(x, w) y = Relu(m) }}"


@pytest.mark.parametrize(("accumulation", "passed"), [("fp32", True), ("fp16", False)])
def test_the_verdict_sees_partial_sums_overflow(accumulation: Accumulation, passed: bool) -> None:
    """Every tensor is in range, and 90000 comes up in between; the rules would keep the product in FP32."""
    x = np.zeros((2, 48), np.float32)
    x[:, [0, 1, 2, 16]] = 20000, 20000, 20000, 30000
    x[:, [32, 33]] = -30000, -30000
    result = rewriter.fix(
        graphs.graph(PEAK).whole(),
        inputs={"x": x},
        build=False,
        skip=("simplify",),
        plan=Plan("fp16"),
        accumulation=accumulation,
    )
    assert result.verdict is not None and result.verdict.passed is passed


@values
def test_few_channels_err_as_measured_on_an_h100(
    channels: int, filters: int, size: int, measured: float
) -> None:
    kernel = f"float16[{filters},{channels},{size},{size}]"
    source = graphs.graph(
        f"g (float16[1,{channels},40,40] x, {kernel} w) => (float16[N,C,H,W] y) {{ y = Conv(x, w) }}"
    )
    rng = np.random.default_rng(0)
    feeds = {"x": low(rng, 1, channels, 40, 40), "w": low(rng, filters, channels, size, size)}
    error = relative_l2(emulated(source, feeds, "fp32"), emulated(source, feeds))
    assert np.hypot(error, 2.1e-4) == pytest.approx(measured, rel=0.3)  # and one rounding of the result
