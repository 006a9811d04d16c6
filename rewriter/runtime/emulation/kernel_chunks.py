"""Splits a convolution kernel into the chunks that a Tensor Core sums at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

CHUNK = 16
"""Products that a Tensor Core adds before it rounds the accumulator; see `accumulate`."""

_END = 2**63 - 1
"""End of a Slice that goes to the end of the axis."""

Box = tuple[tuple[int, int], ...]
"""Start and end of a chunk along the channels of a group and along every axis of the kernel."""


def boxes(sizes: Sequence[int], group: int, *, apart: bool = False) -> Iterator[Box]:
    """The chunks of a kernel [channels, *spatial]: up to 16 channels of one tap, or fewer of several taps.

    Together they cover the kernel once. The channels of a grouped kernel stay together.

    Args:
        apart: Each chunk has one tap, even if that gives it few products.
    """
    channels, *spatial = sizes
    *outer, inner = spatial
    deep = channels if group > 1 else min(channels, CHUNK)
    wide = 1 if apart else max(1, CHUNK // deep)
    for taps in product(*map(range, outer)):
        for tap in range(0, inner, wide):
            for channel in range(0, channels, deep):
                last = (min(tap + wide, inner), min(channel + deep, channels))
                yield ((channel, last[1]), *((t, t + 1) for t in taps), (tap, last[0]))


def slices(
    chunks: Sequence[Box], sizes: Sequence[int], dilations: Sequence[int], group: int
) -> dict[str, list[list[int]]]:
    """Positions of the chunks in the padded input and in the kernel, as starts and ends of Slice."""
    tables: dict[str, list[list[int]]] = {"x_from": [], "x_to": [], "w_from": [], "w_to": []}
    for (low, high), *taps in chunks:
        whole = group > 1  # the input holds the channels of all groups
        tables["w_from"].append([low, *(first for first, _ in taps)])
        tables["w_to"].append([high, *(last for _, last in taps)])
        steps = list(zip(taps, sizes[1:], dilations, strict=True))
        tables["x_from"].append([0 if whole else low, *(first * d for (first, _), _, d in steps)])
        ends = [(last - size) * d or _END for (_, last), size, d in steps]
        tables["x_to"].append([_END if whole else high, *ends])
    return tables
