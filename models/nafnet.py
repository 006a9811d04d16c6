"""NAFNet (Chen et al. 2022, "Simple Baselines for Image Restoration", arXiv 2204.04676), written from the paper.

Founding case 5: LayerNorm2d squares activations in the thousands, which FP16 cannot hold, while all other values fit.
The square becomes inf, 1/sqrt(inf) is 0, and each block silently returns its bias path: finite garbage. The small network
is trained (denoiser.py), so that its result is a picture; the full one has random weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from models.common import Built, Sample, export_classic, image_samples, rng_for

SEED = 3897  # number of the issue that reported the case, NVIDIA/TensorRT#3897


@dataclass(frozen=True)
class Shape:
    """Width of the first level, blocks per level (encoder, middle, decoder), and the square input's side."""

    width: int
    encoder: tuple[int, ...]
    middle: int
    decoder: tuple[int, ...]
    side: int


# Full: the published width 32 with its last-level-heavy encoder, cut to 12 blocks (24 norms, 24 MB).
FULL = Shape(32, (1, 1, 1, 4), 1, (1, 1, 1, 1), 256)
SMALL = Shape(8, (1, 1), 1, (1, 1), 144)

WEIGHTS = Path(__file__).with_name("nafnet_weights.npz")
NOISE = 30 / 255  # standard deviation of the noise that the small network removes
GAIN = 2.0**12  # of its residual stream: squares overflow, and the stream itself does not

# The standard deviation of the full network's residual stream: (x - mean)^2 overflows from 256 on, while the
# stream itself peaks at 1.3e4 (measured), a fifth of what FP16 holds. That of the small one peaks at 4.4e3.
STREAM = 2000.0


class ChannelNorm(torch.autograd.Function):
    """The arithmetic of LayerNorm2d; published as a Function, so its two differences x - mean stay two nodes."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        channels = x.shape[1]
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        normed = (x - mean) / (variance + eps).sqrt()
        return weight.view(1, channels, 1, 1) * normed + bias.view(1, channels, 1, 1)


class LayerNorm2d(nn.Module):
    """Normalises each pixel over its channels, x [N, C, H, W]; by hand, as restoration networks ship it."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x):
        if self.training:  # the same formula, through which gradients flow
            return ChannelNorm.forward(None, x, self.weight, self.bias, self.eps)
        return ChannelNorm.apply(x, self.weight, self.bias, self.eps)


class SimpleGate(nn.Module):
    """Halves the channels by multiplying the two halves (the paper's replacement of GELU)."""

    def forward(self, x):
        first, second = x.chunk(2, dim=1)
        return first * second


class Block(nn.Module):
    """One NAFNet block: gated depthwise convolution with channel attention, then a gated feed-forward part."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.norm1, self.norm2 = LayerNorm2d(channels), LayerNorm2d(channels)
        self.expand = nn.Conv2d(channels, wide, 1)
        self.spatial = nn.Conv2d(wide, wide, 3, padding=1, groups=wide)
        self.gate = SimpleGate()
        self.attention = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1))
        self.project = nn.Conv2d(channels, channels, 1)
        self.feed = nn.Sequential(
            nn.Conv2d(channels, wide, 1), SimpleGate(), nn.Conv2d(channels, channels, 1)
        )
        self.beta = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.gamma = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x):
        y = self.gate(self.spatial(self.expand(self.norm1(x))))
        x = x + self.project(y * self.attention(y)) * self.beta
        return x + self.feed(self.norm2(x)) * self.gamma


class NAFNet(nn.Module):
    """The U-shaped network: image [N, 3, H, W] in 0..1 to the restored image of the same shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        c = shape.width
        self.intro = nn.Conv2d(3, c, 3, padding=1)
        self.encoders, self.downs = nn.ModuleList(), nn.ModuleList()
        for count in shape.encoder:
            self.encoders.append(nn.Sequential(*(Block(c) for _ in range(count))))
            self.downs.append(nn.Conv2d(c, 2 * c, 2, stride=2))
            c *= 2
        self.middle = nn.Sequential(*(Block(c) for _ in range(shape.middle)))
        self.ups, self.decoders = nn.ModuleList(), nn.ModuleList()
        for count in shape.decoder:
            self.ups.append(nn.Sequential(nn.Conv2d(c, 2 * c, 1, bias=False), nn.PixelShuffle(2)))
            c //= 2
            self.decoders.append(nn.Sequential(*(Block(c) for _ in range(count))))
        self.ending = nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, image):
        x, skips = self.intro(image), []
        for encoder, down in zip(self.encoders, self.downs, strict=True):
            skips.append(encoder(x))
            x = down(skips[-1])
        x = self.middle(x)
        for up, decoder, skip in zip(self.ups, self.decoders, reversed(skips), strict=True):
            x = decoder(up(x) + skip)
        return self.ending(x) + image


def scale_weights(net: NAFNet) -> None:
    """Put the residual stream in the thousands and keep everything else near 1.

    Convolutions get unit gain (variance 1 / fan-in). The intro lifts the image to STREAM, beta and gamma bring the
    branches up to it, skip connections are halved in power by the up-convolutions, the ending brings it back.
    """
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            fan_in = module.weight[0].numel()
            nn.init.normal_(module.weight, std=fan_in**-0.5)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.1)
        if isinstance(module, LayerNorm2d):
            nn.init.normal_(module.weight, mean=1.0, std=0.1)
            nn.init.normal_(module.bias, std=0.1)
        if isinstance(module, Block):
            nn.init.normal_(module.beta, std=0.3 * STREAM)
            nn.init.normal_(module.gamma, std=0.3 * STREAM)
    with torch.no_grad():
        net.intro.weight *= 1.5 * STREAM
        for up in net.ups:
            up[0].weight *= 0.5
        net.ending.weight *= 0.3 / STREAM


def trained() -> NAFNet:
    """The small network with the weights of denoiser.py, and its residual stream times GAIN.

    A norm's result does not depend on the scale of its input, so that the network computes what it was trained to.
    Large networks come out of training with such streams by themselves, since only norms read them.
    """
    net = NAFNet(SMALL)
    with np.load(WEIGHTS) as weights:
        net.load_state_dict({name: torch.from_numpy(weights[name]) for name in net.state_dict()})
    with torch.no_grad():
        for layer in (net.intro, *net.downs):
            layer.bias *= GAIN
        net.intro.weight *= GAIN
        net.ending.weight /= GAIN
        for module in net.modules():
            if isinstance(module, Block):
                module.beta *= GAIN
                module.gamma *= GAIN
    return net


def noisy(index: int) -> Sample:
    """The photograph with the noise of a high ISO setting, in 8 bits, [1, 3, 144, 144] in 0..1."""
    with np.load(WEIGHTS) as weights:
        clean = weights["photograph"].transpose(2, 0, 1)[None] / 255
    image = clean + NOISE * rng_for("nafnet", index).standard_normal(clean.shape)
    return {"image": (np.round(image.clip(0, 1) * 255) / 255).astype(np.float32)}


def nafnet(full: bool) -> Built:
    """Classic exporter, opset 16: every LayerNorm2d stays decomposed."""
    if not full:
        return Built(export_classic(trained(), noisy(0), ["restored"], opset=16), noisy)
    torch.manual_seed(SEED)
    net = NAFNet(FULL)
    scale_weights(net)
    sample = image_samples("nafnet", "image", FULL.side, normalised=False)
    return Built(export_classic(net, sample(0), ["restored"], opset=16), sample)
