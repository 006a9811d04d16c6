"""Values of tests as text: `values.txt` beside the tests of a folder."""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., Any])
NUMBERS = {"inf": math.inf, "nan": math.nan}


def values(test: Test) -> Test:
    """Parametrises a test by its section of `values.txt`: `[name of the test] names of the values`, and rows.

    A row has a Python literal for each name, with `inf` and `nan`, and may end with an id; ` | ` is between.
    """
    text = Path(inspect.getfile(test)).with_name("values.txt").read_text(encoding="utf-8")
    head, *rows = text.partition(f"\n[{test.__name__}] ")[2].partition("\n\n")[0].strip().split("\n")
    names, params = head.split(", "), []
    for *cells, last in (row.split(" | ") for row in rows):
        name = last if len(cells) == len(names) else None
        literals = cells if name else [*cells, last]
        params.append(pytest.param(*(eval(cell, NUMBERS) for cell in literals), id=name))
    parametrised: Test = pytest.mark.parametrize(names, params)(test)
    return parametrised
