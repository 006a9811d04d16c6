"""Islands grow over the residual sums between them, where that needs no more Casts.

The norms of a network read its residual stream, so where they are FP32 islands, every sum of that
stream is cast up for them. With the sums in FP32, too, what is cast up is the branch that each one
adds: as many Casts, and the stream is no longer rounded once per layer. A stream passes through all
layers, so its rounding shows in full: in FP32 it made the emulated error of a T5 encoder 5.0e-4
instead of 1.1e-3. The price is that the stream is stored in 4 bytes instead of 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet

from onnx import NodeProto

from rewriter.hazards import Hazard
from rewriter.hazards.survey import Survey

RULE = "residual-sum"

_SUMS = frozenset({"Add", "Sub", "Sum"})


def grow(survey: Survey, found: dict[int, Hazard]) -> None:
    """Add to `found`, hazards by the identity of their nodes, the sums that cost no Cast.

    Sums that feed one another are taken together or not at all.
    """
    for stream in _streams(survey, found):
        tensors = _border(survey, stream)
        kept = found.keys()
        grown = kept | {id(node) for node in stream}
        before, after = (sum(_is_cast(survey, t, fp32) for t in tensors) for fp32 in (kept, grown))
        if 0 < after <= before:
            for node in stream:
                found[id(node)] = Hazard(node, RULE, "the FP32 nodes around it need as many Casts without it")


def _streams(survey: Survey, found: dict[int, Hazard]) -> list[list[NodeProto]]:
    """Sums of two computed tensors that no hazard has named, those that feed one another together."""
    streams: dict[int, list[NodeProto]] = {}
    for node in survey.nodes:
        if node.op_type not in _SUMS or id(node) in found:
            continue
        if sum(1 for t in node.input if not survey.is_constant(t)) < 2:
            continue
        own = streams[id(node)] = [node]
        for producer in map(survey.producer, node.input):
            fed = streams.get(id(producer), own)
            if fed is not own:
                own, joining = (fed, own) if len(fed) >= len(own) else (own, fed)
                own.extend(joining)
                streams.update(dict.fromkeys(map(id, joining), own))
    return list({id(stream): stream for stream in streams.values()}.values())


def _border(survey: Survey, nodes: Iterable[NodeProto]) -> list[str]:
    """The computed tensors that the nodes read or write, each once."""
    names = (survey.source(t) for node in nodes for t in (*node.input, *node.output))
    return list(dict.fromkeys(t for t in names if not survey.is_constant(t)))


def _is_cast(survey: Survey, tensor: str, fp32: AbstractSet[int]) -> bool:
    """Whether the type in which a tensor is made is not what all of its readers want."""
    producer = survey.producer(tensor)
    made = id(producer) in fp32 if producer is not None else survey.stays_fp32(tensor)
    return any(wanted != made for wanted in _wanted(survey, tensor, fp32))


def _wanted(survey: Survey, tensor: str, fp32: AbstractSet[int]) -> Iterator[bool]:
    """Whether each reader of a tensor wants FP32."""
    for _, reader in survey.readers(tensor):
        yield id(reader) in fp32
    for name in survey.aliases(tensor):
        if survey.graph.is_output(name):
            yield survey.stays_fp32(name)
