"""Every error that `rewriter` raises on purpose: what went wrong, where, and what to do."""

import difflib
from collections.abc import Iterable
from os import PathLike
from typing import Any, Literal

from rewriter.base.text import one_line

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")
"""Note: worth knowing. Warning: inaccurate, or wrong on other data. Error: wrong on these samples."""

LIKENESS = 0.5  # from this likeness on (`difflib`), a name is taken for a misspelling of another

SHOWN = 60  # characters of a wrong value that a message shows

SLIP = 0.75
"""From this likeness on, a name is refused as a misspelling where other names are allowed."""


def did_you_mean(name: str, names: Iterable[str], likeness: float = LIKENESS) -> str:
    """`did you mean 'x'?`, for the known name that is closest; "" if none is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=likeness)
    return f"did you mean {close[0]!r}?" if close else ""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Returns a hint: the known name closest to `name`, or all names if none is close."""
    names = list(choices)
    return did_you_mean(name, names) or "choose from " + ", ".join(names)


def shortened(value: object) -> str:
    """The value as Python writes it, cut where it is long."""
    try:
        text = " ".join((repr(str(value)) if isinstance(value, str) else repr(value)).split())
    except (RecursionError, ValueError):  # Python writes no integer of over 4,300 digits
        text = "it"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}... (a {type(value).__name__})"


class RewriterError(Exception):
    """Base of all deliberate errors. They can be pickled, whatever their constructors take.

    Args:
        what: One sentence that says what is wrong.
        hint: What the user can do about it.
        where: File, node or tensor that it concerns, as the user knows it; or a part of the option's value.
        option: Key of the option that it concerns, such as `keep-fp32`, or keys.
        source: The file or variable that set the option; "": the command line or Python.
    """

    def __init__(
        self,
        what: str,
        *,
        hint: str,
        where: str | PathLike[str] | None = None,
        option: str | tuple[str, ...] = (),
        source: str = "",
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = None if where is None else str(where)
        self.hint = hint
        self.options = (option,) if isinstance(option, str) else option
        self.source = source

    @property
    def place(self) -> str:
        """The source of the error: the option, or what set it, and `where`."""
        option = self.source or ", ".join(f"`{key}`" for key in self.options)
        return " ".join(filter(None, (option, self.where)))

    def __str__(self) -> str:
        text = one_line(f"{self.place}: {self.what}" if self.place else self.what)
        return f"{text}\n  what to do: {one_line(self.hint)}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).__new__, (type(self), *self.args), self.__dict__


def described(error: Exception) -> str:
    """The text of an error for a message: ours without its place, or the type and text of another."""
    return error.what if isinstance(error, RewriterError) else f"{type(error).__name__}: {error}"


class UsageError(RewriterError):
    """An option, a pass name or a combination of them that makes no sense."""


class ModelError(RewriterError):
    """The model cannot be read, or is not a valid ONNX model."""


class UnbuildableError(ModelError):
    """TensorRT has no implementation of an operator, whatever is done to the rest of the model."""


class OutputError(RewriterError):
    """The result cannot be written; no partial file remains."""


class InputsError(RewriterError):
    """The sample data does not fit the model's inputs."""


class ArithmeticRunError(RewriterError):
    """ONNX Runtime could not load or run a model."""


class PassError(RewriterError):
    """A pass broke its contract: a defect of the pass, not of the model."""


class NativeError(RewriterError):
    """A native library crashed, hung or ran out of memory on a model, in a process of its own.

    Attributes:
        cause: `timeout`, or the name of the signal; "" if it raised an exception that cannot be passed on.
        log: End of what it printed.
    """

    def __init__(
        self,
        what: str,
        *,
        hint: str,
        where: str | PathLike[str] | None = None,
        cause: str = "",
        log: str = "",
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.cause = cause
        self.log = log


class EngineError(RewriterError):
    """A TensorRT library is missing, or cannot fulfil the request."""
