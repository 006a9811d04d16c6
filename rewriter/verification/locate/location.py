"""The result of `locate`, as plain data."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rewriter.base.text import Row, Summary, figure, rows_of
from rewriter.runtime.inputs.samples import DataSource


@dataclass(frozen=True)
class Step:
    """A tensor with its error against the original in FP32.

    Attributes:
        tensor: Its name in the other model; `node`, `op`: its producer.
        error: Relative L2, infinite for NaN and infinity; None if not measured, with a reason in `note`.
        added: Error that its node adds on exact inputs; known from an emulation only.
    """

    tensor: str
    node: str
    op: str
    error: float | None
    added: float | None = None
    note: str = ""


@dataclass(frozen=True, repr=False)
class Location(Summary):
    """The first wrong tensor of a model, and the errors around it.

    Attributes:
        engine: The engine of the other model, with its device.
        tolerance: A tensor with an error above it is wrong.
        outputs: The model's outputs with their errors.
        first: The first wrong tensor; None if no output is wrong, or if the models share no float tensor that
            leads to a wrong output (the order of a TopK, say).
        exact: True if all tensors that `first` is computed from are right. If not, the fault is between
            `right` and `first`.
        right: The last right tensors before `first`.
        chain: Tensors from `first` to the worst output.
        hiding: Tensors between `right` and `first` that could not be measured, with the reason. Marking them
            as outputs changes the results, so they are inside the fusion that goes wrong; or the engine has
            their elements in another order.
        kernel: The nodes that one kernel computes together with `first` where nothing is marked; empty if
            that is unknown.
        tensors: Number of comparable tensors; `compared`: of the measured ones among them; `given`: of the
            tensors between the engine's kernels, some of which are not recognised.
        builds, discarded: Builds of the search, and the number of them that failed or changed the outputs.
        original, other: Files of the models; None for one in memory.
    """

    engine: str
    tolerance: float
    outputs: tuple[Step, ...]
    first: Step | None = None
    exact: bool = True
    right: tuple[Step, ...] = ()
    chain: tuple[Step, ...] = ()
    hiding: tuple[Step, ...] = ()
    kernel: tuple[str, ...] = ()
    tensors: int = 0
    compared: int = 0
    given: int = 0
    builds: int = 0
    discarded: int = 0
    notes: tuple[str, ...] = ()
    data: DataSource | None = None
    original: Path | None = None
    other: Path | None = None

    def summary(self) -> Iterator[Row]:
        first = "not found: the models share no tensor before it" if self.wrong else "none"
        if self.first is not None:
            first = f"{_shown(self.first)}{'' if self.exact else ', or between it and the right ones'}"
        yield "first wrong", first
        yield from rows_of("still right", map(_shown, self.right), 3)
        yield from rows_of("outputs", map(_shown, self.outputs), 3)
        yield "engine", f"{self.engine}; above {figure(self.tolerance)} is wrong"
        yield from rows_of("notes", self.notes, 2)

    @property
    def wrong(self) -> tuple[Step, ...]:
        """The outputs whose error is above the tolerance."""
        return tuple(s for s in self.outputs if s.error is None or not s.error <= self.tolerance)


def _shown(step: Step) -> str:
    error = "not measured" if step.error is None else f"relative L2 {figure(step.error)}"
    return f"{step.tensor} ({step.op} {step.node!r}, {error})"
