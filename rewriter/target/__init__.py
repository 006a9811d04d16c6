"""What one TensorRT on one GPU does: what it takes, fuses, gets wrong, and costs."""

from rewriter.target.target import NAMED_TARGETS, TYPED_SINCE, Target, numbers, title

__all__ = ["NAMED_TARGETS", "TYPED_SINCE", "Target", "numbers", "title"]
