"""JSON of others, read so that no text can do more than be refused."""

from __future__ import annotations

import json
from typing import Any


def from_json(text: str) -> Any:
    """The content of a JSON text.

    Raises:
        json.JSONDecodeError: it is not JSON, or nested more deeply than Python reads (about 1,000 levels).
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deeply", text, 0) from None
