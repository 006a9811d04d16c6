"""postpone-resize: Convs that stay after the Resize, with the reasons; branches."""

from __future__ import annotations

from graphs import apply, ops
from resized import SHAPED, model

from rewriter.model import load
from rewriter.passes.postpone_resize import PostponeResize


def test_sizes_with_a_symbolic_batch_are_declined() -> None:
    before = model(SHAPED, "float[N,6,4,4] b", constants="int64[2] s = {8, 8}").whole()
    shape = next(v for v in before.graph.value_info if v.name == "p").type.tensor_type.shape
    shape.dim[0].dim_param = "N"
    after, report = apply(PostponeResize(work=0), load(before))
    assert ops(after)[-1] == "Conv"
    assert ["an unknown batch" in refusal.reason for refusal in report.refusals] == [True]
