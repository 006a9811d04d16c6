"""The user's choice of an engine: its name, plugins and shapes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rewriter.ir.errors import UsageError, did_you_mean
from rewriter.ir.model import Signature
from rewriter.runtime.engines import this_machine
from rewriter.runtime.engines.tensor_files import Shape, Span
from rewriter.runtime.engines.this_machine import AUTO, Choice

Shapes = Mapping[str, Sequence[int]]
_PROFILE = "`min-shapes`, `opt-shapes`, `max-shapes`"


@dataclass(frozen=True)
class Deployment:
    """An engine with its plugins and profile; `deployment` makes and checks it.

    Attributes:
        plugins: Shared libraries with TensorRT plugins, as absolute paths.
        profile: Optimisation profile of inputs with dynamic axes; the others' come from the samples.
    """

    engine: str = AUTO
    plugins: tuple[Path, ...] = ()
    profile: Mapping[str, Span] = field(default_factory=dict)

    def choose(self) -> Choice:
        """The engine that runs here; see `this_machine.choose`."""
        return this_machine.choose(self.engine)

    def check(self, signature: Signature) -> None:
        """Check the profile against a model.

        Raises:
            UsageError: no such input, or a shape that it does not take.
        """
        ports = {port.name: port for port in signature.inputs}
        for name, span in self.profile.items():
            if name not in ports:
                parts = (f"the model has no input {name!r}", did_you_mean(name, ports))
                hint = "its inputs are " + ", ".join(ports)
                raise UsageError("; ".join(filter(None, parts)), where=_PROFILE, hint=hint)
            declared = ports[name].shape
            for shape in () if declared is None else span:
                assert declared is not None
                sizes = zip(declared, shape, strict=False)
                if len(shape) != len(declared) or any(isinstance(d, int) and d != s for d, s in sizes):
                    wanted = "x".join("?" if d is None else str(d) for d in declared) or "a scalar"
                    raise UsageError(
                        f"{_shown(shape)} does not fit input {name!r}, which is {wanted}",
                        where=_PROFILE,
                        hint="only axes without a number may vary",
                    )

    def check_data(self, samples: Mapping[str, Span]) -> None:
        """Check the data against the profile.

        Args:
            samples: Smallest, first and largest shape of each input.

        Raises:
            UsageError: a sample is out of the profile.
        """
        for name, (least, _, most) in self.profile.items():
            for shape in (samples[name][0], samples[name][2]) if name in samples else ():
                if not all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True)):
                    raise UsageError(
                        f"input {name!r} is {_shown(shape)} in the data, and the profile goes from "
                        f"{_shown(least)} to {_shown(most)}",
                        where=_PROFILE,
                        hint="widen it, or give data of its sizes",
                    )


def deployment(
    engine: str = AUTO,
    plugin_lib: Sequence[str | os.PathLike[str]] = (),
    min_shapes: Shapes | None = None,
    opt_shapes: Shapes | None = None,
    max_shapes: Shapes | None = None,
) -> Deployment:
    """Make a deployment from the user's options, and check them.

    Raises:
        EngineError: the engine cannot run here.
        UsageError: no such engine, a library that is not there, shapes that are not in order.
    """
    if engine != AUTO:
        this_machine.choose(engine)  # before any work
    libraries = tuple(Path(path).resolve() for path in plugin_lib)
    for path in libraries:
        if not path.is_file():
            raise UsageError(f"no such file: {path}", where="`plugin-lib`", hint="name a .so or .dll")
    return Deployment(engine, libraries, dict(_spans(min_shapes or {}, opt_shapes or {}, max_shapes or {})))


def _spans(low: Shapes, usual: Shapes, high: Shapes) -> Iterator[tuple[str, Span]]:
    """Profiles; a missing shape is replaced by another of the three."""
    for name in {**low, **usual, **high}:
        middle = usual.get(name) or high.get(name) or low[name]
        span = tuple(low.get(name, middle)), tuple(middle), tuple(high.get(name, middle))
        ordered = len({len(shape) for shape in span}) == 1 and all(
            a <= b <= c for a, b, c in zip(*span, strict=True)
        )
        if not ordered:
            raise UsageError(
                f"the shapes of {name!r} are not in order: {', '.join(map(_shown, span))}",
                where=_PROFILE,
                hint="each axis: smallest, usual and largest size, of one rank",
            )
        yield name, span


def _shown(shape: Shape) -> str:
    return "x".join(map(str, shape))
