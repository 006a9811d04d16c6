"""Samples for a model: the user's data, or seeded random feeds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rewriter.base.errors import UsageError
from rewriter.base.text import count
from rewriter.ir.model import Model
from rewriter.runtime.engines.deployment import PROFILE, Deployment, shown
from rewriter.runtime.inputs.random_samples import random_samples
from rewriter.runtime.inputs.reading import UNUSED, read_raw_samples, read_samples
from rewriter.runtime.inputs.samples import Samples, check_shape, no_such_input
from rewriter.runtime.inputs.sizes import fitting, shape_inputs

__all__ = ["Samples", "load_samples", "random_samples", "read_raw_samples", "read_samples"]


def load_samples(
    inputs: Any,  # what `read_samples` reads; None for random feeds
    model: Model,
    *,
    # shapes of random feeds, by input. Inputs without one get the usual shape of the optimisation profile;
    # sizes that are still free are such that the model runs
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    input_values: Mapping[str, Any] | None = None,  # numbers in place of random ones, by input
    seed: int = 0,
    # the engine options whose optimisation profile the model and the samples must fit
    deployment: Deployment | None = None,
    # how photographs in a folder become samples: see `images.Preprocessing`
    image_preprocess: str | None = None,
) -> Samples:
    """The samples of a run: the given ones, or one random sample.

    Raises:
        InputsError: missing or unreadable data; data or a profile that does not fit the model's inputs.
        UsageError: samples outside the profile.
    """
    profile = deployment.profile if deployment else {}
    ports = {port.name: port for port in model.signature.inputs}
    hosted = shape_inputs(model)  # their profile has values, as trtexec's has
    for name, span in profile.items():
        if name not in ports:
            raise no_such_input(name, ports, option=PROFILE)
        fixed = name not in hosted and all(isinstance(size, int) for size in ports[name].shape or ("",))
        if fixed and all(shape == ports[name].shape for shape in span):
            raise UsageError(f"all axes of {name!r} are fixed", option=PROFILE, hint="leave it out")
        for shape in span if name not in hosted else ():
            check_shape(shape, ports[name], {}, option=PROFILE, where=f"for input {name!r}")
    if inputs is not None:
        samples = read_samples(inputs, model, image_preprocess)
    else:
        shapes = {name: span[1] for name, span in profile.items()} | dict(input_shapes or {})
        samples = fitting(model, partial(random_samples, model, seed, shapes, input_values))
        samples.notes += (UNUSED,) * bool(image_preprocess)
    source = samples.source
    spans = {name: source.values[name] if name in hosted else span for name, span in source.spans.items()}
    samples.source = replace(source, spans={n: span for n, span in source.spans.items() if n not in hosted})
    profile = deployment.filled(samples.source.all_spans).profile if deployment else {}
    for name, (least, _, most) in profile.items():
        for shape in (spans[name][0], spans[name][2]) if name in spans else ():
            if len(shape) != len(least):
                what = f"input {name!r} takes {count(len(shape), 'value')}, not {len(least)}"
                raise UsageError(what, option=PROFILE, hint="it is a shape itself: give its values")
            if not all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True)):
                limits = f"{shown(least)} to {shown(most)}"
                what = f"input {name!r} is {shown(shape)} in the data, and the profile goes from {limits}"
                raise UsageError(what, option=PROFILE, hint="widen it, or give data of its sizes")
    return samples
