"""Converts arguments of a PyTorch model to feeds of the ONNX model exported from it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rewriter.base.errors import InputsError
from rewriter.hooks.fixing import Feeds, require
from rewriter.ir.model import Array, Model
from rewriter.runtime.inputs.arranging import as_array

torch = require("torch", "torch", __name__)


def example_feeds(
    model: Model, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Array]:
    """Returns the example arguments of an export as feeds.

    Inputs and arguments match by name if all names agree, else in the order of `forward`'s parameters,
    which both exporters keep.

    Raises:
        InputsError: the numbers of inputs and arguments differ.
    """
    ports, signature = model.signature.inputs, _signature(module)
    try:
        named = dict(signature.bind(*args, **kwargs).arguments) if signature else {}
    except TypeError:  # arguments that forward does not take: the export has reported it
        named = {}
    named = named or {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
    leaves = [leaf for value in named.values() for leaf in _leaves(value)]
    if all(len(_leaves(named.get(port.name))) == 1 for port in ports):
        leaves = [_leaves(named[port.name])[0] for port in ports]
    if len(leaves) != len(ports):
        raise InputsError(
            f"the model has {len(ports)} inputs ({', '.join(p.name for p in ports)}), the example arguments "
            f"contain {len(leaves)} tensors",
            where="args",
            hint="give calibration=[{input: array, ...}, ...]",
        )
    return {port.name: as_array(leaf) for port, leaf in zip(ports, leaves, strict=True)}


def calibration_feeds(model: Model, module: Any, items: Iterable[Any], most: int) -> Iterator[Any]:
    """The items as `inputs` of `rewriter.fix` takes them, until they hold `most` samples.

    A dict without the names of the inputs holds keyword arguments of `forward`.
    """
    names = [port.name for port in model.signature.inputs]
    first = next(iter(model.signature.inputs), None)
    batch = first.shape[0] if first is not None and first.shape else None
    for item in items:
        if isinstance(item, Mapping) and all(name in item for name in names):
            item = {name: item[name] for name in names}
        elif isinstance(item, Mapping):
            signature = _signature(module)
            parameters = signature.parameters if signature else ()
            item = example_feeds(model, module, (), {k: v for k, v in item.items() if k in parameters})
        yield item
        rows = next((len(leaf) for leaf in _leaves(item) if leaf.ndim), 1)
        most -= max(1, rows // batch) if isinstance(batch, int) and batch else 1
        if most <= 0:
            return


def calibration_source(items: Iterable[Any] | None, most: int) -> Feeds:
    """Returns a function from a model to feeds, for exports whose module is gone; None: random data."""
    return lambda model: None if items is None else calibration_feeds(model, None, items, most)


def _signature(module: Any) -> inspect.Signature | None:
    """The parameters of `forward`; None where Python cannot say."""
    try:
        return inspect.signature(getattr(module, "forward", module))
    except (TypeError, ValueError):
        return None


def _leaves(value: Any) -> list[Any]:
    """The tensors and arrays in nested arguments, in the order in which exporters flatten them."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, (torch.Tensor, np.ndarray))]
