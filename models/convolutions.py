"""Two small convolutional networks: one with GroupNorm, one quantised to QDQ form."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx
import torch
from torch import nn

from models.common import Built, export_classic, image_samples, unit_gain


def group_norm(full: bool) -> Built:
    """Conv, GroupNorm, SiLU three times at opset 17, classic exporter: GroupNorm becomes InstanceNormalization.

    image is float32 [1, 3, S, S] in 0..1. Activations are near 1000, and only the inside of the norm squares them.
    """
    torch.manual_seed(31)
    width, groups, side = (128, 32, 224) if full else (16, 4, 32)
    stages = [
        layer
        for channels in (3, width, width)
        for layer in (nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(groups, width), nn.SiLU())
    ]
    net = nn.Sequential(*stages, nn.Conv2d(width, 3, 1))
    unit_gain(net)
    with torch.no_grad():
        for layer in stages[::3]:
            layer.weight *= 1000
        for layer in stages[1::3]:
            layer.weight.normal_(1.0, 0.1)
            layer.bias.normal_(0.0, 0.1)
    sample = image_samples("group_norm", "image", side, normalised=False)
    return Built(export_classic(net, sample(0), ["out"], opset=17), sample)


def qdq(full: bool) -> Built:
    """A Conv in FP32, then four Gemms quantised by onnxruntime to 8 bits, QDQ form, int32 biases with their own node.

    The Conv stays in FP32 because TensorRT-RTX has no INT8 convolution, and every case must build there.
    """
    torch.manual_seed(32)
    width, side = (256, 224) if full else (32, 32)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )
    unit_gain(net, gain=1.4)
    sample = image_samples("qdq", "image", side, normalised=True)
    return Built(quantised(export_classic(net, sample(0), ["logits"], opset=13), sample), sample)


def quantised(model: onnx.ModelProto, sample) -> onnx.ModelProto:
    """Static 8-bit quantisation by onnxruntime, calibrated on samples 1000 to 1007."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.feeds = iter([sample(1000 + index) for index in range(8)])

        def get_next(self):
            return next(self.feeds, None)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quantised.onnx"
        quantize_static(
            model,
            path,
            Reader(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["Gemm"],
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            # TensorRT's parser accepts only zero points of 0; per-channel weights are symmetric already.
            extra_options={"ActivationSymmetric": True},
        )
        return onnx.load(path)
