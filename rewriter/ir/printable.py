"""Text of models and files as a terminal may show it: what would control the terminal is spelled out."""

from __future__ import annotations

from itertools import chain

_CONTROLS = chain(range(0x20), range(0x7F, 0xA0))
"""C0 and C1: ESC and CSI begin sequences that move the cursor, set titles and answer as the keyboard."""

_DIRECTIONS = chain(range(0x202A, 0x202F), range(0x2066, 0x206A), (0x200E, 0x200F, 0x061C))
"""Unicode's bidirectional controls, which make text read as other text (CVE-2021-42574)."""

_SPELLED = {code: ascii(chr(code))[1:-1] for code in chain(_CONTROLS, _DIRECTIONS)}
_LINES = {ord("\n"): "\n", ord("\t"): "\t"}


def printable(text: str) -> str:
    """The text with control characters as escapes, `\\x1b` for ESC; lines and tabs stay."""
    return text.translate(_SPELLED | _LINES)
