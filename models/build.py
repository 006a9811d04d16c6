"""Builds the case models: `python models/build.py NAME [--full] [--samples N] -o DIR`, `--all`, `--list`.

`python models/build.py synthetic --nodes 20000 -o DIR` generates a graph of that size for timing passes.

The small form of a case is committed in this folder. `--full` builds the deployed size, with the same seeds.
`--samples N` writes DIR/NAME/0.npz .. N-1.npz; without it, one DIR/NAME.npz is written. Building needs
`pip install torch transformers onnx onnxscript onnxruntime`; the committed files need none of them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # so that `models` imports when this file is run as a script

import onnx  # noqa: E402

from models.common import Built, clean, save_sample, to_bytes  # noqa: E402

# Case name -> module under models/, which has a function of that name with the argument `full: bool`.
MODULES: dict[str, str] = {
    "nafnet": "nafnet",
    "vit": "vision",
    "swin": "vision",
    "rtdetr": "detection",
    "vit_massive": "vision",
    "convnext": "vision",
    "mobilenet_v2": "vision",
    "resnet": "vision",
    "bert": "text",
    "t5_encoder": "text",
    "llama_block": "text",
    "mixed_casts": "handmade",
    "conv_clip": "handmade",
    "matmul_clip": "handmade",
    "mismatch": "handmade",
    "if_loop": "handmade",
    "local_function": "handmade",
    "group_norm": "convolutions",
    "qdq": "convolutions",
}

# Models of the benchmarks that have no committed form: they show what the cases show, at deployed sizes.
FULL_ONLY: dict[str, str] = {
    "segformer": "vision",
    "whisper_encoder": "speech",
    "unet": "unet",
    "esrgan": "upscaler",
    "crepe": "speech",
}


def build(name: str, full: bool = False, nodes: int = 5000) -> Built:
    """Builds and checks one case; raises KeyError for an unknown name, onnx.checker.ValidationError for a bad model."""
    where = {"synthetic": "synthetic", **MODULES, **FULL_ONLY}
    module = importlib.import_module(f"models.{where[name]}")
    built = module.synthetic(nodes) if name == "synthetic" else getattr(module, name)(full)
    clean(built.model)
    onnx.checker.check_model(built.model, full_check=True)
    return built


def write(name: str, out: Path, full: bool, samples: int, nodes: int) -> Path:
    """Builds one case into `out`; returns the path of its .onnx file."""
    built = build(name, full, nodes)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.onnx"
    path.write_bytes(to_bytes(built.model))
    if not samples:
        save_sample(out / f"{name}.npz", built.sample(0))
    else:
        (out / name).mkdir(exist_ok=True)
        for index in range(samples):
            save_sample(out / name / f"{index}.npz", built.sample(index))
    return path


def main() -> None:
    """Parses the command line and builds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases to build")
    parser.add_argument("--all", action="store_true", help="build every case")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument(
        "--full", action="store_true", help="deployed sizes instead of the committed small ones"
    )
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="write N samples into DIR/NAME/")
    parser.add_argument("--nodes", type=int, default=5000, metavar="N", help="size of `synthetic`")
    parser.add_argument("-o", "--out", type=Path, default=HERE, metavar="DIR", help="default: this folder")
    args = parser.parse_args()
    if args.list:
        print("\n".join([*MODULES, *FULL_ONLY]))
        return
    if args.out == HERE and (not_committed := {"synthetic", *FULL_ONLY} & set(args.names)):
        parser.error(f"not committed: {', '.join(sorted(not_committed))}; give -o DIR")
    unknown = [name for name in args.names if name not in {*MODULES, *FULL_ONLY, "synthetic"}]
    if unknown or not (args.names or args.all):
        parser.error(f"no such case: {', '.join(unknown)}" if unknown else "give a NAME, --all or --list")
    for name in MODULES if args.all else args.names:
        path = write(name, args.out, args.full, args.samples, args.nodes)
        print(f"{path.name}  {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
