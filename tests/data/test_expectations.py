"""Warnings about data that a model's first layers do not expect: when they speak, and when they must not."""

import json
import re
from pathlib import Path

import graphs
import numpy as np
import pytest
from command_lines import invoke

import rewriter
from rewriter.ir.model import Array, Model, save
from rewriter.runtime.expectations import conflicts

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (1, 3, 16, 16)).astype(np.float32)


def image_model(body: str, data: str = "float[1,3,16,16] x") -> Model:
    return graphs.graph(f"""
        g ({data}) => (float[1,4,16,16] y)
        <float[4,3,3,3] w = {{{", ".join(["0.1"] * 108)}}},
         float d = {{255.0}}, float s = {{0.00392156862}}, float zero = {{0.0}}, float two = {{2.0}},
         float[3,1,1] mean = {{0.485, 0.456, 0.406}}, float[3,1,1] std = {{0.229, 0.224, 0.225}}> {{
            {body} }}""")


CONV = "y = Conv<pads = [1,1,1,1]>({}, w)"
PLAIN = image_model(CONV.format("x"))
DIVIDES = image_model("a = Div(x, d) b = Sub(a, mean) c = Div(b, std)" + CONV.format("c"))
MULTIPLIES = image_model("a = Mul(x, s)" + CONV.format("a"))
SUBTRACTS = image_model("b = Sub(x, mean) c = Div(b, std)" + CONV.format("c"))
INVERTS = image_model("b = Sub(two, x) c = Add(b, mean)" + CONV.format("c"))
BYTES = image_model("a = Cast<to = 1>(x) b = Div(a, d)" + CONV.format("b"), "uint8[1,3,16,16] x")
NHWC = image_model(
    "t = Transpose<perm = [0,3,1,2]>(x) b = Sub(t, mean) c = Div(b, std)" + CONV.format("c"),
    "float[1,h,w,c] x",
)
OTHERS = {
    "a division by 0": image_model("a = Div(x, zero)" + CONV.format("a")),
    "a division of a constant": image_model("a = Div(d, x)" + CONV.format("a")),
}
MASKED = graphs.graph("""
    g (float[1,1,4,5] attention_mask, float[1,1,4,5] x) => (float[1,1,4,5] y)
    <float one = {1.0}, float low = {-10000.0}> {
        i = Sub(one, attention_mask) m = Mul(i, low) y = Add(x, m) }""")

WARNED = [
    pytest.param(DIVIDES, PIXELS / 255 / 255, "divided by 255, or normalised", id="divided twice"),
    pytest.param(MULTIPLIES, PIXELS / 255, "divided by 255, or normalised", id="divided, graph scales"),
    pytest.param(SUBTRACTS, PIXELS, "be divided by 255 first", id="not divided"),
    pytest.param(SUBTRACTS, PIXELS - 300, "prepare the data as for training", id="negative"),
    pytest.param(INVERTS, PIXELS, r"Sub and Add: x \* \(-1\) \+ \(2.485, 2.456, 2.406\)", id="inverted"),
    pytest.param(NHWC, PIXELS.transpose(0, 2, 3, 1), "be divided by 255 first", id="channels last"),
    pytest.param(BYTES, (PIXELS > 128).astype(np.uint8), "divided by 255", id="bytes that were 0..1"),
    pytest.param(PLAIN, np.ones_like(PIXELS), "all values are 1", id="constant"),
]


@pytest.mark.parametrize(("model", "x", "text"), WARNED)
def test_a_conflict_is_reported(model: Model, x: Array, text: str) -> None:
    (found,) = conflicts(model, [{"x": x}])
    assert found.startswith("input 'x': ") and re.search(text, found)


SILENT = [
    pytest.param(DIVIDES, PIXELS, id="pixels into a division"),
    pytest.param(DIVIDES, np.clip(PIXELS * 0.15, 0, 255), id="a dark image"),
    pytest.param(SUBTRACTS, PIXELS / 255, id="0..1 into mean and deviation"),
    pytest.param(NHWC, PIXELS.transpose(0, 2, 3, 1) / 255, id="channels last"),
    pytest.param(BYTES, PIXELS.astype(np.uint8), id="bytes"),
    pytest.param(PLAIN, PIXELS, id="pixels where nothing says otherwise"),
    *(pytest.param(model, PIXELS, id=name) for name, model in OTHERS.items()),
]


@pytest.mark.parametrize(("model", "x"), SILENT)
def test_usual_data_is_not_reported(model: Model, x: Array) -> None:
    assert not list(conflicts(model, [{"x": x}]))


def test_masks_and_states_of_zeros_are_usual() -> None:
    feeds = {"attention_mask": np.eye(4, 5)[None, None], "x": np.zeros((1, 1, 4, 5))}
    assert not list(conflicts(MASKED, [feeds]))


WARNED_OF = "the data may be prepared in another way than the model expects: input 'x'"


class TestWarnings:
    """`verify`, `fix` and `scan` tell of such data, and judge all the same."""

    UNDIVIDED, DIVIDED = {"x": PIXELS}, {"x": PIXELS / 255}

    def test_data_as_expected_and_random_data_get_no_warning(self) -> None:
        for inputs in (self.DIVIDED, None):
            scanned = rewriter.scan(SUBTRACTS.proto, inputs=inputs)
            assert not any(WARNED_OF in text for text in scanned.warnings)

    def test_terminal_and_json_show_it(self, tmp_path: Path) -> None:
        source, data = str(save(SUBTRACTS, tmp_path / "m.onnx")), str(tmp_path / "data.npz")
        out, told = str(tmp_path / "fixed.onnx"), tmp_path / "told.json"
        np.savez(data, **self.UNDIVIDED)  # type: ignore[arg-type]
        for arguments in (
            ["fix", source, "-o", out, "--no-build", "--report", str(told)],
            ["verify", source, out, "--engine", "emulation", "--json", str(told)],
            ["scan", source, "--json", str(told)],
        ):
            done = invoke(*arguments, "--inputs", data)
            assert done.exit_code == 0, done.output
            assert WARNED_OF in " ".join(done.output.split())
            assert any(WARNED_OF in text for text in json.loads(told.read_text())["warnings"])
