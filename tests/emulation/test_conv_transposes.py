"""Emulated sums of ConvTransposes: rounded before and after the bias, unless an FP32 activation follows."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import graph, run

from rewriter.ir.model import Array, facts
from rewriter.runtime.emulation import emulation
from rewriter.runtime.figures.pair import relative_l2

CHANNELS, SIZE, LAYERS = 64, 14, 4
SILU = "s{n} = Sigmoid({x})\n {y} = Mul({x}, s{n})"
RELU = "{y} = Relu({x})"


def chain(activation: str, kernel: int, *, fp32: bool) -> str:
    """Layers of ConvTranspose with bias and activation, all FP16 but for the activations."""
    lines = []
    for n in range(LAYERS):
        out = f"a{n + 1}" if n + 1 < LAYERS else "y"
        pad = kernel // 2
        lines.append(f"t{n} = ConvTranspose<pads = [{pad},{pad},{pad},{pad}]>(a{n}, w{n}, b{n})")
        if fp32:
            lines.append(f"c{n} = Cast<to = 1>(t{n})\n {activation.format(n=n, x=f'c{n}', y=f'h{n}')}")
            lines.append(f"{out} = Cast<to = 10>(h{n})")
        else:
            lines.append(activation.format(n=n, x=f"t{n}", y=out))
    shape = f"float16[1,{CHANNELS},{SIZE},{SIZE}]"
    weights = "".join(
        f", float16[{CHANNELS},{CHANNELS},{kernel},{kernel}] w{n}, float16[{CHANNELS}] b{n}"
        for n in range(LAYERS)
    )
    return f"g ({shape} a0{weights}) => ({shape} y) {{ " + "\n".join(lines) + " }"


@pytest.mark.parametrize(
    ("activation", "kernel", "fp16", "fp32"),
    [
        pytest.param(RELU, 3, 4.95e-4, 4.02e-4, id="3x3 and Relu"),
        pytest.param(RELU, 1, 6.18e-4, 4.79e-4, id="1x1 and Relu"),
        pytest.param(SILU, 3, 8.30e-4, 5.53e-4, id="3x3 and SiLU"),
    ],
)
def test_errs_as_measured_on_an_h200(activation: str, kernel: int, fp16: float, fp32: float) -> None:
    """The figures are of 64 channels at 56x56 and of 256 at 56x56 (1x1) and 40x40 (SiLU).

    With FP32 activations the last layer was two kernels there, and rounded before its bias all the same.
    """
    rng = np.random.default_rng(0)
    scale = np.sqrt(2 / (CHANNELS * kernel * kernel))
    feeds = {"a0": rng.standard_normal((1, CHANNELS, SIZE, SIZE)).astype(np.float16)}
    for n in range(LAYERS):
        weight = rng.standard_normal((CHANNELS, CHANNELS, kernel, kernel)) * scale
        feeds |= {f"w{n}": weight.astype(np.float16)}
        feeds |= {f"b{n}": (rng.standard_normal(CHANNELS) * 0.3).astype(np.float16)}
    (exact,) = run(graph(chain(activation, kernel, fp32=False).replace("float16", "float")), feeds32(feeds))
    errors = []
    for wide in (False, True):
        model = graph(chain(activation, kernel, fp32=wide))
        (found,) = run(emulation(model, facts.infer(model), "fp16"), feeds)
        errors.append(relative_l2(exact, found))
    assert errors[0] == pytest.approx(fp16, rel=0.15)
    assert 0.7 * fp32 < errors[1] < fp32


@pytest.mark.parametrize("bias", ["b", '""'], ids=["a bias", "an empty one"])
def test_a_kernel_shape_need_not_be_given(bias: str) -> None:
    text = f"""
        g (type[1,8,16] x, type[8,4,3] w, type[4] b) => (type[1,4,16] y) {{
            y = ConvTranspose<pads = [1,1]>(x, w, {bias})
        }}"""
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal(shape).astype(np.float16)
        for name, shape in {"x": (1, 8, 16), "w": (8, 4, 3), "b": (4,)}.items()
    }
    (exact,) = run(graph(text.replace("type", "float")), feeds32(feeds))
    model = graph(text.replace("type", "float16"))
    (found,) = run(emulation(model, facts.infer(model), "fp16"), feeds)
    assert 1e-4 < relative_l2(exact, found) < 1e-3


def feeds32(feeds: dict[str, Array]) -> dict[str, Array]:
    return {name: value.astype(np.float32) for name, value in feeds.items()}
