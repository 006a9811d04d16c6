"""Arranges what users have at hand as samples: arrays and tuples get names, batches the model's size.

A loader's labels, a missing batch axis and float64 are what most data differs in. What is done about them is
noted, for the user to see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import ml_dtypes
import numpy as np
from onnx import helper

from rewriter.ir.english import article, count
from rewriter.ir.errors import InputsError, UsageError
from rewriter.ir.model import Array, Port, Signature
from rewriter.runtime.inputs.samples import Sample, is_narrowed
from rewriter.runtime.inputs.stored_arrays import StoredArray

MOST_ITEMS = 256
"""Items that are taken of a loader: a training set has more than ranges need, and each item is run."""


def is_array(value: Any) -> bool:
    """True for arrays of NumPy, PyTorch and others, and for arrays in files."""
    return isinstance(value, StoredArray) or hasattr(value, "__array__")


def as_array(value: Any) -> Any:
    """A tensor as an array, also one that needs a gradient, is on a GPU or is bfloat16; others unchanged."""
    if not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    if str(value.dtype) == "torch.bfloat16":
        return value.float().numpy().astype(ml_dtypes.bfloat16)
    return value.numpy()


def items(data: Any) -> Iterator[Any]:
    """The items of a loader, a generator or a data set, `MOST_ITEMS` at most."""
    if hasattr(data, "__iter__"):
        return islice(iter(data), MOST_ITEMS)
    return (data[index] for index in range(min(len(data), MOST_ITEMS)))


def named(item: Any, where: str, signature: Signature) -> Any:
    """One item as a dict by input: an array, or a tuple in the order of the inputs with labels after them.

    Anything else is passed on for `checked` to explain.

    Raises:
        InputsError: there are fewer arrays than inputs.
    """
    ports = signature.inputs
    if isinstance(item, Mapping):
        return {name: as_array(value) for name, value in item.items()} if _has_tensors(item) else item
    if is_array(item):
        leaves = [item]
    elif isinstance(item, (list, tuple)):
        if item and isinstance(item[0], Mapping):  # a dict of inputs, and labels
            return named(item[0], where, signature)
        leaves = list(_leaves(item))
    else:
        return item
    if not leaves:
        return item
    if len(leaves) < len(ports):
        names = ", ".join(port.name for port in ports)
        raise InputsError(
            f"it holds {count(len(leaves), 'array')}, the model has {count(len(ports), 'input')}",
            where=where,
            hint=f"give dicts by input, or tuples in this order: {names}",
        )
    return {port.name: as_array(leaf) for port, leaf in zip(ports, leaves, strict=False)}


def unnamed(item: Any, where: str) -> dict[str, Any]:
    """One item as a dict where no model names the arrays: one is `array`, those of a tuple `array 0` ...

    Raises:
        UsageError: it holds no array.
    """
    if isinstance(item, (list, tuple)) and item and isinstance(item[0], Mapping):
        item = item[0]  # a dict of inputs, and labels
    if isinstance(item, Mapping):
        return {str(name): as_array(value) for name, value in item.items()}
    leaves = [as_array(leaf) for leaf in _leaves(item)]
    if not leaves:
        hint = "give an array, a dict of arrays or a tuple of arrays for each sample"
        raise UsageError(f"it is {article(type(item).__name__)} without arrays", where=where, hint=hint)
    return {"array": leaves[0]} if len(leaves) == 1 else {f"array {i}": a for i, a in enumerate(leaves)}


def _has_tensors(item: Mapping[Any, Any]) -> bool:
    return any(hasattr(value, "detach") for value in item.values())


def _leaves(item: Any) -> Iterator[Any]:
    if is_array(item):
        yield item
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from _leaves(part)


def left_out(item: Any, signature: Signature) -> str:
    """A sentence that names what no input takes of a tuple; "" if there is nothing."""
    if not isinstance(item, (list, tuple)):
        return ""
    if item and isinstance(item[0], Mapping):
        spare = list(item[1:])
    else:
        spare = list(_leaves(item))[len(signature.inputs) :]
        spare += [part for part in item if isinstance(part, Mapping)]
    if not spare:
        return ""
    verb = "are" if len(spare) > 1 else "is"
    return (
        f"{' and '.join(map(_shown, spare))} after the inputs of each sample {verb} not used, as for labels"
    )


def _shown(value: Any) -> str:
    """What was left out: its element type and shape, or its keys."""
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(repr, value))}"
    if not is_array(value):
        return article(type(value).__name__)
    array = as_array(value)
    return f"an array {array.dtype}{list(array.shape)}"


def arranged(samples: Iterable[Sample], signature: Signature) -> tuple[list[Sample], tuple[str, ...]]:
    """The samples in the model's batch size, and sentences about what was done to them."""
    found: list[Sample] = []
    notes: dict[str, None] = {}
    ports = {port.name: port for port in signature.inputs}
    for sample in samples:
        feeds = sample.read()
        if not isinstance(feeds, Mapping) or feeds.keys() != ports.keys():
            found.append(sample)  # `checked` says what is wrong with it
            continue
        try:
            shapes = {
                name: value.shape if is_array(value) else np.shape(value) for name, value in feeds.items()
            }
        except ValueError:  # lists of different lengths
            found.append(sample)
            continue
        lacking = list(ports)
        if ports and all(_lacks_batch(shapes[name], port) for name, port in ports.items()):
            sample = Sample(sample.where, _then(sample.read, partial(_with_batch, lacking)))
            shapes.update({name: (1, *shapes[name]) for name in lacking})
            notes[f"a batch axis of size 1 was added to {', '.join(lacking)}"] = None
        size = _split_size(list(ports.values()), shapes)
        parts = [sample] if size is None else _parts(sample, size, next(iter(shapes.values()))[0])
        if size is not None:
            notes["batches were split to the model's batch size"] = None
        found.extend(parts)
        for name, port in ports.items():
            if is_narrowed(getattr(feeds[name], "dtype", None), port):
                kept = np.dtype(helper.tensor_dtype_to_np_dtype(port.dtype))
                notes[f"input {name!r} was cast from float64 to {kept}"] = None
    return found, tuple(notes)


def _then(
    read: Callable[[], Mapping[str, Any]], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Any:
    return lambda: change(read())


def _lacks_batch(shape: Sequence[int], port: Port) -> bool:
    """True if the array has the axes of the input but for the first, which can be 1."""
    wanted = port.shape
    if not wanted or len(shape) != len(wanted) - 1 or (isinstance(wanted[0], int) and wanted[0] != 1):
        return False
    return all(not isinstance(dim, int) or dim == size for size, dim in zip(shape, wanted[1:], strict=True))


def _with_batch(names: Sequence[str], feeds: Mapping[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(v)[None] if name in names else v for name, v in feeds.items()}


def _split_size(ports: Sequence[Port], shapes: Mapping[str, Sequence[int]]) -> int | None:
    """The model's fixed batch size if all inputs have it and all arrays hold more; None: no split."""
    sizes = {port.shape[0] if port.shape else None for port in ports}
    given = {shapes[port.name][0] if shapes[port.name] else 0 for port in ports}
    if len(sizes) != 1 or len(given) != 1:
        return None
    size, total = sizes.pop(), given.pop()
    fits = all(len(shapes[port.name]) == len(port.shape or ()) for port in ports)
    return size if isinstance(size, int) and 0 < size < total and total % size == 0 and fits else None


def _parts(sample: Sample, size: int, total: int) -> list[Sample]:
    def part(start: int) -> Callable[[], Mapping[str, Array]]:
        return lambda: {n: np.asarray(v)[start : start + size] for n, v in sample.read().items()}

    return [Sample(f"{sample.where}, row {start}", part(start)) for start in range(0, total, size)]
