"""Samples for a model: the user's data, or seeded random feeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from rewriter.ir.model import Model
from rewriter.runtime.engines.deployment import Deployment
from rewriter.runtime.inputs.random_samples import random_samples
from rewriter.runtime.inputs.reading import may_hold_samples, read_raw_samples, read_samples
from rewriter.runtime.inputs.samples import Samples

__all__ = [
    "Samples",
    "load_samples",
    "may_hold_samples",
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
        shapes = {**deployment.usual, **(input_shapes or {})}
        samples = random_samples(model, seed=seed, input_shapes=shapes)
    deployment.check_data(samples.source.spans)
    noted = [
        f"the first axis of {name!r}, usually the batch, goes from {low[0]} to {high[0]} in the samples and "
        "so in the engine's profile: `min-shapes` and `max-shapes` set another"
        for name, (low, _, high) in samples.source.spans.items()
        if len(low) > 1 and low[0] != high[0] and name not in deployment.profile
    ]
    if noted:
        samples = copy(samples)
        samples.notes = tuple(dict.fromkeys((*samples.notes, *noted)))
    return samples
