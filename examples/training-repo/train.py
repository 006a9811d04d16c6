"""Trains the denoiser."""

from __future__ import annotations

import torch
from data import WHITE, Pictures
from net import Denoiser
from torch.utils.data import DataLoader

STEPS, BATCH, PATCH = 400, 8, 32
SEED, THREADS = 0, 1
"""One thread: the network is so small that two would wait for each other. The result never varies."""


def train(steps: int = STEPS) -> Denoiser:
    torch.manual_seed(SEED)
    torch.set_num_threads(THREADS)
    net = Denoiser()
    optimiser = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
    for step, (noisy, clean) in enumerate(DataLoader(Pictures(steps * BATCH, PATCH, seed=1), BATCH), start=1):
        loss = ((net(noisy) - clean) / WHITE).abs().mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.5f}", flush=True)
    return net.eval()


if __name__ == "__main__":
    torch.save(train().state_dict(), "denoiser.pt")
