"""Random feeds of the declared shapes and types, for models without data.

Inputs of decoders, and their caches, have the names in optimum's exports or in genai_config.json.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from rewriter.base.errors import InputsError
from rewriter.base.text import count as counted
from rewriter.ir.graph import GraphEditor, attribute, open_graphs, reachable
from rewriter.ir.graph.ops import VIEWS
from rewriter.ir.model import Array, Model, Port
from rewriter.runtime.inputs.samples import Sample, Samples, check_shape, no_such_input, require_numbers

BATCH, IMAGE_SIDE, LENGTH = 1, 224, 32
"""Sizes of free dimensions: for axis 0 and names with `batch`; for axes 2 and 3 of four; for others."""

MOST_ELEMENTS = 2**30
"""Most elements of one input, 4 GiB in FP32: a larger one is a defect and would fill the memory."""

LISTED = 4  # sizes of free dimensions that the text of the data names

_INDEX_PATH = VIEWS | {"Cast"}
"""Operators that pass ids on, unchanged, to the Gather that looks them up."""


def random_samples(
    model: Model,
    seed: int = 0,
    # shapes of inputs, by name; they also fix the named dimensions of others
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    # numbers in place of random ones, by input: one for all elements, or one for each
    input_values: Mapping[str, Any] | None = None,
    # in place of the usual sizes of free dimensions, by the name of the dimension or the axis
    sizes: Mapping[str, int] | None = None,
    *,
    most: int = MOST_ELEMENTS,  # elements of one input
) -> Samples:
    """One seeded sample: floats standard normal, ids within their table, masks of ones.

    Integers that index no table are 1, bytes (uint8) are uniform, booleans true. Each free dimension gets a
    size, the same wherever its name occurs; the text of the source lists the sizes.

    Raises:
        InputsError: an unknown input, a shape or a value that contradicts the model, or an input whose
            values cannot be random.
    """
    ports = {port.name: port for port in model.signature.inputs}
    for port in ports.values():
        require_numbers(port, f"input {port.name!r}")
    bound: dict[str, tuple[int, str]] = {}
    for name, shape in (input_shapes or {}).items():
        where = {"option": "input-shapes", "where": f"{name}:{'x'.join(map(str, shape))}"}
        if name not in ports:
            raise no_such_input(name, ports, **where)
        check_shape(tuple(shape), ports[name], bound, **where)
    shapes_of, chosen, sizes = dict(input_shapes or {}), dict[str, int](), sizes or {}
    constants = {name: _constant(name, value, ports) for name, value in (input_values or {}).items()}
    shapes_of = {name: array.shape for name, array in constants.items() if array.ndim} | shapes_of
    named = {dim: size for dim, (size, _) in bound.items()}
    shapes = {
        name: tuple(shapes_of.get(name) or _shape(port, named, chosen, sizes)) for name, port in ports.items()
    }
    for name, shape in shapes.items():
        if math.prod(shape) > most:
            what = f"random values of the shape {list(shape)} do not fit into memory"
            hint = "give smaller data with `inputs`, or correct the model's input"
            raise InputsError(what, where=f"input {name!r}", hint=hint)
    limits = table_sizes(model)
    positions = dict(agreeing(model, shapes, limits))
    constants = {name: array for name, array in positions.items() if name not in constants} | constants
    makers = {n: _maker(port, limits.get(n)) for n, port in ports.items() if n not in constants}

    def read(*, cached: bool = True) -> dict[str, Array]:
        rng = np.random.default_rng([seed, 0])
        drawn = {name: make(rng, shapes[name]) for name, make in makers.items()}
        drawn |= {name: np.broadcast_to(value, shapes[name]) for name, value in constants.items()}
        return drawn if cached else drawn | {BRANCH: np.zeros_like(drawn[BRANCH])}

    values = {name: shown(value) for name, value in (input_values or {}).items()}
    parts = [f"{name} = {value}" for name, value in {**values, **chosen}.items()]
    rest = len(parts) - len(values) - LISTED
    parts = [*parts[:-rest], f"{counted(rest, 'size')} more"] if rest > 1 else parts
    origin = f"random inputs, seed {seed}{', with ' * bool(parts)}{', '.join(parts)}"
    recorder = "; `rewriter record` takes data from your script" if cache_pairs(model) else ""
    text = f"{origin} (no real data was used; ranges may not be representative{recorder})"
    several = [Sample("random sample 0", read)]
    if BRANCH in makers:  # each branch is measured on one of the two
        several.append(Sample("random sample 1", partial(read, cached=False)))
    samples = Samples(model.signature, several, text, real=False)
    options = {"seed": str(seed)} if seed else {}
    shaped = (f"{name}:{'x'.join(map(str, shape))}" for name, shape in (input_shapes or {}).items())
    options |= {"input-shapes": ",".join(shaped)} if input_shapes else {}
    options |= {"input-values": ",".join(f"{n}={value}" for n, value in values.items())} if values else {}
    samples.source = replace(samples.source, drawn=chosen, options=options)
    return samples


def shown(value: Any) -> str:
    """A value as `input-values` takes it: 16000, or 20x30."""
    return "x".join(
        f"{number:g}" if isinstance(number, float) else str(number) for number in np.ravel(value).tolist()
    )


def _constant(name: str, value: Any, ports: Mapping[str, Port]) -> Array:
    """The value of an input in its type, a scalar if it is for all elements; InputsError: it does not fit."""
    where = {"option": "input-values", "where": f"{name}={shown(value)}"}
    if name not in ports:
        raise no_such_input(name, ports, **where)
    port, array = ports[name], np.asarray(value)
    typed = array.astype(helper.tensor_dtype_to_np_dtype(port.dtype))
    if not np.array_equal(typed.astype(np.float64), array.astype(np.float64)) and typed.dtype.kind in "iub":
        raise InputsError(f"the input is {typed.dtype}", hint="give numbers that this type holds", **where)
    if array.ndim == 0 or port.shape is None:
        return typed
    fixed = [size if isinstance(size, int) else -1 for size in port.shape]
    if fixed.count(-1) > 1 or (array.size != math.prod(fixed) and -1 not in fixed):
        what = f"its shape is {list(port.shape)}, and {array.size} numbers do not fill it"
        raise InputsError(what, hint="give one number for all, or data with `inputs`", **where)
    return typed.reshape(fixed)


def _shape(
    port: Port, named: dict[str, int], chosen: dict[str, int], given: Mapping[str, int]
) -> tuple[int, ...]:
    """The shape of an input, with the sizes of free dimensions, which are noted in `named` and `chosen`."""
    if port.shape is None:
        what, where = "the model does not say how many axes it has", f"input {port.name!r}"
        hint = f"give it: `input-shapes={port.name}:1x3x224x224`, or give data with `inputs`"
        raise InputsError(what, where=where, hint=hint)
    sizes = []
    for axis, dim in enumerate(port.shape):
        if isinstance(dim, str) and dim in named:
            sizes.append(named[dim])
        elif isinstance(dim, str) and " + " in dim.replace("total_sequence_length", TOTAL):
            parts = dim.replace("total_sequence_length", TOTAL).split(" + ")
            for part in set(parts) - named.keys():
                chosen[part] = named[part] = given.get(part, LENGTH)
            sizes.append(sum(named[part] for part in parts))
        elif isinstance(dim, int):
            sizes.append(dim)
        else:
            batch = axis == 0 or (dim is not None and "batch" in dim.lower())
            image = len(port.shape) == 4 and axis >= 2 and "length" not in (dim or "").lower()
            size = BATCH if batch else IMAGE_SIDE if image else LENGTH
            key = dim or f"{port.name} axis {axis}"
            chosen[key] = size = given.get(key, size)
            if dim is not None:
                named[dim] = size
            sizes.append(size)
    return tuple(sizes)


Maker = Callable[[np.random.Generator, tuple[int, ...]], Array]


def _maker(port: Port, limit: int | None) -> Maker:
    """Returns a function that makes values of an input; `limit` is the size of a table that they index."""
    dtype: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(port.dtype))
    if "mask" in port.name.lower() or dtype.kind == "b":
        return lambda rng, shape: np.ones(shape, dtype)
    if dtype.kind not in "iu":
        return lambda rng, shape: rng.standard_normal(shape, np.float32).astype(dtype)
    if limit is not None:
        return lambda rng, shape: rng.integers(0, limit, shape).astype(dtype)
    if dtype == np.uint8:
        return lambda rng, shape: rng.integers(0, 256, shape).astype(dtype)
    return lambda rng, shape: np.ones(shape, dtype)


def table_sizes(model: Model) -> dict[str, int]:
    """The number of rows of the smallest table that an integer input indexes, by input."""
    integers = [p.name for p in model.signature.inputs if p.dtype in (TensorProto.INT32, TensorProto.INT64)]
    if not integers:
        return {}
    graph = open_graphs(model)[0]

    def rows(gather: NodeProto) -> int:
        """Size of the gathered axis; 1 if it is unknown, so that the index is 0."""
        size = graph.size(gather.input[0], attribute(gather, "axis", 0))
        return size if isinstance(size, int) and size > 0 else 1

    found = {name: [*map(rows, _gathers(graph, name))] for name in integers}
    return {name: min(sizes) for name, sizes in found.items() if sizes}


def _gathers(graph: GraphEditor, name: str) -> list[NodeProto]:
    """Gathers that use values of `name` as indices."""

    def onward(tensor: str) -> list[str]:
        passing = (n for n in graph.consumers(tensor) if n.op_type in _INDEX_PATH)
        return [o for n in passing if n.op_type == "Concat" or n.input[0] == tensor for o in n.output]

    uses = ((node, tensor) for tensor in reachable([name], onward) for node in graph.consumers(tensor))
    return [node for node, tensor in uses if node.op_type == "Gather" and node.input[1] == tensor]


CACHES = (("past_key_values.%s", "present.%s"), ("past_%s", "present_%s"))
"""Patterns of a cache's input and output: of optimum, and of older exporters."""

POSITIONS = ("position_ids", "cache_position")

BRANCH = "use_cache_branch"
"""The input of optimum's merged decoders that chooses the branch with the cache."""

TOTAL = "past_sequence_length + sequence_length"
"""Length of the mask, as optimum writes it; genai's is called `total_sequence_length`."""


def cache_pairs(model: Model) -> dict[str, str]:
    """The outputs that become caches of the next call, by the input."""
    inputs, outputs = _genai(model)
    patterns = [
        (inputs[f"past_{kind}_names"], outputs[f"present_{kind}_names"])
        for kind in ("key", "value")
        if f"past_{kind}_names" in inputs and f"present_{kind}_names" in outputs
    ]
    names = {port.name for port in model.signature.outputs}
    return {
        port.name: output
        for port in model.signature.inputs
        for past, present in (*patterns, *CACHES)
        if (output := _renamed(port.name, past, present)) in names
    }


def agreeing(
    model: Model,
    shapes: Mapping[str, tuple[int, ...]],  # of all inputs. `limits`: sizes of the tables that inputs index
    limits: Mapping[str, int],
) -> Iterator[tuple[str, Array]]:
    """Positions that follow the past, by input; none for a model without caches."""
    caches, ports = cache_pairs(model), model.signature.inputs
    lengths = list[int]()  # of the axis whose name says so, or of the last axis but one
    for name, dims in ((port.name, port.shape or ()) for port in ports if port.name in caches):
        past = [size for dim, size in zip(dims, shapes[name], strict=True) if "past" in str(dim)]
        lengths += past[:1] or shapes[name][-2:-1]
    names = [_genai(model)[0].get(name, name) for name in POSITIONS]
    for port in ports if lengths else ():
        if port.name in names and (shape := shapes[port.name]):
            positions = np.arange(lengths[0], lengths[0] + shape[-1])
            limit = limits.get(port.name, 2**31) - 1
            yield port.name, np.broadcast_to(positions.clip(max=limit), shape)


def _renamed(name: str, pattern: str, other: str) -> str:
    """The name in another pattern; "" if it does not fit. `%s` and `%d` stand for a part of it."""
    regex = re.escape(pattern).replace("%d", r"(\d+)").replace("%s", "(.+)")
    match = re.fullmatch(regex, name)
    return re.sub("%[ds]", match[1], other) if match else ""


def _genai(model: Model) -> tuple[dict[str, str], dict[str, str]]:
    """The names of the decoder's inputs and outputs in the genai_config.json beside a model, by role."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        decoder = json.loads(Path(str(model.path)).with_name("genai_config.json").read_bytes())["model"][
            "decoder"
        ]
        return dict(decoder["inputs"]), dict(decoder["outputs"])
    return {}, {}
