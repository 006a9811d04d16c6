"""Trains the small NAFNet as a denoiser: `python models/denoiser.py`, about ten minutes on one core.

Needs `pip install torch scikit-image scikit-learn`. It writes nafnet_weights.npz, from which `build.py nafnet` makes
nafnet.onnx, and the photograph of the sample.

Photographs that it trains on, none of which is copied into this repository:
from scikit-image 0.26 astronaut (NASA, public domain), coffee (Rachel Michetti, CC0), rocket (SpaceX, public domain);
from scikit-learn 1.9 china (danielbuechele, CC BY 2.0) and flower (vultilion, CC BY 2.0).
The sample is not among them: a part of chelsea, a cat, by Stefan van der Walt, CC0, from scikit-image.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from skimage import data
from sklearn.datasets import load_sample_image

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # so that `models` imports when this file is run as a script

from models.nafnet import NOISE, SEED, SMALL, WEIGHTS, NAFNet  # noqa: E402

STEPS, BATCH, SIDE = 5000, 16, 48
RATE = 3e-3  # largest step of AdamW; it rises over the first twentieth and falls along a cosine

CROP = (slice(6, 294), slice(96, 384))
"""The cat's face in chelsea, [300, 451, 3]; the sample has half its size."""


def photographs() -> list[torch.Tensor]:
    """The photographs that it trains on, float32 [3, H, W] in 0..1, each whole and in half its size."""
    pictures = [data.astronaut(), data.coffee(), data.rocket()]
    pictures += [load_sample_image("china.jpg"), load_sample_image("flower.jpg")]
    whole = [torch.from_numpy(np.array(p)).permute(2, 0, 1).float() / 255 for p in pictures]
    return whole + [torch.nn.functional.avg_pool2d(p, 2) for p in whole]


def patches(pictures: list[torch.Tensor], rng: np.random.Generator) -> torch.Tensor:
    """Squares from random places, float32 [BATCH, 3, SIDE, SIDE], turned and mirrored at random."""
    made = []
    for _ in range(BATCH):
        picture = pictures[rng.integers(len(pictures))]
        top, left = (int(rng.integers(length - SIDE)) for length in picture.shape[1:])
        patch = picture[:, top : top + SIDE, left : left + SIDE].rot90(int(rng.integers(4)), (1, 2))
        made.append(patch.flip(2) if rng.integers(2) else patch)
    return torch.stack(made)


def trained() -> NAFNet:
    """Returns the network after training on pairs of patches and the same with Gaussian noise."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # layers this small are no faster on two
    rng, pictures, net = np.random.default_rng(SEED), photographs(), NAFNet(SMALL)
    optimiser = torch.optim.AdamW(net.parameters(), lr=RATE, betas=(0.9, 0.9), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, STEPS, pct_start=0.05)
    for step in range(STEPS):
        clean = patches(pictures, rng)
        noisy = (clean + NOISE * torch.randn_like(clean)).clamp(0, 1)
        loss = (net(noisy) - clean).pow(2).mean(dim=(1, 2, 3)).add(1e-8).log10().mean()  # PSNR, as published
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 250 == 249:
            print(f"step {step + 1}: {-10 * loss.item():.2f} dB", flush=True)
    return net


def main() -> None:
    """Trains, and writes weights and photograph."""
    state = {name: tensor.numpy() for name, tensor in trained().state_dict().items()}
    face = data.chelsea()[CROP].reshape(144, 2, 144, 2, 3).mean(axis=(1, 3)).round().astype(np.uint8)
    np.savez_compressed(WEIGHTS, photograph=face, **state)


if __name__ == "__main__":
    main()
