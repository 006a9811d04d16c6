"""Finds passes by name: our own, and those that other packages offer as entry points.

    [project.entry-points."rewriter.passes"]
    drop-identity = "acme_passes:DropIdentity"

The name of the entry point is the name of the pass. A plug-in is imported when a pipeline names its pass, so
that a broken package affects only those who use it. It cannot replace one of our own passes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rewriter.ir.base import Exactness, GraphPass, ModelPass, Pass
from rewriter.ir.errors import UsageError, nearest
from rewriter.pipeline.presets import GROUP


@dataclass(frozen=True)
class Plugin:
    """A pass that another package offers; it is not imported yet."""

    entry: EntryPoint

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def distribution(self) -> str:
        """Name and version of the package: `acme-passes 1.2`."""
        dist = self.entry.dist
        return f"{dist.name} {dist.version}" if dist else "an unknown distribution"

    def load(self) -> type[Pass]:
        """Import the class.

        Raises:
            UsageError: it cannot be imported, or is no pass of this name; the message names the package.
        """
        try:
            kind = self.entry.load()
        except Exception as error:  # whatever the package's own code raises
            raise self._error(f"it cannot be imported: {type(error).__name__}: {error}") from error
        if flaw := _flaw(kind, self.name):
            raise self._error(flaw)
        found: type[Pass] = kind
        return found

    def _error(self, what: str) -> UsageError:
        return UsageError(
            what,
            where=f"pass {self.name!r} of {self.distribution} ({self.entry.value})",
            hint="run without this pass, or repair, update or uninstall that package",
        )


def own_passes() -> dict[str, type[Pass]]:
    """Our own passes by name, in the order of `ALL`."""
    from rewriter.passes import ALL

    return {kind.name: kind for kind in ALL}


def plugins() -> list[Plugin]:
    """The passes of other packages, sorted by name and package, clashes included."""
    found = [Plugin(entry) for entry in entry_points(group=GROUP)]
    return sorted(found, key=lambda plugin: (plugin.name, plugin.distribution))


def find(name: str, where: str) -> type[Pass]:
    """Returns the pass of that name. `where` is the place in which the user wrote it.

    Raises:
        UsageError: there is none, two packages offer it, or its package is broken.
    """
    if own := own_passes().get(check_name(name, where)):
        return own
    offers = [plugin for plugin in plugins() if plugin.name == name]
    if len(offers) > 1:
        packages = " and ".join(plugin.distribution for plugin in offers)
        raise UsageError(f"{packages} both offer a pass {name!r}", where=where, hint="uninstall one of them")
    return offers[0].load()


def check_name(name: str, where: str) -> str:
    """Returns the name if a pass has it; plug-ins are not imported.

    Raises:
        UsageError: there is none.
    """
    own = own_passes()
    if name not in own and name not in (names := dict.fromkeys([*own, *(p.name for p in plugins())])):
        hint = f"{nearest(name, names)}; `rewriter passes` lists them"
        raise UsageError(f"unknown pass {name!r}", where=where, hint=hint)
    return name


def require(names: Iterable[str]) -> None:
    """Accepts names of passes."""
    for name in names:
        check_name(name, "")


def clashes(found: list[Plugin]) -> Iterator[str]:
    """A sentence for every name of `found` that another pass has."""
    own = own_passes()
    by_name: dict[str, list[str]] = defaultdict(list)
    for plugin in found:
        if plugin.name in own:
            yield f"{plugin.distribution} offers a pass {plugin.name!r}: ours of that name is used"
        else:
            by_name[plugin.name].append(plugin.distribution)
    for name, packages in by_name.items():
        if len(packages) > 1:
            yield f"{' and '.join(packages)} both offer a pass {name!r}: neither can be used"


def origin(kind: type[Pass]) -> str | None:
    """The package that offers a pass; None for our own, and for a class that no package offers."""
    if kind.__module__.startswith("rewriter."):
        return None
    value = f"{kind.__module__}:{kind.__qualname__}"
    return next((p.distribution for p in plugins() if p.entry.value == value), None)


def _flaw(kind: Any, name: str) -> str | None:
    """The reason why `kind` cannot be a pass of that name; our own passes are tested for the same."""
    if not (isinstance(kind, type) and issubclass(kind, (GraphPass, ModelPass))):
        return "it is no class that derives from GraphPass or ModelPass of rewriter.ir.base"
    if (own := getattr(kind, "name", None)) != name:
        return f"its class has the name {own!r}: it has to be that of the entry point"
    if not (is_dataclass(kind) and getattr(kind, "__dataclass_params__").frozen):  # noqa: B009
        return "it is no frozen dataclass"
    if missing := [one for one in ("before", "after") if not isinstance(getattr(kind, one, None), str)]:
        return f"it has no example: {missing[0]!r} is missing"
    if not isinstance(getattr(kind, "exactness", None), Exactness):
        return "its exactness is no Exactness of rewriter.ir.base"
    from rewriter.pipeline.text import options_of

    try:
        options_of(kind)
        kind()
    except Exception as error:  # the class is not ours
        return f"its options cannot be read: {error}"
    return None
