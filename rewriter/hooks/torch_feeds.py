"""Converts arguments of a PyTorch model to feeds of the ONNX model exported from it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import ml_dtypes
import numpy as np

from rewriter.hooks.fixing import Feeds, require
from rewriter.ir.errors import InputsError
from rewriter.ir.model import Array, Model, Port

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
    return {port.name: to_array(leaf) for port, leaf in zip(ports, leaves, strict=True)}


def calibration_feeds(
    model: Model, module: Any, items: Iterable[Any], most: int
) -> Iterator[dict[str, Array]]:
    """At most `most` feeds from an iterable of arguments.

    An item is the argument of `forward` (a tensor, a tuple, a dict of keyword arguments), a dict by input, or
    a batch of a DataLoader. Tensors after the inputs, such as labels, are ignored. A batch larger than the
    model's fixed batch size is split.
    """
    ports = model.signature.inputs
    pieces = (piece for item in items for piece in _split(_item_feeds(model, module, item), ports))
    return islice(pieces, most)


def calibration_source(items: Iterable[Any] | None, most: int) -> Feeds:
    """Returns a function from a model to feeds, for exports whose module is gone; None: random data."""
    return lambda model: None if items is None else calibration_feeds(model, None, items, most)


def to_array(value: Any) -> Array:
    """Returns a tensor, or anything that numpy accepts, as an array; bfloat16 stays bfloat16."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.detach().cpu()
    if value.dtype == torch.bfloat16:
        bits: Array = value.contiguous().view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    return np.asarray(value.numpy())


def _item_feeds(model: Model, module: Any, item: Any) -> dict[str, Array]:
    ports = model.signature.inputs
    if isinstance(item, Mapping):
        if all(port.name in item for port in ports):
            return {port.name: to_array(item[port.name]) for port in ports}
        signature = _signature(module)
        names = signature.parameters if signature else ()
        return example_feeds(model, module, (), {k: v for k, v in item.items() if k in names})
    leaves = _leaves(item)
    if len(leaves) < len(ports):
        raise InputsError(
            f"a sample contains {len(leaves)} tensors, the model has {len(ports)} inputs",
            where="calibration",
            hint="give arguments of forward, or dicts by input: " + ", ".join(port.name for port in ports),
        )
    return {port.name: to_array(leaf) for port, leaf in zip(ports, leaves, strict=False)}


def _split(feeds: dict[str, Array], ports: Sequence[Port]) -> Iterator[dict[str, Array]]:
    """Splits a batch into the model's batch size, if it is fixed and shared by all inputs."""
    sizes = {port.shape[0] if port.shape else None for port in ports}
    given = {array.shape[0] if array.ndim else None for array in feeds.values()}
    size, count = (sizes.pop(), given.pop()) if len(sizes) == len(given) == 1 else (None, None)
    if not isinstance(size, int) or count is None or count <= size or size < 1:
        yield feeds
        return
    for start in range(0, count - size + 1, size):
        yield {name: array[start : start + size] for name, array in feeds.items()}


def _signature(module: Any) -> inspect.Signature | None:
    """The parameters of `forward`; None where Python cannot say."""
    exported = isinstance(module, torch.export.ExportedProgram)
    forward = module.module().forward if exported else getattr(module, "forward", module)
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None


def _leaves(value: Any) -> list[Any]:
    """The tensors and arrays in nested arguments, in the order in which exporters flatten them."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, (torch.Tensor, np.ndarray))]
