"""Samples for a model: the user's data, or seeded random feeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rewriter.ir.model import Model
from rewriter.runtime.engines.deployment import Deployment
from rewriter.runtime.inputs.random_samples import random_samples
from rewriter.runtime.inputs.reading import read_raw_samples, read_samples
from rewriter.runtime.inputs.samples import Samples

__all__ = [
    "Samples",
    "load_samples",
    "random_samples",
    "read_raw_samples",
    "read_samples",
]


def load_samples(
    inputs: Any,
    model: Model,
    *,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    deployment: Deployment | None = None,
    image_preprocess: str | None = None,
) -> Samples:
    """The samples of a run: the given ones, or one random sample.

    Args:
        inputs: What `read_samples` reads; None for random feeds.
        input_shapes: Shapes of random feeds, by input. Inputs without one get the usual shape of the
            optimisation profile.
        seed: Of random feeds.
        image_preprocess: How photographs in a folder become samples: see `images.Preprocessing`.
        deployment: The engine options whose optimisation profile the model and the samples must fit.

    Raises:
        InputsError: missing or unreadable data, or data that does not fit the model's inputs.
        UsageError: a profile that does not fit the model, or samples outside the profile.
    """
    deployment = deployment or Deployment()
    deployment.check(model.signature)
    if inputs is not None:
        samples = read_samples(inputs, model, image_preprocess)
    else:
        shapes = {name: span[1] for name, span in deployment.profile.items()} | dict(input_shapes or {})
        samples = random_samples(model, seed=seed, input_shapes=shapes)
    deployment.check_data(samples.source.spans)
    return samples
