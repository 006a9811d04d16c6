"""Known defects of TensorRT releases, from the table `quirks.toml`, and where a graph meets them."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from onnx import NodeProto, TensorProto

from rewriter.base.errors import Severity
from rewriter.ir.graph import GraphEditor, GraphView, attribute, casts_to, display_name, open_graphs
from rewriter.ir.graph.match import optional_input, produced, walk_down, with_scalar
from rewriter.ir.graph.ops import ELEMENTWISE, LAYOUTS, PRODUCTS, REDUCING, RESHAPES, SELECTIONS, TENSOR_CORE
from rewriter.ir.model import Model
from rewriter.ir.model.schemas import SHORT_NAMES
from rewriter.ir.reading import own_table, tuples
from rewriter.target import Target, numbers, probes, title
from rewriter.target.fusion import kernel_results
from rewriter.target.probes import UNKNOWN, Case, Probe

PATCH = 8  # smallest kernel of `kernel-is-stride`: patches of vision transformers have 8 to 32

WIDE = 256
"""Least channels of `pointwise-1d` and `one-element`: 240 do not crash the build, and 248 are right."""

BOUND = 5e-3
"""Relative L2 error of a right result in FP16, accumulators included; lost bounds and coordinates cost more
(docs/engines.md#thresholds-of-probes)."""

ASK = "`rewriter probe --ask` shows on the GPU whether it holds there, and `--target` names another one"

LARGE = 46_656  # elements up to which `scaled-image` is right; from 50,176 on it is wrong

IMAGE_OPS = ("Conv", "ConvTranspose", "AveragePool", "MaxPool")

_FLOAT8 = (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2)


@dataclass(frozen=True)
class Quirk:
    """One row of `quirks.toml`, whose head explains the fields."""

    id: str
    title: str
    chain: tuple[str, ...]
    first: str
    last: str
    severity: Severity
    remedy: str
    source: str
    where: str = "any"
    types: tuple[str, ...] = ()
    library: Literal["tensorrt", "tensorrt-rtx"] = "tensorrt"
    min_opset: int = 1
    good: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    symptom: Literal["wrong", "does not build", "does not load", "crashes", "slow"] = "wrong"
    keep: tuple[str, ...] = ()
    keep_last: int = 0
    lower: tuple[str, ...] = ()
    steps: str = ""
    build: tuple[str, ...] = ()
    smallest: str = ""
    bound: float = BOUND
    case: tuple[Case, ...] = ()
    probe: str = ""

    @property
    def releases(self) -> str:
        """`TensorRT 10.12 to 10.13 on L4; right in 10.5`."""
        if not (self.first or self.last):
            span = "all releases known"
        elif self.first == self.last:
            span = self.first
        else:
            span = f"{self.first} to {self.last}" if self.last else f"from {self.first} on"
        gpus = f" on {' and '.join(self.gpus)}" if self.gpus else ""
        good = f"; right in {' and '.join(self.good)}" if self.good else ""
        return f"{title(self.library)} {span}{gpus}{good}"

    @property
    def answer(self) -> str:
        """The name of its answer in `Target.answers`."""
        return self.probe or self.id

    @property
    def link(self) -> str:
        return self.source.split()[0] if self.source.startswith("https:") else ""

    def concerns(self, target: Target) -> bool | None:
        """True if the target has the defect; None if its release or its GPU is not known.

        An answer of `rewriter probe` decides first. A row is about either TensorRT or TensorRT-RTX, which
        have separate releases.
        """
        seen = target.answers.get(self.answer)
        if seen == "wrong" or (seen == "right" and self.probe):
            return seen == "wrong"
        elsewhere = bool(self.gpus and target.gpus) and set(self.gpus).isdisjoint(target.gpus)
        if target.library != self.library or elsewhere:
            return False
        released = self._has_release(target)
        return None if released and self.gpus and not target.gpus else released

    def _has_release(self, target: Target) -> bool | None:
        if not (self.first or self.last):
            return True
        if not target.version:
            return None
        first, last = numbers(self.first), numbers(self.last)
        after = target.version >= first or target.version == first[: len(target.version)]
        return after and (not last or target.version[: len(last)] <= last)

    def meets(self, low: int) -> bool:
        """True if its operators may have one of its types where the lower precision is `low`."""
        return not self.types or bool({SHORT_NAMES.get(low), "fp32", "fp8"} & set(self.types))

    @property
    def repaired(self) -> bool:
        """True if `fix` does something about it."""
        return bool(self.keep or self.lower or self.steps or self.build)

    @property
    def repairing_pass(self) -> str:
        """The name of the pass without which the defect stays; "" if there is none."""
        return self.steps.partition("{")[0]

    @property
    def question(self) -> Probe | None:
        """The probe that `rewriter probe` runs; None without a case."""
        if not self.case:
            return None
        answers = (
            {"value": "wrong", "meaning": self.symptom, "above": {"*": self.bound}},
            {"value": "right", "meaning": "right"},
        )
        done = "fix repairs it" if self.repaired else "scan names it"
        used = f"{done} where it is wrong; {self.remedy}"
        asked = f"Is this right here: {', '.join(step.removesuffix('?') for step in self.chain)} ({self.id})?"
        failing = UNKNOWN if self.symptom in ("wrong", "slow") else "wrong"
        return Probe(self.answer, asked, self.case, answers, used, failing)


@functools.cache
def table() -> tuple[Quirk, ...]:
    quirks = list[Quirk]()
    for row in own_table("rewriter.target", "quirks.toml")["quirk"]:
        fields: dict[str, Any] = tuples(row) | {"case": tuple(probes.cases(row.get("case", ())))}
        quirks.append(Quirk(**fields))
    return tuple(quirks)


@functools.cache
def every_probe() -> tuple[Probe, ...]:
    """The probes, and the questions of the defects."""
    return (*probes.probes(), *(asked for quirk in table() if (asked := quirk.question)))


def repairs(target: Target, low: int) -> list[Quirk]:
    """The defects that the target is known to have, and that `fix` repairs."""
    return [q for q in table() if q.repaired and q.meets(low) and q.concerns(target)]


def may_be_repaired_by(step: str, target: Target) -> list[Quirk]:
    """The defects that a pass repairs, and that the target is not known to be without."""
    return [q for q in table() if q.steps == step and q.concerns(target) is not False]


def not_repaired(model: Model, target: Target, low: int) -> Iterator[str]:
    """One sentence for each defect that the model meets and nothing repairs: the target is known to have it,
    or has it on some GPUs, and names none."""
    graver = [q for q in table() if target.version and q.severity != "note" and q.meets(low)]
    for quirk, _ in met(model, [q for q in graver if q.concerns(target) is None]):
        yield f"{target}: {quirk.title}, on {' and '.join(quirk.gpus)}; {ASK}"
    for quirk, nodes in met(model, [q for q in graver if q.concerns(target) and not q.repaired]):
        more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
        where = ", ".join(map(display_name, nodes[:3])) + more
        yield f"{target}: {quirk.title}, at {where}; {quirk.remedy} ({quirk.source})"


def build_arguments(model: Model, target: Target) -> list[str]:
    """Arguments of trtexec that repair a defect of the target which the model meets."""
    quirks = [quirk for quirk in table() if quirk.build and quirk.concerns(target)]
    return [word for quirk, _ in met(model, quirks) for word in quirk.build]


def met(model: Model, quirks: Sequence[Quirk]) -> Iterator[tuple[Quirk, list[NodeProto]]]:
    """The defects that the model meets, with the nodes."""
    graphs = open_graphs(model) if quirks else []
    for quirk in quirks:
        if nodes := [node for graph in graphs for node in affected(graph, quirk)]:
            yield quirk, nodes


def kept(graph: GraphEditor, quirk: Quirk) -> Iterator[NodeProto]:
    """The nodes that stay in FP32 because of the quirk."""
    return of_chains(graph, quirk, quirk.keep, quirk.keep_last)


def of_chains(
    graph: GraphEditor, quirk: Quirk, operators: Sequence[str], last: int = 0
) -> Iterator[NodeProto]:
    """The nodes of these operators in the chains that match the quirk, or in the `last` nodes of each."""
    for chain in _chains(graph, quirk) if operators else ():
        yield from (node for node in chain[-last:] if node.op_type in operators)


def affected(graph: GraphEditor, quirk: Quirk) -> list[NodeProto]:
    """The last node of each chain that matches the quirk, once each; for round trips the first Cast."""
    if quirk.where == "round-trip":
        return [trip.down for trip in lost_round_trips(graph)]
    return list({id(chain[-1]): chain[-1] for chain in _chains(graph, quirk)}.values())


def _chains(graph: GraphEditor, quirk: Quirk) -> list[list[NodeProto]]:
    chains = [c for n in graph.nodes for c in _from(graph, n, quirk.chain) if _MEANT[quirk.where](graph, c)]
    if quirk.lower:  # what is in FP16 already is right
        chains = [c for c in chains if any(_is_fp32(graph, n) for n in c if n.op_type in quirk.lower)]
    if quirk.where not in ("shared-axis", "shared-input"):
        return chains
    groups: dict[Hashable, list[list[NodeProto]]] = defaultdict(list)
    for chain in chains:
        node = chain[-1]
        axis = (graph.scalar(node.input[1]), attribute(node, "reverse", 0), attribute(node, "exclusive", 0))
        groups[axis if quirk.where == "shared-axis" else node.input[0]].append(chain)
    return [chain for group in groups.values() if len(group) > 1 for chain in group]


def _from(graph: GraphEditor, node: NodeProto, steps: Sequence[str]) -> Iterator[list[NodeProto]]:
    """The chains of `node`, which is the first step, and of nodes that follow it as the others say."""
    if node.op_type in steps[0].removesuffix("?").split("|"):
        if len(steps) == 1:
            yield [node]
        else:
            readers = [reader for result in node.output for reader in graph.consumers(result)]
            yield from ([node, *rest] for reader in readers for rest in _from(graph, reader, steps[1:]))
    if steps[0].endswith("?") and len(steps) > 1:
        yield from _from(graph, node, steps[1:])


def _is_fp32(graph: GraphEditor, node: NodeProto) -> bool:
    return graph.dtype(node.output[0]) == TensorProto.FLOAT


def _is_patch(graph: GraphEditor, node: NodeProto) -> bool:
    kernel = attribute(node, "kernel_shape", list((graph.shape(node.input[1]) or ())[2:]))
    return bool(kernel) and list(kernel) == list(attribute(node, "strides", [])) and min(kernel) >= PATCH


def _has_bias(graph: GraphEditor, chain: list[NodeProto]) -> bool:
    """True for a product with a bias, and no ReduceL2 in FP16 at the end."""
    biased = len(chain[0].input) == 3 or chain[1].op_type == "Add"
    return biased and (chain[-1].op_type == "Mul" or _is_fp32(graph, chain[-1]))


def _makes_image_of_heads(graph: GraphEditor, chain: list[NodeProto]) -> bool:
    """True if heads of several images are merged, and a second product (after sums or GELU) is transposed."""
    heads, merge, last = graph.shape(chain[1].input[0]) or (), chain[1], chain[-1]
    turned = [attribute(node, "perm", []) for node in (merge, last)] == [[0, 2, 1, 3], [0, 2, 1]]
    between = [node for node in chain[4:-3] if node.op_type == "Mul"]  # GELU has two, one of them by a number
    gelu = not between or (len(between) == 2 and any(with_scalar(graph, node) for node in between))
    return turned and gelu and len(chain) > 7 and len(heads) == 4 and 1 not in heads[:2]


def _gates_with_gelu(graph: GraphEditor, chain: list[NodeProto]) -> bool:
    """True for a product with a bias, x (1 + erf) of it, maybe times a number, and a Mul by a tensor."""
    biased = len(chain[0].input) == 3 or (chain[1].op_type == "Add" and _has_constant(graph, chain[1]))
    at = next(i for i, node in enumerate(chain) if node.op_type in ("Erf", "Tanh", "Gelu"))
    *rest, gate = [_has_constant(graph, node) for node in chain[at + 1 :]]
    # factors after the sum with 1: x, and one half before or behind it
    forms: dict[str, list[list[bool]]] = {"Gelu": [[]], "Erf": [[True, False], [True, False, True]]}
    whole = rest in forms.get(chain[at].op_type, [[True, False], [True, False, True], [True, True, False]])
    return biased and whole and not gate


def _has_constant(graph: GraphEditor, node: NodeProto) -> bool:
    return any(graph.constant(name) is not None for name in node.input)


def _clips_from_zero(graph: GraphEditor, chain: list[NodeProto]) -> bool:
    """True for a Clip with a single reader and no number added before it, as in HardSwish."""
    before, clip = chain[-3], chain[-2]
    shifted = before.op_type == "Add" and any(graph.scalar(name) is not None for name in before.input)
    alone = graph.only_consumer(clip.output[0]) is not None
    return alone and not shifted and graph.scalar(optional_input(clip, 1)) == 0.0


def _has_few_channels(graph: GraphEditor, chain: list[NodeProto]) -> bool:
    channels = (*(graph.shape(chain[0].input[0]) or ())[1:2], 0)[0]
    found = isinstance(channels, int) and 80 <= channels <= 240 and channels % 16 == 0 and channels % 64 != 0
    return found and (chain[0].op_type == "GroupNormalization" or len(chain) == 2)


def _is_pointwise_1d(graph: GraphEditor, conv: NodeProto) -> bool:
    sizes = graph.sizes(conv.input[1]) or ()
    return len(conv.input) == 2 and sizes[2:] == (1,) and min(sizes[:2]) >= WIDE


def _scales_one_element(graph: GraphEditor, chain: list[NodeProto]) -> bool:
    """True for a wide pointwise Conv without a bias of several static images of one element, and a number."""
    conv, last = chain[0], chain[-1]
    images, weight = (graph.sizes(tensor) or () for tensor in conv.input[:2])
    wide = len(conv.input) == 2 and len(weight) in (3, 4) and min(weight[:2]) >= WIDE
    several = bool(images) and images[0] > 1 and math.prod((*images[2:], *weight[2:])) == 1
    return wide and several and (last.op_type not in ("Mul", "Div") or with_scalar(graph, last) is not None)


def _scales_image(graph: GraphEditor, chain: list[NodeProto]) -> bool:
    """True for a large FP32 product of two tensors, after a Conv or pooling, or whose function one reads."""
    scale, sizes = chain[0], graph.sizes(chain[0].output[0])
    makers = [node for name in scale.input if (node := graph.producer(name))]
    image = any(node.op_type in IMAGE_OPS for node in (*makers, *graph.consumers(chain[-1].output[0])))
    large = sizes is None or math.prod(sizes) > LARGE
    return image and large and with_scalar(graph, scale) is None and _is_fp32(graph, scale)


def _is_shared(graph: GraphEditor, chain: list[NodeProto]) -> bool:
    """True for a pointwise Conv without a bias, whose heads all meet one right operand of the MatMul."""
    conv, left, right = chain[0], *map(graph.shape, chain[-1].input)
    pointwise = len(conv.input) == 2 and set((graph.sizes(conv.input[1]) or ())[2:]) == {1}
    heads, one = (shape[-3:-2] if shape else None for shape in (left, right))
    return pointwise and chain[-2].output[0] == chain[-1].input[0] and one in ((), (1,)) and heads != one


def _leaves_gaps(graph: GraphEditor, chain: list[NodeProto]) -> bool:
    """True for a Pad or Concat that puts other elements between the rows, planes or images of a Conv.

    A Conv or a pooling reads it as an image. Not a Pad that only one Conv reads: the Conv includes it.
    """
    last, readers = chain[-1], [node.op_type for node in graph.consumers(chain[-1].output[0])]
    shape = graph.shape(last.input[0]) or ()
    if len(shape) < 4 or {"Conv", "MaxPool", "AveragePool"}.isdisjoint(readers):
        return False
    if last.op_type == "Concat":
        axes = {attribute(last, "axis", 0) % len(shape)}
    else:
        plain = attribute(last, "mode", "constant") == "constant" and len(last.input) < 4  # no axes are named
        sizes = graph.constant(last.input[1]) if plain and readers != ["Conv"] else None
        axes = set() if sizes is None else {i % len(shape) for i in sizes.nonzero()[0].tolist()}
    return any(shape[before] != 1 for axis in axes if axis >= 2 for before in (0, *range(2, axis)))


_MEANT: Mapping[str, Callable[[GraphEditor, list[NodeProto]], bool]] = {
    **dict.fromkeys(("any", "shared-axis", "shared-input"), lambda graph, chain: True),
    "float8": lambda graph, chain: graph.dtype(chain[0].input[0]) in _FLOAT8,
    "eight-columns": lambda graph, chain: (graph.shape(chain[0].input[1]) or (None,))[-1] == 8,
    "few-channels": _has_few_channels,
    "from-zero": _clips_from_zero,
    "own-gate": lambda graph, chain: chain[0].input[0] in chain[2].input,
    "biased": _has_bias,
    "one-for-heads": _is_shared,
    "gaps": _leaves_gaps,
    "gelu-gate": _gates_with_gelu,
    "heads-to-image": _makes_image_of_heads,
    "one-element": _scales_one_element,
    "scaled-image": _scales_image,
    "pointwise-1d": lambda graph, chain: _is_pointwise_1d(graph, chain[0]),
    "kernel-is-stride": lambda graph, chain: _is_patch(graph, chain[0]),
}
"""True for the chains that a row's `where` means."""


_INSIDE = ELEMENTWISE | {"Cast", "Identity"}
"""Operators that the kernel of a product may hold besides the product."""

# Identity is no kernel; of the inequalities, these two were measured
_TAKING = LAYOUTS - {"Identity"} | SELECTIONS | {"Where", "Greater", "Less"}
"""Operators whose kernels include the second Cast, if nothing else reads it."""


class RoundTrip(NamedTuple):
    """A pair of Casts that ends the kernel of a product: to FP16, and back to FP32, of the same shape."""

    down: NodeProto
    up: NodeProto


def lost_round_trips(graph: GraphView) -> Iterator[RoundTrip]:
    """Every such pair of a graph, in the order of its nodes.

    TensorRT-RTX 1.6.1 writes FP16 there where the next kernel, or the user, reads FP32. Which kernels end
    like that, and which were seen to be right, is in docs/engines.md#casts-to-fp16-and-back. For some
    consumers only the builder's verbose log was read.
    """
    nodes = graph.nodes if "Cast" in graph.operators else []
    kernels = kernel_results(nodes, lambda n: n.op_type in TENSOR_CORE, lambda n: n.op_type in _INSIDE)
    for node in nodes:
        begins = next((kernels[name] for name in node.output if name in kernels), None)
        if begins is None or (trip := _trip(graph, node)) is None:
            continue
        if _ends(graph, trip.up.output[0], matrix=nodes[begins].op_type in PRODUCTS):
            yield trip


def _trip(graph: GraphView, down: NodeProto) -> RoundTrip | None:
    """The pair that begins with a node, if it rounds and nothing else reads the tensors inside it."""
    start = down.input[0] if down.input else ""
    if not casts_to(down, TensorProto.FLOAT16) or graph.dtype(start) != TensorProto.FLOAT:
        return None
    source = produced(graph, start, "Cast")
    if source is not None and graph.dtype(source.input[0]) == TensorProto.FLOAT16:
        return None  # nothing is rounded: the Casts are folded
    if graph.only_consumer(start) is not down:
        return None
    # views vanish if the shape comes out as it went in
    _, end = walk_down(graph, down.output[0], lambda node: node.op_type in RESHAPES)
    up = graph.only_consumer(end)
    if up is None or not casts_to(up, TensorProto.FLOAT):
        return None
    shape = graph.shape(start)
    same = up.input[0] == down.output[0] or (shape is not None and graph.shape(up.input[0]) == shape)
    return RoundTrip(down, up) if same else None


def _ends(graph: GraphView, result: str, *, matrix: bool) -> bool:
    """True if the kernel ends with the Cast that writes `result`: no consumer is computed in it."""
    readers = graph.consumers(result)
    if matrix and graph.is_output(result):
        return True
    alone = len(readers) == 1 and readers[0].op_type in _TAKING
    return not alone and any(r.op_type not in ELEMENTWISE and r.op_type not in REDUCING for r in readers)
