"""PNG images as data URIs (PNG specification, third edition)."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

from rewriter.ir.model import Array

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _RGB = 0, 2


def data_uri(pixels: Array) -> str:
    """Returns an image of [height, width] or [height, width, 3], uint8."""
    return "data:image/png;base64," + base64.b64encode(encoded(pixels)).decode("ascii")


def encoded(pixels: Array) -> bytes:
    """Returns the bytes of a PNG file with 8 bits per channel."""
    height, width = pixels.shape[:2]
    kind = _RGB if pixels.ndim == 3 else _GREY
    rows = np.ascontiguousarray(pixels, np.uint8).reshape(height, -1)
    filtered = np.pad(rows, ((0, 0), (1, 0)))  # filter 0 of every line
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(filtered.tobytes(), 9)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(name, content) for name, content in parts)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
