"""rewriter beside AutoCast and others: every model, every variant, counted, emulated, built, run and timed.

    python models/build.py nafnet vit ... --full --samples 4 -o FOLDER
    python benchmarks/side_by_side.py prepare FOLDER WORK [NAME ...] [--python OTHER] [--jobs N]
    python benchmarks/side_by_side.py measure FOLDER WORK [NAME ...]
    python benchmarks/side_by_side.py report FOLDER WORK --json FILE

`prepare` needs no GPU: each tool makes its variant in a child process (benchmarks/variants.py), which is counted
(benchmarks/census.py) and emulated. `--python` is an interpreter with nvidia-modelopt and onnxconverter-common.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.preparation import prepare
from benchmarks.variants import VARIANTS

MODELS = (
    "nafnet",
    "vit",
    "vit_massive",
    "bert",
    "t5_encoder",
    "convnext",
    "swin",
    "rtdetr",
    "segformer",
    "whisper_encoder",
    "unet",
    "llama_block",
    "mobilenet_v2",
    "resnet",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("prepare", "measure", "report"))
    parser.add_argument("folder", type=Path, help="NAME.onnx beside NAME/0.npz, 1.npz ...")
    parser.add_argument("work", type=Path, help="where variants and what was measured of them are kept")
    parser.add_argument("names", nargs="*", help="models; default: all that the folder holds")
    parser.add_argument("--python", default=sys.executable, help="interpreter for the other tools")
    parser.add_argument("--variants", default=",".join(v for v in VARIANTS if v != "fix-accurate"))
    parser.add_argument("--accumulations", default="fp32", help="of the emulation: fp32, fp16 or both, by comma")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--limit", type=float, default=1800.0, metavar="SECONDS", help="for one tool")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = arguments.names or [n for n in MODELS if (arguments.folder / f"{n}.onnx").exists()]

    def one(name: str) -> None:
        prepare(
            arguments.folder.resolve() / f"{name}.onnx",
            arguments.folder.resolve() / name,
            arguments.work.resolve() / name,
            arguments.variants.split(","),
            arguments.python,
            [a for a in arguments.accumulations.split(",") if a],
            arguments.limit,
        )
        print(f"{name}: prepared", flush=True)

    if arguments.stage == "prepare":
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(one, names))


if __name__ == "__main__":
    main()
