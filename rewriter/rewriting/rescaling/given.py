"""Exponents from a saved plan, put into a graph again: no ranges are needed, and none are trusted."""

from __future__ import annotations

from collections.abc import Mapping

from rewriter.errors import UsageError
from rewriter.graph import GraphEditor
from rewriter.rewriting.rescaling.apply import apply
from rewriter.rewriting.rescaling.classes import ZERO
from rewriter.rewriting.rescaling.freedom import Freedom, analyse

HINT = (
    'correct "rescaled" in the plan, or save a new one with --save-plan: a plan fits the model, the --passes '
    "and the --skip that it was saved for"
)


def rescale_as_given(graph: GraphEditor, exponents: Mapping[str, int]) -> int:
    """Scale the tensors of one graph by 2^exponent, those that are not named by 1.

    Returns:
        How many constants and epsilons have a new value.

    Raises:
        UsageError: a tensor that the graph does not compute, or exponents that its operators do not
            allow together; one of the tensors is named.
    """
    freedom = analyse(graph)
    for tensor in exponents:
        if tensor not in freedom.tensors:
            raise UsageError(
                f"it scales {tensor}, which the model does not compute", where="the plan", hint=HINT
            )
    return apply(graph, freedom, _completed(freedom, exponents))


def _completed(freedom: Freedom, exponents: Mapping[str, int]) -> dict[int, int]:
    """The exponents of all classes: those of constants follow from those of tensors."""
    found, names = {ZERO: 0}, {ZERO: "what cannot be scaled"}
    for tensor, number in freedom.tensors.items():
        root, k = freedom.classes.root(number), exponents.get(tensor, 0)
        names.setdefault(root, tensor)
        if found.setdefault(root, k) != k:
            text = f"it scales {tensor} by 2^{k} and {names[root]} by 2^{found[root]}: they go together"
            raise UsageError(text, where="the plan", hint=HINT)
    for terms in freedom.classes.equations():
        rest = -sum(c * found[root] for root, c in terms.items() if root in found)
        taker = next((root for root in terms if root not in found), None)
        if taker is not None and not rest % terms[taker]:
            found[taker] = rest // terms[taker]
        elif rest:
            named = ", ".join(names[root] for root in terms if root in names)
            raise UsageError(f"the exponents of {named} do not fit each other", where="the plan", hint=HINT)
    return {root: k for root, k in found.items() if k}
