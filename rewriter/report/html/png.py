"""PNG images as data URIs (PNG specification, third edition)."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

from rewriter.ir.model import Array

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _RGB = 0, 2

_HEAT = np.array([(13, 8, 40), (106, 23, 110), (188, 55, 84), (243, 120, 25), (252, 255, 164)], np.float64)
"""Dark to bright, so that it reads without colour, too."""


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


def heat(grey: Array) -> Array:
    """Returns grey levels of [height, width] as colours from dark to bright."""
    at = np.linspace(0.0, 255.0, len(_HEAT))
    channels = [np.interp(grey, at, _HEAT[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).astype(np.uint8)
