"""Arranges what users have at hand as samples: arrays and tuples get names, batches the model's size.

A loader's labels, a missing batch axis and float64 are what most data differs in. What is done about them is
noted, for the user to see.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import ml_dtypes
import numpy as np
from onnx import helper

from rewriter.base.errors import InputsError, UsageError
from rewriter.base.text import article, count
from rewriter.ir.model import Port, Signature
from rewriter.runtime.inputs.samples import Read, Sample, is_narrowed

MOST_ITEMS = 256
"""Items that are taken of a loader: a training set has more than ranges need, and each item is run."""


def is_array(value: Any) -> bool:
    """True for arrays of NumPy, PyTorch and others."""
    return hasattr(value, "__array__")


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


def by_name(item: Any, where: str, ports: Sequence[Port] | None) -> Any:
    """Returns a dict, an array, or a tuple in the order of the inputs (labels last) as a dict of arrays.

    Without `ports` an array is called `array`, and the arrays of a tuple `array 0`, `array 1` and so on. An
    item without arrays is passed on for `checked` to explain.

    Raises:
        InputsError: there are fewer arrays than inputs. UsageError: there is none, and no `ports`.
    """
    if _is_labelled_dict(item):
        item = item[0]
    if isinstance(item, Mapping):
        return {str(name): as_array(value) for name, value in item.items()}
    leaves = list(_leaves(item))
    if ports is None:
        if not leaves:
            hint = "give an array, a dict of arrays or a tuple of arrays for each sample"
            raise UsageError(f"it is {article(type(item).__name__)} without arrays", where=where, hint=hint)
        names = ["array"] if len(leaves) == 1 else [f"array {i}" for i in range(len(leaves))]
    elif not leaves:
        return item
    else:
        names = [port.name for port in ports]
    if len(leaves) < len(names):
        what = f"it holds {count(len(leaves), 'array')}, the model has {count(len(names), 'input')}"
        hint = f"give dicts by input, or tuples in this order: {', '.join(names)}"
        raise InputsError(what, where=where, hint=hint)
    return {name: as_array(leaf) for name, leaf in zip(names, leaves, strict=False)}


def has_labels(item: Any, inputs: int) -> bool:
    """True if something follows the inputs in a tuple or list."""
    if not isinstance(item, (list, tuple)):
        return False
    if _is_labelled_dict(item):
        return len(item) > 1
    return len(list(_leaves(item))) > inputs or any(isinstance(part, Mapping) for part in item)


def _is_labelled_dict(item: Any) -> bool:
    return isinstance(item, (list, tuple)) and bool(item) and isinstance(item[0], Mapping)


def _leaves(item: Any) -> Iterator[Any]:
    if is_array(item):
        yield item
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from _leaves(part)


def arranged(samples: Iterable[Sample], signature: Signature) -> tuple[list[Sample], tuple[str, ...]]:
    """The samples in the model's batch size, and sentences about what was done to them."""
    parts: list[Sample] = []
    notes: dict[str, None] = {}
    ports = signature.inputs
    for sample in samples:
        feeds = sample.read()
        try:
            shapes = [np.shape(feeds[port.name]) for port in ports]
        except (KeyError, TypeError, ValueError):
            parts.append(sample)  # `checked` says what is wrong with it
            continue
        if ports and all(map(_lacks_batch, shapes, ports)):
            sample = Sample(sample.where, partial(_rows, sample.read, None))
            shapes = [(1, *shape) for shape in shapes]
            notes[f"a batch axis of size 1 was added to {', '.join(port.name for port in ports)}"] = None
        size = _split_size(ports, shapes)
        if size is None:
            parts.append(sample)
        else:
            notes["batches were split to the model's batch size"] = None
            for start in range(0, shapes[0][0], size):
                rows = slice(start, start + size)
                parts.append(Sample(f"{sample.where}, row {start}", partial(_rows, sample.read, rows)))
        for port in ports:
            if is_narrowed(getattr(feeds[port.name], "dtype", None), port):
                dtype = np.dtype(helper.tensor_dtype_to_np_dtype(port.dtype))
                notes[f"input {port.name!r} was cast from float64 to {dtype}"] = None
    return parts, tuple(notes)


def _lacks_batch(shape: Sequence[int], port: Port) -> bool:
    """True if the array has the axes of the input but for the first, which can be 1."""
    wanted = port.shape
    if not wanted or len(shape) != len(wanted) - 1 or (isinstance(wanted[0], int) and wanted[0] != 1):
        return False
    return all(not isinstance(dim, int) or dim == size for size, dim in zip(shape, wanted[1:], strict=True))


def _split_size(ports: Sequence[Port], shapes: Sequence[Sequence[int]]) -> int | None:
    """The model's fixed batch size if all inputs have it and all arrays hold more; None: no split."""
    sizes = {port.shape[0] if port.shape else None for port in ports}
    totals = {shape[0] if shape else 0 for shape in shapes}
    fits = all(len(shape) == len(port.shape or ()) for shape, port in zip(shapes, ports, strict=True))
    if len(sizes) != 1 or len(totals) != 1 or not fits:
        return None
    size, total = sizes.pop(), totals.pop()
    return size if isinstance(size, int) and 0 < size < total and total % size == 0 else None


def _rows(read: Read, rows: slice | None) -> dict[str, Any]:
    """Some rows of each array; None: all of it as one row."""
    return {name: np.asarray(value)[rows] for name, value in read().items()}
