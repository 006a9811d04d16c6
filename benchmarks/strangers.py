"""Networks that no rule was made for: `fix`, `scan` and `verify` of them, and an independent judge of what they say.

    python benchmarks/strangers.py FOLDER [NAME ...]      # needs PyTorch; FOLDER/strangers.json keeps the rows

Each network of strangers_networks.py is exported with three samples. Plain FP16, a file with every float in FP16, is judged by
strangers_judge.py, and so is the file of `fix`. A row is wrong if `fix` verified what the judge has beyond 2 %, if it did
not verify a network that is right in plain FP16, or if `scan` and `verify` think otherwise of plain FP16 than the judge.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import onnx
import strangers_judge as judge
import torch
from onnx import AttributeProto, GraphProto, TensorProto, numpy_helper
from strangers_networks import STRANGERS, Stranger
from typer.testing import CliRunner

from rewriter.cli import app

SAMPLES = 3
RIGHT, WRONG = 5e-3, 2e-2
"""Errors of the worst part up to which a result is right, and from which it is wrong."""

TRACED = ("lstm", "gru", "whisper")
"""Parts of names of networks that only PyTorch's older exporter writes as one operator."""


def export(network: Stranger, folder: Path) -> tuple[Path, Path]:
    """Writes the network and its samples."""
    path, data = folder / f"{network.name}.onnx", folder / f"{network.name}_in"
    samples = [network.sample(number) for number in range(SAMPLES)]
    names = [f"x{index}" for index in range(len(samples[0]))]
    options: dict[str, Any] = {"dynamo": True, "external_data": False, "verbose": False}
    if network.dynamic or any(part in network.name for part in TRACED):
        axes = dict(zip(names, network.dynamic, strict=False))
        options = {"dynamo": False, "dynamic_axes": axes, "opset_version": 17}
    with torch.no_grad():
        torch.onnx.export(network.module, samples[0], path, input_names=names, **options)
    data.mkdir(exist_ok=True)
    for number, sample in enumerate(samples):
        np.savez(data / f"{number}.npz", **{n: t.numpy() for n, t in zip(names, sample, strict=True)})
    return path, data


def plain(path: Path, out: Path) -> Path:
    """Writes the model with every float tensor in FP16."""
    model = onnx.load(path)
    _halve(model.graph)
    onnx.save(model, out)
    return out


def _halve(graph: GraphProto) -> None:
    wide = (TensorProto.FLOAT, TensorProto.DOUBLE)

    def low(tensor: TensorProto) -> None:
        if tensor.data_type in wide:
            with np.errstate(over="ignore"):
                array = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    del graph.value_info[:]
    for tensor in graph.initializer:
        low(tensor)
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in wide:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for node in graph.node:
        for item in node.attribute:
            if item.type == AttributeProto.GRAPH:
                _halve(item.g)
            elif item.type == AttributeProto.TENSOR:
                low(item.t)
            elif item.name in ("to", "dtype") and item.i in wide:
                item.i = TensorProto.FLOAT16


def call(*words: str | Path) -> tuple[int, str]:
    """The exit code of a command, and its first line."""
    done = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "200"})
    return done.exit_code, next(iter(done.stdout.splitlines()), "")


def worst(
    network: Stranger, original: Path, other: Path, data: Path, *, as_plain: bool = False
) -> float | None:
    """The largest error of a part by the judge; None if it cannot run the model."""
    models, largest = [onnx.load(path) for path in (original, other)], 0.0
    for file in sorted(data.glob("*.npz")):
        sample = dict(np.load(file))
        try:
            exact = judge.run(models[0], sample, emulate=False)
            found = judge.errors(exact, judge.run(models[1], sample, plain=as_plain), network.parts)
        except Exception as error:
            warnings.warn(f"{network.name}: {error}", stacklevel=1)
            return None
        largest = max(largest, *(judge.WRONG if np.isnan(each) else each for each in found))
    return largest


def row(network: Stranger, folder: Path) -> dict[str, Any]:
    """What each command says of a network, beside the judge."""
    path, data = export(network, folder)
    fixed, given = folder / f"{network.name}.fixed.onnx", ["--inputs", data]
    fixed.unlink(missing_ok=True)
    code, ending = call("fix", path, "-o", fixed, *given, *network.options)
    found: dict[str, Any] = {
        "drawn as": network.kind,
        "plain": worst(network, path, path, data, as_plain=True),
        "fix": code,
        "ending": ending.replace(str(folder) + "/", ""),
        "scan": call("scan", path, *given, "--fail-on", "error")[0],
    }
    if fixed.exists():
        found["fixed"] = worst(network, path, fixed, data)
        found["verify"] = call("verify", path, fixed, *given, *network.options)[0]
    half = plain(path, folder / f"{network.name}.plain.onnx")
    found["verify of plain FP16"] = call("verify", path, half, *given, "--engine", "emulation")[0]
    return found | {"wrong": faults(found)}


def faults(found: dict[str, Any]) -> list[str]:
    """What the commands say that is not so."""
    verified = found["fix"] == 0 and not found["ending"].startswith(("Emulated", "Checked"))
    error, drawn = found["plain"], found["drawn as"]
    wrong = []
    if verified and (found.get("fixed") or 0.0) > WRONG:
        wrong.append("fix verified a wrong result")
    if drawn != "refused" and error is not None and error <= RIGHT and not verified:
        wrong.append("fix did not verify a network that is right in plain FP16")
    if found["fix"] == 3 and found["scan"] == 0:
        wrong.append("scan does not name what fix refuses")
    if drawn == "refused" or error is None or RIGHT < error < WRONG:
        return wrong
    if (found["scan"] == 0) is (error >= WRONG):
        wrong.append("scan")
    if found["verify of plain FP16"] in (0, 1) and (found["verify of plain FP16"] == 0) is (error >= WRONG):
        wrong.append("verify of plain FP16")
    return wrong


def main(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "strangers.json"
    rows = json.loads(out.read_text()) if out.exists() else {}
    for network in STRANGERS:
        if network.name in names or not (names or network.name in rows):
            try:
                rows[network.name] = row(network, folder)
            except Exception as error:  # an exporter's
                print(f"{network.name}: not exported: {str(error).splitlines()[0][:100]}", flush=True)
                continue
            print(network.name, json.dumps(rows[network.name]), flush=True)
            out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()), sys.argv[2:])
