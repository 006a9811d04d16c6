"""Every error that `rewriter` raises on purpose: what went wrong, where, and what to do."""

from __future__ import annotations


class RewriterError(Exception):
    """Base of all deliberate errors.

    Args:
        what: One sentence that says what is wrong.
        where: File, node or tensor that it concerns, as the user knows it.
        hint: What the user can do about it.
    """

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  what to do: {self.hint}" if self.hint else text


class UsageError(RewriterError):
    """An option, a pass name or a combination of them that makes no sense."""


class ModelError(RewriterError):
    """The model cannot be read, or is not a valid ONNX model."""


class OutputError(RewriterError):
    """The result cannot be written; nothing is left behind."""


class InputsError(RewriterError):
    """The sample data does not fit the model's inputs."""


class ArithmeticRunError(RewriterError):
    """ONNX Runtime could not load or run a model."""


class PassError(RewriterError):
    """A pass broke its contract: a defect of the pass, not of the model."""


class EngineError(RewriterError):
    """A TensorRT library is missing, or cannot do what was asked of it."""
