"""Plain English for messages, text as a terminal may show it, and results in a few lines."""

import math
import re
import shlex
import unicodedata
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

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


class _Spelled(dict[int, str | int]):
    """For `str.translate`: controls, format characters, ends of lines and halves of pairs as escapes.

    ESC and CSI begin sequences that move the cursor, set titles and make links; bidirectional controls make
    text read as other text (CVE-2021-42574). U+200C and U+200D only join letters and emoji.
    """

    def __missing__(self, code: int) -> str | int:
        spelled = unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        if not spelled or code in (0x200C, 0x200D):
            self[code] = code
        elif 0xDC80 <= code <= 0xDCFF:  # a byte of a file's name that is no text
            self[code] = f"\\x{code - 0xDC00:02x}"
        else:  # as shells read it, too
            self[code] = f"\\u{code:04x}" if 0x80 <= code <= 0xFF else ascii(chr(code))[1:-1]
        return self[code]


_SPELLED = _Spelled()

_COMMANDS = re.compile(
    r"::(?=(?:add|debug|echo|end|error|group|internal|notice|remove|save|set|stop|warning)[a-z-]*(?: |::))"
    r"|##(?=\w*\[)",
    re.IGNORECASE,
)
"""Commands that GitHub, Azure and TeamCity obey in a job's log, whose lines may be wrapped text."""


def one_line(text: str) -> str:
    """Text of a file as people read it: on one line, with `\\x1b` for ESC, and without commands."""
    return _COMMANDS.sub(lambda match: f"\\x{ord(match[0][0]):02x}{match[0][1]}", text.translate(_SPELLED))


def command_line(words: Iterable[object]) -> str:
    """A command to be copied into a shell, on one line; a `Path` that begins with `-` is no option."""
    return " ".join(_word(f"./{w}" if isinstance(w, Path) and str(w)[0] == "-" else str(w)) for w in words)


def _word(word: str) -> str:
    if one_line(word) == word:
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{one_line(escaped)}'"


MOST_ROWS = 16
"""Rows of a summary: what a result holds beyond them is in its attributes and in the report."""

WIDTH = 160  # characters of a row's text

Row = tuple[str, str]
"""A line of a summary: its label, or "" to go on under the last one, and its text."""


class Summary:
    """A data class that shows itself in a few lines; it needs `@dataclass(repr=False)`."""

    @abstractmethod
    def summary(self) -> Iterable[Row]:
        """The rows; the first one has the verdict."""

    def __repr__(self) -> str:
        rows, last = list[Row](), ""
        for label, text in islice(self.summary(), MOST_ROWS):
            plain = one_line(text)
            short = plain if len(plain) <= WIDTH else f"{plain[: WIDTH - 3]}..."
            rows.append(("" if label == last else one_line(label), short))
            last = label or last
        width = max((len(label) for label, _ in rows), default=0)
        return "\n".join([type(self).__name__, *(f"  {label:<{width}}  {text}" for label, text in rows)])


def rows_of(label: str, texts: Iterable[str], most: int | None = 4, rest: str = "") -> Iterator[Row]:
    """The first texts under one label, and the number of the others."""
    items = list(texts)
    yield from ((label, text) for text in items[:most])
    if left := len(items[most:] if most is not None else ()):
        yield label, f"... and {left} more{rest}"
