"""What users have at hand: arrays, tuples, loaders, functions, batches, float64, photographs."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import pytest
from command_lines import invoke
from PIL import Image
from tables import values

import rewriter
from rewriter.base.errors import InputsError, UsageError
from rewriter.ir.model import Array, Model, save
from rewriter.runtime.expectations import conflicts
from rewriter.runtime.inputs import load_samples
from rewriter.runtime.inputs.arranging import MOST_ITEMS
from rewriter.runtime.inputs.images import Preprocessing, prepared

ONE = graphs.graph("g (float[1,3] x) => (float[1,3] y) { y = Relu(x) }")
FREE = graphs.graph("g (float[N,3] x) => (float[N,3] y) { y = Relu(x) }")
TWO = graphs.graph("g (float[1,3] x, int64[1] ids) => (float[1,3] y) { y = Relu(x) }")
PHOTO = graphs.graph("g (float[1,3,8,8] x) => (float[1,3,8,8] y) { y = Relu(x) }")
BATCH = np.arange(12, dtype=np.float32).reshape(4, 3)
IDS = np.arange(4)


class Dataset:
    """With a length and items, and no iterator, as PyTorch's data sets are."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return BATCH[index], index


def loader() -> Iterator[list[Any]]:
    yield [BATCH[:2], np.array([0, 1])]
    yield [BATCH[2:], np.array([1, 0])]


ROWS = [BATCH[i : i + 1] for i in range(4)]
FORMS: list[Any] = [
    pytest.param(BATCH, ONE, ROWS, id="a batch for a batch of one"),
    pytest.param({"x": BATCH}, ONE, ROWS, id="the same as a dict"),
    pytest.param(BATCH, FREE, [BATCH], id="a batch for a free axis"),
    pytest.param(BATCH[0], FREE, [BATCH[:1]], id="no batch axis"),
    pytest.param(list(BATCH), ONE, ROWS, id="a list of arrays without one"),
    pytest.param(loader(), ONE, ROWS, id="a loader with labels"),
    pytest.param(loader, ONE, ROWS, id="a function that makes one"),
    pytest.param(lambda: BATCH, ONE, ROWS, id="a function that returns an array"),
    pytest.param(Dataset(), ONE, ROWS, id="a data set"),
    pytest.param([{"x": BATCH}], ONE, ROWS, id="a list of dicts"),
    pytest.param([({"x": BATCH}, IDS)], ONE, ROWS, id="dicts with labels"),
    pytest.param(BATCH.astype(np.float64), ONE, ROWS, id="float64"),
    pytest.param((BATCH, IDS), TWO, ROWS, id="a tuple for two inputs"),
]


@pytest.mark.parametrize(("data", "model", "wanted"), FORMS)
def test_what_is_at_hand_becomes_samples(data: Any, model: Model, wanted: list[Any]) -> None:
    samples = load_samples(data, model)
    for _ in range(2):
        found = [feeds["x"] for feeds in samples]
        assert all(array.dtype == np.float32 for array in found)
        assert [array.tolist() for array in found] == [array.tolist() for array in wanted]


def test_tensors_with_gradients_are_arrays() -> None:
    torch = pytest.importorskip("torch")
    samples = load_samples([torch.tensor(BATCH, requires_grad=True)], ONE)
    assert [feeds["x"].tolist() for feeds in samples] == [row.tolist() for row in ROWS]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(loader(), "items after the inputs of a sample are not used", id="labels"),
        pytest.param([({"x": BATCH}, IDS)], "items after the inputs", id="labels of a dict"),
        pytest.param([(BATCH[:1], {"boxes": IDS})], "items after the inputs", id="labels in a dict"),
        pytest.param(BATCH, "batches were split to the model's batch size", id="split"),
        pytest.param(BATCH[0], "a batch axis of size 1 was added to x", id="axis"),
        pytest.param(BATCH.astype(float), "input 'x' was cast from float64 to float32", id="cast"),
        pytest.param((row for row in [BATCH[:1]] * (MOST_ITEMS + 9)), "the first 256 items", id="many"),
    ],
)
def test_what_was_done_is_noted(data: Any, words: str) -> None:
    assert any(words in note for note in load_samples(data, ONE).notes)


def test_the_notes_reach_the_user() -> None:
    assert any("cast from float64" in w for w in rewriter.scan(ONE, inputs=BATCH.astype(float)).warnings)


@pytest.mark.parametrize(
    ("data", "model", "words"),
    [
        pytest.param(BATCH, TWO, "holds 1 array, the model has 2 inputs", id="too few"),
        pytest.param({"x": BATCH, "label": IDS}, ONE, "no input 'label'", id="an extra array"),
        pytest.param(np.zeros((5, 2), np.float32), ONE, "axis 1 must be 3, not 2", id="another shape"),
        pytest.param(IDS, graphs.graph("g (float[4] x) => (float[4] y) { y = Relu(x) }"), "int64", id="type"),
    ],
)
def test_what_does_not_fit_is_named(data: Any, model: Model, words: str) -> None:
    with pytest.raises(InputsError, match=words):
        load_samples(data, model)


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 12, 16, 3), np.uint8)
    for index, one in enumerate(pixels):
        Image.fromarray(one).save(tmp_path / f"{index}.png")
    return tmp_path


def test_a_folder_of_photographs_is_prepared(photographs: Path) -> None:
    steps = "scale=255,mean=0.5:0.4:0.3,std=0.2,order=BGR"
    found = [feeds["x"] for feeds in load_samples(photographs, PHOTO, image_preprocess=steps)]
    image = np.asarray(
        Image.open(photographs / "0.png").resize((8, 8), Image.Resampling.BILINEAR), np.float32
    )
    wanted = (image[..., ::-1] / 255 - np.array([0.5, 0.4, 0.3], np.float32)) / np.float32(0.2)
    assert [array.shape for array in found] == [(1, 3, 8, 8)] * 2
    np.testing.assert_allclose(found[0][0], wanted.transpose(2, 0, 1), rtol=1e-5, atol=1e-6)


def test_letterbox_keeps_the_ratio_and_crop_takes_the_centre(photographs: Path) -> None:
    port, path = PHOTO.signature.inputs[0], photographs / "0.png"
    boxed = prepared(path, port, Preprocessing.parse("size=8,fit=letterbox,pad=7"))[0]
    assert (boxed[:, 0] == 7).all() and (boxed[:, -1] == 7).all() and not (boxed[:, 1] == 7).all()
    cropped = prepared(path, port, Preprocessing.parse("size=12,crop=8"))[0]
    whole = np.asarray(Image.open(path), np.float32)
    np.testing.assert_array_equal(cropped, whole[2:10, 4:12].transpose(2, 0, 1))


def test_bytes_with_channels_last_are_pixels(photographs: Path) -> None:
    model = graphs.graph("g (uint8[1,12,16,3] x) => (float[1,12,16,3] y) { y = Cast<to = 1>(x) }")
    found = next(iter(load_samples(photographs, model, image_preprocess="")))["x"]
    np.testing.assert_array_equal(found[0], np.asarray(Image.open(photographs / "0.png")))
    free = graphs.graph("g (float[1,3,H,W] x) => (float[1,3,H,W] y) { y = Relu(x) }")
    with pytest.raises(InputsError, match="does not fix the size"):
        load_samples(photographs, free, image_preprocess="")
    (photographs / "0.png").write_text("no picture")
    with pytest.raises(InputsError, match="is it a photograph"):
        load_samples(photographs, model, image_preprocess="")


@values
def test_wrong_steps_are_named(steps: str, words: str, photographs: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)`image-preprocess`: .*" + words):
        rewriter.scan(PHOTO, inputs=photographs, image_preprocess=steps)


def test_photographs_without_steps_are_explained(photographs: Path) -> None:
    with pytest.raises(InputsError, match=r"(?s)photographs.*`image-preprocess` .*'size=256"):
        load_samples(photographs, PHOTO)
    spectrogram = graphs.graph("g (float[1,1,64,100] x) => (float[1,1,64,100] y) { y = Relu(x) }")
    with pytest.raises(InputsError, match="holds photographs") as caught:
        load_samples(photographs, spectrogram)
    assert caught.value.hint == "save what your program feeds the model with np.savez"


def test_without_pillow_the_error_says_the_remedy(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputsError, match=r"(?s)Pillow.*pip install pillow"):
        load_samples(photographs, PHOTO, image_preprocess="size=8")


def test_the_steps_are_recorded_and_the_next_command_repeats_them(photographs: Path, tmp_path: Path) -> None:
    model = tmp_path / "net.onnx"
    rewriter.save(
        graphs.graph("g (float[1,3,8,8] x) => (float[1,3,8,8] y) { a = Mul(x, x) y = Mul(a, x) }"), model
    )
    steps = ["--inputs", str(photographs), "--image-preprocess", "size=8,order=BGR"]
    report, page = tmp_path / "report.json", tmp_path / "report.html"
    for path in (report, page):
        done = invoke("scan", model, *steps, "--report", path)
    assert f"-o net.fixed.onnx {shlex.join(steps)}" in done.output
    data = json.loads(report.read_text())["data"]
    assert (data["path"], data["preprocess"]) == (str(photographs), "size=8,order=BGR")
    assert data["text"] == f"2 samples from {photographs} (size=8,order=BGR)"
    assert data["text"] in page.read_text()
    feeds = {"x": np.ones((1, 3, 8, 8), np.float32)}
    np.savez(tmp_path / "feeds.npz", x=feeds["x"])
    for other in (tmp_path / "feeds.npz", feeds):
        unused = load_samples(other, PHOTO, image_preprocess="size=8")
        assert not unused.source.preprocess and "size=8" not in unused.source.text
        assert any("is for a folder of photographs" in note for note in unused.notes)


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
