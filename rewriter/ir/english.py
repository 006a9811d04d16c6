"""Plain English for messages: plurals, articles and short numbers, and text as a terminal may show it."""

from __future__ import annotations

import math
from itertools import chain

VOWELS = "aeiou"


def count(number: int, word: str) -> str:
    """`1 sample`, `2 samples`, `3 classes`, `4 boundaries`."""
    return f"{number} {word if number == 1 else plural(word)}"


def plural(word: str) -> str:
    """The plural of a regular noun."""
    if word.endswith(("s", "x", "ch", "sh")):
        return f"{word}es"
    if word.endswith("y") and word[-2:-1] not in VOWELS:
        return f"{word[:-1]}ies"
    return f"{word}s"


def article(word: str) -> str:
    """The word after `a` or `an`, by its first letter: a dict, an Einsum."""
    return f"{'an' if word[0].lower() in VOWELS else 'a'} {word}"


def figure(value: float) -> str:
    """A number as people write it: `65504`, `8.2e7`, `0.0018`, `NaN`, `infinity`."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinity" if value > 0 else "-infinity"
    if value == int(value) and abs(value) < 1e5:
        return str(int(value))
    if 1e-4 <= abs(value) < 1e5:
        return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


_CONTROLS = chain(range(0x20), range(0x7F, 0xA0))
"""C0 and C1: ESC and CSI begin sequences that move the cursor, set titles and answer as the keyboard."""

_DIRECTIONS = chain(range(0x202A, 0x202F), range(0x2066, 0x206A), (0x200E, 0x200F, 0x061C))
"""Unicode's bidirectional controls, which make text read as other text (CVE-2021-42574)."""

_SPELLED = {c: ascii(chr(c))[1:-1] for c in chain(_CONTROLS, _DIRECTIONS) if chr(c) not in "\n\t"}


def printable(text: str) -> str:
    """The text with control characters as escapes, `\\x1b` for ESC; lines and tabs stay."""
    return text.translate(_SPELLED)
