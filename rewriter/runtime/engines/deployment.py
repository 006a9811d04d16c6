"""The user's choice of an engine: its name, plugins and shapes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rewriter.base.errors import UsageError
from rewriter.runtime.engines import this_machine
from rewriter.runtime.engines.tensor_files import Shape, Span
from rewriter.runtime.engines.this_machine import AUTO, Choice

Shapes = Mapping[str, Sequence[int]]
PROFILE = ("min-shapes", "opt-shapes", "max-shapes")


@dataclass(frozen=True)
class Deployment:
    """An engine with its plugins (absolute paths) and profile; `deployment` makes and checks it.

    The profile may name inputs with dynamic axes; the samples give the shapes of all others.

    Attributes:
        lacking: Inputs of the profile with the index of a shape that the user did not give.
    """

    engine: str = AUTO
    plugins: tuple[Path, ...] = ()
    profile: Mapping[str, Span] = field(default_factory=dict)
    lacking: frozenset[tuple[str, int]] = frozenset()

    def filled(self, sampled: Mapping[str, Span]) -> Deployment:
        """The deployment with the samples' shapes in place of those that the user did not give."""
        profile = dict(self.profile)
        for name in {name for name, _ in self.lacking} & sampled.keys():
            if len(sampled[name][0]) != len(profile[name][0]):
                continue  # the caller says what is wrong
            own = (sampled[name][at] if (name, at) in self.lacking else profile[name][at] for at in range(3))
            axes = list[tuple[int, ...]]()
            for low, usual, high in zip(*own, strict=False):
                usual = min(max(low, usual), high) if (name, 1) in self.lacking else usual
                least = min(low, usual) if (name, 0) in self.lacking else low
                axes.append((least, usual, max(high, usual) if (name, 2) in self.lacking else high))
            low, usual, high = (tuple(axis[at] for axis in axes) for at in range(3))
            profile[name] = low, usual, high
        return replace(self, profile=profile)

    def beyond(self, sampled: Mapping[str, Span]) -> dict[str, tuple[Shape, Shape]]:
        """The largest shapes of the samples and of the profile, for each input where the latter is larger."""
        both = self.profile.keys() & sampled.keys()
        pairs = {name: (sampled[name][2], self.profile[name][2]) for name in sorted(both)}
        return {name: pair for name, pair in pairs.items() if any(a < b for a, b in zip(*pair, strict=True))}

    def choose(self) -> Choice:
        return this_machine.choose(self.engine)


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
            raise UsageError(f"no such file: {path}", option="plugin-lib", hint="name a .so or .dll")
    given = (min_shapes or {}, opt_shapes or {}, max_shapes or {})
    spans = dict(_spans(*given))
    lacking = frozenset((name, at) for name in spans for at, shapes in enumerate(given) if name not in shapes)
    return Deployment(engine, libraries, spans, lacking)


def _spans(low: Shapes, usual: Shapes, high: Shapes) -> Iterator[tuple[str, Span]]:
    """Profiles; a missing shape is replaced by another of the three."""
    for name in {**low, **usual, **high}:
        middle = usual.get(name) or high.get(name) or low[name]
        span = tuple(low.get(name, middle)), tuple(middle), tuple(high.get(name, middle))
        one_rank = len({len(shape) for shape in span}) == 1
        if not one_rank or not all(a <= b <= c for a, b, c in zip(*span, strict=True)):
            what = f"the shapes of {name!r} are not in order: {', '.join(map(shown, span))}"
            hint = "each axis: smallest, usual and largest size, of one rank"
            raise UsageError(what, option=PROFILE, hint=hint)
        yield name, span


def shown(shape: Shape) -> str:
    """A shape in the form of `--min-shapes`: 1x3x224x224."""
    return "x".join(map(str, shape))
