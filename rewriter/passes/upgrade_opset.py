"""upgrade-opset: converts the model to the operator set of the run."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from rewriter.ir.graph import GraphEditor, display_name, open_graphs
from rewriter.ir.model import STANDARD_DOMAINS, Model, replace_items
from rewriter.ir.model.tensors import FLOATS
from rewriter.passes.algorithms.opsets import Converted, Converter
from rewriter.passes.base import Change, Context, Event, Exactness, ModelPass, Refusal
from rewriter.passes.inline_functions import inline


@dataclass(frozen=True)
class UpgradeOpset(ModelPass):
    """LayerNormalization exists from opset 17 on, BF16 Conv from 22.

    The adapters of onnx.version_converter convert every node whose operator changed on the way, in
    subgraphs, too. Where those adapters change results, they are corrected (Resize 10, RoiAlign 15, FP16 Clip
    and Pad), or the node is refused (Hardmax 12, GroupNormalization 20). Everything else stays.
    Model-local functions are inlined first, because the types inside them depend on the call.

    If it declines, the model stays unchanged.

    Declines:
        - an operator that cannot be converted, by name
        - an operator set that this onnx does not know
        - a model above the requested operator set
    """

    exactness = Exactness(1e-6, "bit-equal up to opset 18; AveragePool 19 sums in another order (one ulp)")
    imported = True
    example = """
        -<ir_version: 6, opset_import: ["" : 10]>
        -g (float[2,3] x) => (float[2,3] y) {
        -    y = Clip<min = 0.0, max = 6.0>(x)
        +<ir_version: 8, opset_import: ["" : 17]>
        +g (float[2,3] x) => (float[2,3] y)
        +<float low = {0.0}, float high = {6.0}> {
        +    y = Clip(x, low, high)
         }"""

    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        yield from _unlist_initializers(model)
        if model.opset and model.opset != context.opset:
            yield from self._convert(model, context.opset)

    def _convert(self, model: Model, target: int) -> list[Event]:
        newest = onnx.defs.onnx_opset_version()
        if model.opset > target:
            return [Refusal("model", f"it uses opset {model.opset}, above {target}, and keeps it")]
        if target > newest:
            return [Refusal("model", f"onnx {onnx.__version__} knows no opset {target}, only up to {newest}")]
        work = model.copy() if model.proto.functions else model
        inlined = inline(work, self.name)
        refusals: list[Event] = [event for event in inlined if isinstance(event, Refusal)]
        changed = Counter[str]() if refusals else self._rewrite(work, target, refusals)
        if refusals:
            return refusals
        text = ", ".join(f"{count} {op}" for op, count in sorted(changed.items()))
        text = f"rewritten: {text}" if text else "no node had to change"
        what = f"opset {model.opset} became {target}; {text}"
        for opset in work.proto.opset_import:
            if opset.domain in STANDARD_DOMAINS:
                opset.version = target
        needed = helper.find_min_ir_version_for(work.proto.opset_import, ignore_unknown=True)
        work.proto.ir_version = max(work.proto.ir_version, needed)
        work.mark_edited()
        model.adopt(work)
        return [*inlined, Change("model", what)]

    def _rewrite(self, work: Model, target: int, refusals: list[Event]) -> Counter[str]:
        """Converts the nodes, in place, and counts them; adds a refusal for each that cannot be converted."""
        editors = open_graphs(work, tag=self.name)
        others = FLOATS - {TensorProto.FLOAT}  # without these, a float after a plugin is FLOAT
        mixed = any(tensor.dtype in others for scope in work.facts().scopes for tensor in scope.values())
        usual = 0 if mixed else int(TensorProto.FLOAT)
        results = [list(Converter(editor, work.opset, target, usual).run()) for editor in editors]
        for node, reason in ((r.node, r.reason) for of_graph in results for r in of_graph if r.reason):
            text = f"{node.op_type} cannot be converted from opset {work.opset} to {target}: {reason}"
            refusals.append(Refusal(display_name(node), text))
        if refusals:
            return Counter()
        for editor, of_graph in reversed(list(zip(editors, results, strict=True))):
            with editor:
                for result in of_graph:
                    if not result.is_same:
                        _replace(editor, result)
        return Counter(r.node.op_type for of_graph in results for r in of_graph if not r.is_same)


def _replace(editor: GraphEditor, converted: Converted) -> None:
    """Puts the new nodes in place. The one that writes the node's outputs keeps its name and metadata."""
    node, own = converted.node, {name for name in converted.node.output if name}
    names = converted.names | {name: name for name in own}
    for tensor in converted.initializers:
        names[tensor.name] = _add_constant(editor, node, tensor)
    new: list[NodeProto] = []
    for step in converted.nodes:
        if step.op_type == "Constant":
            names[step.output[0]] = _add_constant(editor, node, step.attribute[0].t)
            continue
        for name in step.output:
            if name and name not in names:
                names[name] = editor.tensor(f"{display_name(node)}/{step.op_type}")
        inputs, outputs = ([names.get(name, "") for name in listed] for listed in (step.input, step.output))
        if own.isdisjoint(outputs):
            made = editor.make(step.op_type, inputs, outputs, name=f"{display_name(node)}/{step.op_type}")
        else:
            made = NodeProto(name=node.name, op_type=step.op_type, input=inputs, output=outputs)
            made.doc_string, made.domain = node.doc_string, node.domain
            made.metadata_props.extend(node.metadata_props)
        made.attribute.extend(step.attribute)
        new.append(made)
    editor.replace_producer(next(filter(None, node.output)), *new)  # the first output may be left out


def _add_constant(editor: GraphEditor, node: NodeProto, tensor: TensorProto) -> str:
    return editor.add_constant(f"{display_name(node)}/constant", numpy_helper.to_array(tensor))


def _unlist_initializers(model: Model) -> Iterator[Event]:
    """Removes initializers from the inputs, where IR 3 had to list them."""
    graph = model.proto.graph
    constants = {t.name for t in graph.initializer}
    inputs = [v for v in graph.input if v.name not in constants]
    count = len(graph.input) - len(inputs)
    if count:
        replace_items(graph.input, inputs)
        model.proto.ir_version = max(model.proto.ir_version, 4)  # from 4 on, they need not be inputs
        model.mark_edited()
        yield Change("model", f"{count} initializers are no longer listed as inputs")
