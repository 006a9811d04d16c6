"""FP32 islands merge where they meet, and grow over residual sums if that needs no more Casts.

The norms of a network read its residual stream: if they are FP32 islands, every sum of the stream is cast up
for them. With the sums in FP32, too, only the branch that each of them adds is cast. That needs as many
Casts, and the stream is no longer rounded once per layer. It costs 4 bytes per element instead of 2
(docs/accuracy.md#residual-streams). The source of a stream is a sum of embeddings; all but one may be
constants.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from onnx import NodeProto

from rewriter.hazards import Hazard
from rewriter.hazards.analysis import GraphAnalysis
from rewriter.ir.graph import display_name
from rewriter.ir.graph.ops import CHEAP, LAYOUTS, SUMS, VIEWS

RULE = "residual-sum"

BETWEEN = "between-islands"  # rule of a node that is FP32 only because its neighbours are


def grow(analysis: GraphAnalysis, hazards: dict[int, Hazard]) -> None:
    """Add to `hazards`, hazards by the identity of their nodes, the sums that need no more Casts.

    Sums that feed one another are added together or not at all.
    """
    for stream in _streams(analysis, hazards):
        names = (analysis.source(t) for node in stream for t in (*node.input, *node.output))
        tensors = [t for t in dict.fromkeys(names) if not analysis.is_constant(t)]
        identities = hazards.keys()
        grown = identities | {id(node) for node in stream}
        before, after = (sum(_is_cast(analysis, t, fp32) for t in tensors) for fp32 in (identities, grown))
        if 0 < after <= before:
            reason = "the FP32 nodes around it need as many Casts without it"
            hazards.update((id(node), Hazard(node, RULE, reason)) for node in stream)


def _streams(analysis: GraphAnalysis, hazards: dict[int, Hazard]) -> list[list[NodeProto]]:
    """The sums without a hazard, grouped by streams: sums that feed one another."""
    streams: dict[int, list[NodeProto]] = {}
    fp32 = set(hazards)
    for node in analysis.nodes:
        if id(node) in hazards:
            continue
        if _begins_stream(analysis, node, fp32):
            fp32.add(id(node))
        elif node.op_type not in SUMS or sum(not analysis.is_constant(t) for t in node.input) < 2:
            continue  # it adds no two computed tensors
        own = streams[id(node)] = [node]
        for producer in map(analysis.producer, node.input):
            fed = streams.get(id(producer), own)
            if fed is not own:
                own, joining = (fed, own) if len(fed) >= len(own) else (own, fed)
                own.extend(joining)
                streams.update(dict.fromkeys(map(id, joining), own))
    return list({id(stream): stream for stream in streams.values()}.values())


def _begins_stream(analysis: GraphAnalysis, node: NodeProto, fp32: AbstractSet[int]) -> bool:
    """True if the node adds a constant (positions) to the rows of a table, or to an FP32 tensor.

    A constant added to a product is a bias, and one added to scores a mask: neither begins a stream.
    """
    computed = [t for t in node.input if not analysis.is_constant(t)]
    if node.op_type != "Add" or len(computed) != 1 or analysis.producer(computed[0]) is None:
        return False
    views = list(analysis.upstream(computed[0], lambda n: n.op_type in VIEWS))
    read = (t for n in views for t in n.input if analysis.is_float(t) and not analysis.is_constant(t))
    sources = map(analysis.producer, (computed[0], *read))
    return all(n is not None and (n.op_type in VIEWS or id(n) in fp32) for n in sources)


def _is_cast(analysis: GraphAnalysis, tensor: str, fp32: AbstractSet[int]) -> bool:
    """True if a reader of the tensor needs another type than its producer computes."""
    producer = analysis.producer(tensor)
    is_fp32 = id(producer) in fp32 if producer is not None else analysis.stays_fp32(tensor)
    wanted = {id(reader) in fp32 for _, reader in analysis.readers(tensor)}
    wanted |= {analysis.stays_fp32(t) for t in analysis.aliases(tensor) if analysis.graph.is_output(t)}
    return (not is_fp32) in wanted


def keep_adjacent(analysis: GraphAnalysis, hazards: dict[int, Hazard]) -> None:
    """Give Q/DQ nodes and their operators one type: TensorRT does not fuse them across a Cast."""
    partners: dict[int, list[NodeProto]] = {}
    for node, other in _quantized_pairs(analysis):
        partners.setdefault(id(node), []).append(other)
        partners.setdefault(id(other), []).append(node)
    queue = [hazard.node for hazard in hazards.values()]
    while queue:
        node = queue.pop()
        for other in partners.get(id(node), ()):
            if id(other) not in hazards:
                reason = f"next to {display_name(node)}, with no Cast between"
                hazards[id(other)] = Hazard(other, "quantized", reason)
                queue.append(other)


def _quantized_pairs(analysis: GraphAnalysis) -> Iterator[tuple[NodeProto, NodeProto]]:
    """Pairs of DequantizeLinear and a reader, through views, and of QuantizeLinear and its producer."""
    for node in analysis.nodes:
        if node.op_type == "DequantizeLinear":
            pairs = analysis.downstream(node.output[0], lambda n: n.op_type in VIEWS)
            yield from ((node, reader) for _, reader in pairs)
        elif node.op_type == "QuantizeLinear" and (producer := analysis.producer(node.input[0])) is not None:
            yield node, producer


def absorb(analysis: GraphAnalysis, hazards: dict[int, Hazard]) -> None:
    """Add cheap nodes that have only FP32 around them to the island: two borders become none."""
    for node in analysis.nodes:  # once: a neighbour of one that is absorbed was FP32 before
        if id(node) not in hazards and node.op_type in CHEAP and _surrounded(analysis, node, hazards):
            hazards[id(node)] = Hazard(node, BETWEEN, "all its neighbours are in FP32")


def reach_outputs(analysis: GraphAnalysis, hazards: dict[int, Hazard]) -> None:
    """Add the views between an FP32 node and an FP32 output of the model.

    Rounded to FP16 and back before an output, an FP32 sum was wrong by a factor of 46 in a ResNetV2 on
    TensorRT-RTX 1.6.1 (the row `cast-round-trip-output` of quirks.toml), and it is pointless.
    """
    for port in analysis.graph.graph.output if analysis.graph.is_main else ():
        views, node = list[NodeProto](), analysis.producer(port.name)
        while node is not None and node.op_type in LAYOUTS and id(node) not in hazards:
            views.append(node)
            node = analysis.producer(node.input[0])
        alone = all(len([*analysis.readers(v.output[0])]) == (v is not views[0]) for v in views)
        if alone and analysis.stays_fp32(port.name) and id(node) in hazards:
            hazards.update((id(view), Hazard(view, BETWEEN, "between FP32 and an output")) for view in views)


def _surrounded(analysis: GraphAnalysis, node: NodeProto, hazards: Mapping[int, Hazard]) -> bool:
    """True if the node has neighbours, and all are FP32 nodes or FP32 inputs and outputs."""
    sources, sinks = ([t for t in ts if analysis.is_float(t)] for ts in (node.input, node.output))
    neighbours = [n for n in map(analysis.producer, sources) if n is not None]
    neighbours += [reader for t in sinks for _, reader in analysis.readers(t)]
    inputs = (t for t in sources if analysis.producer(t) is None and not analysis.is_constant(t))
    ends = [analysis.source(t) for t in inputs]
    ends += [name for t in sinks for name in analysis.aliases(t) if analysis.graph.is_output(name)]
    inside = all(id(n) in hazards for n in neighbours) and all(analysis.stays_fp32(t) for t in ends)
    return bool(neighbours) and inside
