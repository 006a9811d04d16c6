"""Warnings about data that a model's first layers do not expect: when they speak, and when they must not."""

from __future__ import annotations

import json
from pathlib import Path

import graphs
import numpy as np
import pytest
from typer.testing import CliRunner

import rewriter
from rewriter.cli import app
from rewriter.ir.model import Array, Model, save
from rewriter.runtime.expectations import input_expectations, unexpected

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (1, 3, 16, 16)).astype(np.float32)


def image_model(body: str, data: str = "float[1,3,16,16] x") -> Model:
    return graphs.graph(f"""
        g ({data}) => (float[1,4,16,16] y)
        <float[4,3,3,3] w = {{{", ".join(["0.1"] * 108)}}},
         float d = {{255.0}}, float s = {{0.00392156862}},
         float[3,1,1] mean = {{0.485, 0.456, 0.406}}, float[3,1,1] std = {{0.229, 0.224, 0.225}},
         float[3] one = {{1.0, 1.0, 1.0}}, float[3] zero = {{0.0, 0.0, 0.0}},
         float[3] m = {{110.0, 110.0, 110.0}}, float[3] v = {{4900.0, 4900.0, 4900.0}}> {{
            {body}
        }}""")


CONV = "y = Conv<pads = [1,1,1,1]>({}, w)"
PLAIN = image_model(CONV.format("x"))
DIVIDES = image_model("a = Div(x, d) b = Sub(a, mean) c = Div(b, std)" + CONV.format("c"))
MULTIPLIES = image_model("a = Mul(x, s)" + CONV.format("a"))
SUBTRACTS = image_model("b = Sub(x, mean) c = Div(b, std)" + CONV.format("c"))
BATCH_NORM = image_model("c = BatchNormalization(x, one, zero, m, v)" + CONV.format("c"))
BYTES = image_model("a = Cast<to = 1>(x) b = Div(a, d)" + CONV.format("b"), "uint8[1,3,16,16] x")
NHWC = image_model(
    "t = Transpose<perm = [0,3,1,2]>(x) b = Sub(t, mean) c = Div(b, std)" + CONV.format("c"),
    "float[1,h,w,c] x",
)
DYNAMIC = image_model(CONV.format("x"), "float[n,c,h,w] x")
TOKENS = graphs.graph("""
    g (int64[1,n] ids, int64[1,n] attention_mask) => (float[1,n,2] y)
    <float[8,2] table = {1.0,2.0,3.0,4.0,5.0,6.0,7.0,8.0,1.0,2.0,3.0,4.0,5.0,6.0,7.0,8.0},
     int64[1] last = {-1}> {
        e = Gather(table, ids)
        f = Cast<to = 1>(attention_mask)
        u = Unsqueeze(f, last)
        y = Mul(e, u)
    }""")

WARNED: dict[str, tuple[Model, dict[str, Array], str]] = {
    "divided twice": (DIVIDES, {"x": PIXELS / 255 / 255}, "divided by 255"),
    "divided already, graph scales": (MULTIPLIES, {"x": PIXELS / 255}, "divided by 255"),
    "not divided": (SUBTRACTS, {"x": PIXELS}, "be divided by 255 first"),
    "not divided, channels last": (
        NHWC,
        {"x": PIXELS.transpose(0, 2, 3, 1)},
        "be divided by 255 first",
    ),
    "BatchNormalization saw pixels": (BATCH_NORM, {"x": PIXELS / 255}, "BatchNormalization"),
    "bytes that were 0..1": (
        BYTES,
        {"x": (PIXELS / 255).astype(np.uint8)},
        "all values are 0|divided by 255",
    ),
    "channels last": (DYNAMIC, {"x": PIXELS.transpose(0, 2, 3, 1)}, "NHWC"),
    "NaN": (PLAIN, {"x": np.where(PIXELS > 250, np.nan, PIXELS)}, "NaN or infinite"),
    "constant": (PLAIN, {"x": np.ones_like(PIXELS)}, "all values are 1"),
    "out of the table": (TOKENS, {"ids": np.array([[1, 8]]), "attention_mask": np.array([[1, 1]])}, "8 rows"),
    "labels": (TOKENS, {"ids": np.array([[1, -100]]), "attention_mask": np.array([[1, 1]])}, "-100"),
    "no mask": (TOKENS, {"ids": np.array([[1, 2]]), "attention_mask": np.array([[7, 2]])}, "from 2 to 7"),
    "masked everywhere": (
        TOKENS,
        {"ids": np.array([[1, 2]]), "attention_mask": np.array([[0, 0]])},
        "masked",
    ),
}


@pytest.mark.parametrize(("model", "feeds", "text"), WARNED.values(), ids=WARNED.keys())
def test_a_conflict_is_reported(model: Model, feeds: dict[str, Array], text: str) -> None:
    found = unexpected(model, [feeds])
    assert len(found) == 1
    assert any(part in str(found[0]) for part in text.split("|"))
    assert found[0].hint


SILENT: dict[str, tuple[Model, dict[str, Array]]] = {
    "pixels into a division": (DIVIDES, {"x": PIXELS}),
    "a dark image": (DIVIDES, {"x": np.clip(PIXELS * 0.15, 0, 255)}),
    "0..1 into mean and deviation": (SUBTRACTS, {"x": PIXELS / 255}),
    "channels last": (NHWC, {"x": PIXELS.transpose(0, 2, 3, 1) / 255}),
    "bytes": (BYTES, {"x": PIXELS.astype(np.uint8)}),
    "pixels for BatchNormalization": (BATCH_NORM, {"x": PIXELS}),
    "pixels where nothing says otherwise": (PLAIN, {"x": PIXELS}),
    "normalised where nothing says otherwise": (PLAIN, {"x": (PIXELS - 120) / 60}),
    "random": (DYNAMIC, {"x": RNG.standard_normal((1, 3, 16, 16)).astype(np.float32)}),
    "ids and mask": (TOKENS, {"ids": np.array([[0, 7, 3]]), "attention_mask": np.array([[1, 1, 0]])}),
    "negative ids count from the end": (TOKENS, {"ids": np.array([[-1]]), "attention_mask": np.array([[1]])}),
}


@pytest.mark.parametrize(("model", "feeds"), SILENT.values(), ids=SILENT.keys())
def test_usual_data_is_not_reported(model: Model, feeds: dict[str, Array]) -> None:
    assert unexpected(model, [feeds]) == ()


def test_samples_that_are_all_the_same() -> None:
    assert "all 3 samples are the same" in str(unexpected(PLAIN, [{"x": PIXELS}] * 3)[0])
    assert unexpected(PLAIN, [{"x": PIXELS}, {"x": PIXELS + 1}]) == ()


RECURRENT = graphs.graph(
    """
    g (float[8,1,2] x, float[1,20] h, float[1,1,20] c) => (float[8,1,1,20] y)
    <float[1,80,2] w = {ZEROS2}, float[1,80,20] r = {ZEROS20}, int64[1] first = {0}> {
        i = Unsqueeze(h, first)
        y = LSTM<hidden_size = 20>(x, w, r, , , i, c)
    }""".replace("ZEROS20", ", ".join(["0.1"] * 1600)).replace("ZEROS2", ", ".join(["0.1"] * 160))
)
UNROLLED = graphs.graph("""
    g (float[1,20] x, float[n,20] h) => (float[1,20] y, float[n,20] after) {
        after = Tanh(h)
        y = Add(x, after)
    }""")


@pytest.mark.parametrize(
    ("model", "value", "suspected"),
    [
        pytest.param(RECURRENT, 0.0, [], id="a recurrent network starts with zeros"),
        pytest.param(RECURRENT, 1.0, ["h", "c"], id="and not with ones"),
        pytest.param(UNROLLED, 0.0, [], id="an output of its shape replaces it"),
        pytest.param(UNROLLED, 1.0, ["h"], id="ones there"),
    ],
)
def test_a_state_of_zeros_is_usual(model: Model, value: float, suspected: list[str]) -> None:
    shapes = {
        port.name: [d if isinstance(d, int) else 1 for d in port.shape or ()]
        for port in model.signature.inputs
    }
    samples = [
        {name: np.full(shape, value, np.float32) for name, shape in shapes.items()}
        | {"x": RNG.standard_normal(shapes["x"]).astype(np.float32)}
        for _ in range(2)
    ]
    assert [one.input for one in unexpected(model, samples)] == suspected


def test_the_constants_of_the_first_layers_are_read() -> None:
    (expected,) = input_expectations(NHWC)
    assert expected.layers is not None
    assert (expected.layers.channels, expected.layers.channel_axis) == (3, 3)
    np.testing.assert_allclose(expected.layers.factor, 1 / np.array([0.229, 0.224, 0.225]), rtol=1e-6)
    ids, mask = input_expectations(TOKENS)
    assert (ids.rows, ids.mask, mask.rows, mask.mask) == (8, False, None, True)


WARNED_OF = "the data may be prepared in another way than the model expects: input 'x'"


class TestWarnings:
    """`verify`, `fix` and `scan` tell of such data, and judge all the same."""

    UNDIVIDED, DIVIDED = {"x": PIXELS}, {"x": PIXELS / 255}

    def test_verify_and_scan_warn_and_pass(self) -> None:
        verified = rewriter.verify(
            SUBTRACTS.proto, SUBTRACTS.proto, inputs=self.UNDIVIDED, engine="emulation"
        )
        assert verified.passed
        assert any(WARNED_OF in text for text in verified.warnings)
        scanned = rewriter.scan(SUBTRACTS.proto, inputs=self.UNDIVIDED)
        assert any(WARNED_OF in text for text in scanned.warnings)

    def test_data_as_expected_and_random_data_get_no_warning(self) -> None:
        for inputs in (self.DIVIDED, None):
            verified = rewriter.verify(SUBTRACTS.proto, SUBTRACTS.proto, inputs=inputs, engine="emulation")
            fixed = rewriter.fix(SUBTRACTS.proto, inputs=inputs, build=False)
            assert not any(WARNED_OF in text for text in (*verified.warnings, *fixed.warnings))

    def test_terminal_and_json_of_fix_and_verify_show_it(self, tmp_path: Path) -> None:
        source, data = str(save(SUBTRACTS, tmp_path / "m.onnx")), str(tmp_path / "data.npz")
        out, told = str(tmp_path / "fixed.onnx"), tmp_path / "told.json"
        np.savez(data, **self.UNDIVIDED)  # type: ignore[arg-type]
        for arguments in (
            ["fix", source, "-o", out, "--no-build", "--report", str(told)],
            ["verify", source, out, "--engine", "emulation", "--json", str(told)],
        ):
            done = CliRunner().invoke(app, [*arguments, "--inputs", data])
            assert done.exit_code == 0, done.output
            assert WARNED_OF in " ".join(done.output.split())
            assert any(WARNED_OF in text for text in json.loads(told.read_text())["warnings"])
