"""Compares rewriter with AutoCast and others: every variant of every model is counted, emulated, built, run and timed.

    python models/build.py nafnet vit ... --full --samples 4 -o FOLDER
    python benchmarks/side_by_side.py prepare FOLDER WORK [NAME ...] [--python OTHER] [--jobs N]
    python benchmarks/side_by_side.py build FOLDER WORK [NAME ...] [--jobs N]
    python benchmarks/side_by_side.py measure FOLDER WORK [NAME ...]
    python benchmarks/side_by_side.py report FOLDER WORK [--python OTHER] --json FILE

`prepare` needs no GPU. Each tool makes its variant in a child process (benchmarks/variants.py). The variant is counted
(benchmarks/census.py) and emulated with FP16 sums. Tools get all samples but the first, on which outputs are compared.
`--python` is an interpreter with nvidia-modelopt and onnxconverter-common. `--variants fix-on-gpu` makes what `fix`
hands out on a machine with a GPU.

`build` needs TensorRT or TensorRT-RTX (which builds without a GPU), and `measure` needs a GPU. Both use the engines of
`rewriter verify` (docs/engines.md). All variants of a model are timed in turn in one process.

Every stage continues where it was stopped. To repeat a step, delete its files from WORK. A failure becomes a note, and
the rest continues.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.children import Limits
from benchmarks.collection import write
from benchmarks.comparison import Case
from benchmarks.measurement import build_all, builder, each, measure_case, runner
from benchmarks.preparation import Tools, prepare_all
from benchmarks.variants import CHECKED, VARIANTS
from rewriter.engines.this_machine import require
from rewriter.errors import RewriterError

ON_GPU = (CHECKED,)
"""Variants that need a GPU to be made."""

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
    parser.add_argument("stage", choices=("prepare", "build", "measure", "report"))
    parser.add_argument("folder", type=Path, help="folder of NAME.onnx and NAME/0.npz, 1.npz ...")
    parser.add_argument("work", type=Path, help="folder for the variants and their measurements")
    parser.add_argument("names", nargs="*", help="models; default: all in the folder")
    parser.add_argument("--python", default=sys.executable, help="interpreter for the other tools")
    parser.add_argument("--variants", default=",".join(v for v in VARIANTS if v not in ON_GPU))
    parser.add_argument(
        "--accumulations",
        default="fp16",
        help="sums in the emulation: fp16, as in engines; fp32; or both, separated by a comma",
    )
    parser.add_argument("--jobs", type=int, default=1, help="child processes at a time")
    parser.add_argument("--threads", type=int, default=2, help="of one child process")
    parser.add_argument(
        "--limit", type=float, default=1800.0, metavar="SECONDS", help="for one tool, emulation, build or run"
    )
    parser.add_argument("--memory", type=float, default=math.inf, metavar="GB", help="for one child process")
    parser.add_argument(
        "--engine", help="tensorrt, tensorrt-rtx, onnxruntime or onnxruntime-cuda; default: the GPU's"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = arguments.names or [n for n in MODELS if (arguments.folder / f"{n}.onnx").exists()]

    folder, work = arguments.folder.resolve(), arguments.work.resolve()
    cases = [Case(folder / f"{n}.onnx", folder / n, work / n) for n in names]
    limits = Limits(arguments.limit, arguments.memory, arguments.threads)
    tools = Tools(arguments.python, [a for a in arguments.accumulations.split(",") if a], limits)
    if arguments.stage == "prepare":
        prepare_all(cases, arguments.variants.split(","), tools, arguments.jobs)
    elif arguments.stage == "build":
        build_all(cases, arguments.engine or builder(), arguments.jobs, limits)
    elif arguments.stage == "measure":
        engine = require(arguments.engine) if arguments.engine else runner()
        each(cases, lambda case: measure_case(case, engine, limits))
    elif arguments.json is None:
        parser.error("report needs --json FILE")
    else:
        write(cases, arguments.python, arguments.json)


if __name__ == "__main__":
    try:
        main()
    except RewriterError as error:
        raise SystemExit(str(error)) from None
