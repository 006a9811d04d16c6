"""Shared by all cases: seeds, natural-looking images, the two exporters of torch, cleaning and saving.

Only `export_*` and `calibrate_batch_norms` need torch; they import it when called.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

Sample = dict[str, np.ndarray]

# Mean and standard deviation of ImageNet's RGB channels for pixels in 0..1 (torchvision's documented preprocessing).
IMAGENET_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
IMAGENET_STD = np.array([0.229, 0.224, 0.225], np.float32)

# The newest IR version that every ONNX Runtime since 1.18 loads.
IR_VERSION = 10


@dataclass(frozen=True)
class Built:
    """One built case: the model, and `sample(i)`, which returns the i-th input sample (name -> array, batch included)."""

    model: onnx.ModelProto
    sample: Callable[[int], Sample]


def rng_for(case: str, index: int = 0) -> np.random.Generator:
    """A random generator that depends only on the case's name and the sample's index."""
    return np.random.default_rng([*case.encode(), index])


def natural_image(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """An RGB image, float32 [1, 3, height, width] in 0..1, whole multiples of 1/255.

    Photographs have an amplitude spectrum of about 1/f (Field 1987). Noise of that spectrum has the smooth areas and the
    correlated channels that white noise lacks. Decoded pictures have 8 bits, too, and rounded ones compress well.
    """
    fy, fx = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]
    falloff = 1 / np.maximum(np.hypot(fy, fx), 1 / max(height, width)) ** 1.2
    planes = [
        np.fft.irfft2(np.fft.rfft2(rng.standard_normal((height, width))) * falloff, (height, width))
        for _ in range(4)
    ]
    image = np.stack([planes[0] + 0.4 * plane for plane in planes[1:]])
    image = 0.5 + 0.2 * (image - image.mean()) / image.std()
    return (np.round(image.clip(0, 1) * 255) / 255).astype(np.float32)[None]


def imagenet_normalised(image: np.ndarray) -> np.ndarray:
    """Normalises float32 [N, 3, H, W] in 0..1 as for ImageNet classifiers (about -2.1 to 2.6)."""
    return ((image - IMAGENET_MEAN[:, None, None]) / IMAGENET_STD[:, None, None]).astype(np.float32)


def image_samples(case: str, name: str, size: int, normalised: bool = True) -> Callable[[int], Sample]:
    """A sampler of square images for the input `name`."""

    def sample(index: int) -> Sample:
        image = natural_image(rng_for(case, index), size, size)
        return {name: imagenet_normalised(image) if normalised else image}

    return sample


# --- torch -------------------------------------------------------------------------------------------------------


def export_classic(
    module, sample: Mapping[str, np.ndarray], outputs: list[str], opset: int
) -> onnx.ModelProto:
    """Exports with torch's TorchScript-based exporter; `sample` names the positional inputs, in order."""
    import torch

    buffer = io.BytesIO()
    args = tuple(torch.from_numpy(array) for array in sample.values())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter(
            "ignore"
        )  # tracer warnings on constant shapes: shapes are meant to be constant here
        torch.onnx.export(
            module.eval(),
            args,
            buffer,
            dynamo=False,
            opset_version=opset,
            input_names=list(sample),
            output_names=outputs,
        )
    return onnx.load_model_from_string(buffer.getvalue())


def export_dynamo(
    module, sample: Mapping[str, np.ndarray], outputs: list[str], opset: int
) -> onnx.ModelProto:
    """Exports with torch.export and onnxscript; `sample` names the positional inputs, in order."""
    import torch

    args = tuple(torch.from_numpy(array) for array in sample.values())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module.eval(),
            args,
            dynamo=True,
            opset_version=opset,
            verbose=False,
            input_names=list(sample),
            output_names=outputs,
        )
    return program.model_proto


def calibrate_batch_norms(
    module, sample: Callable[[int], Sample], count: int, damped: tuple[str, ...] = ()
) -> None:
    """Gives every BatchNorm of a random network the statistics of its own inputs and scales near 1, as training would.

    Without this, activations of a deep random network shrink or grow by a factor per layer. The images are samples
    1000 to 1000 + count - 1, which are not used for measurements. A norm whose name ends with one of `damped`, the last
    of a residual branch, gets a tenth of the scale. Training starts those at 0 (Goyal et al., arXiv 1706.02677) and
    leaves them small. With undamped branches a deep network amplifies rounding noise more than any trained one.
    """
    import torch

    norms = [m for m in module.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # None: cumulative average, so one batch sets the statistics
        norm.reset_running_stats()
        torch.nn.init.normal_(norm.weight, mean=1.0, std=0.1)
        torch.nn.init.normal_(
            norm.bias, mean=1.0, std=0.1
        )  # mostly the linear side of ReLU: rounding noise does not grow
    with torch.no_grad():
        for name, norm in module.named_modules():
            if isinstance(norm, torch.nn.BatchNorm2d) and damped and name.endswith(damped):
                norm.weight *= 0.1
                norm.bias *= 0.1
    module.eval()
    for norm in norms:
        norm.train()
    batch = np.concatenate([next(iter(sample(1000 + index).values())) for index in range(count)])
    with torch.no_grad():
        module(torch.from_numpy(batch))
    module.eval()


def unit_gain(module, gain: float = 1.0, skip: str | None = None, norms: bool = True) -> None:
    """Redraws every Linear and Conv2d so that its output has `gain` times its input's standard deviation.

    transformers initialises with a fixed standard deviation of 0.02, and then a narrow network hardly depends on its
    input. Biases get a tenth of the gain, so that none of them is dropped as zero. Layers whose name ends with `skip` are
    unchanged. `norms` gives each LayerNorm and RMSNorm a scale near 1 and a bias near 0 of its own. Without it they stay
    ones and zeros, which the exporters share between norms through Identity nodes.
    """
    import torch

    for name, layer in module.named_modules():
        if skip is not None and name.endswith(skip):
            continue
        if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d)):
            torch.nn.init.normal_(layer.weight, std=gain * layer.weight[0].numel() ** -0.5)
            if layer.bias is not None:
                torch.nn.init.normal_(layer.bias, std=0.1 * gain)
        elif norms and type(layer).__name__.endswith(("LayerNorm", "RMSNorm", "LayerNorm2d")):
            torch.nn.init.normal_(layer.weight, mean=1.0, std=0.1)
            if getattr(layer, "bias", None) is not None:
                torch.nn.init.normal_(layer.bias, std=0.1)


def pick(module, *fields: str, **named):
    """Wraps a transformers model: one positional input, `named` arguments fixed, `fields` returned as a tuple."""
    import torch

    class Picked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x):
            out = self.inner(x, return_dict=True, **named)
            return tuple(out[field] for field in fields)

    return Picked()


# --- cleaning and saving -----------------------------------------------------------------------------------------


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and every graph inside it, outermost first."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs:
                yield from graphs(inner)


def clean(model: onnx.ModelProto) -> onnx.ModelProto:
    """Removes doc strings, stack traces, source paths and metadata in place: they have paths of the build machine."""

    def strip(proto) -> None:
        for field in ("doc_string", "metadata_props"):
            if field in proto.DESCRIPTOR.fields_by_name:
                proto.ClearField(field)

    model.producer_name, model.producer_version = "rewriter-models", ""
    model.ir_version = min(model.ir_version, IR_VERSION)
    strip(model)
    bodies = list(graphs(model.graph))
    for body in [*bodies, *model.functions]:
        strip(body)
        for proto in [*body.node, *body.value_info, *getattr(body, "initializer", ())]:
            strip(proto)
    for value in [*model.graph.input, *model.graph.output]:
        strip(value)
    return model


def to_bytes(model: onnx.ModelProto) -> bytes:
    """Serialises a model; the same model always gives the same bytes."""
    return model.SerializeToString(deterministic=True)


def save_sample(path: Path, sample: Sample) -> None:
    """Writes one sample, with a key for each model input; numpy gives the members a fixed date."""
    np.savez_compressed(path, **sample)
