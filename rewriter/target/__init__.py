"""Facts about one TensorRT on one GPU: the operators it accepts and fuses, its defects and its costs."""

from rewriter.target.target import NAMED_TARGETS, TYPED_SINCE, Target, numbers, title

__all__ = ["NAMED_TARGETS", "TYPED_SINCE", "Target", "numbers", "title"]
