"""NVIDIA's driver: whether it is there, its GPUs, and what they can do. Needs nothing installed."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KERNEL_MODULE = Path("/proc/driver/nvidia/version")
"""Where NVIDIA's kernel module says its release, on Linux."""

_NAME_BYTES = 256
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver describes it.

    Attributes:
        capability: Compute capability, e.g. (9, 0).
        driver_cuda: Newest CUDA that the driver supports, e.g. (13, 0).
        driver: Its release, e.g. 580.65.06; "" where the system does not tell (Windows).
    """

    name: str
    capability: tuple[int, int]
    driver_cuda: tuple[int, int]
    driver: str = ""

    def __str__(self) -> str:
        major, minor = self.capability
        cuda = ".".join(map(str, self.driver_cuda))
        return f"{self.name} (compute capability {major}.{minor}, driver for CUDA {cuda})"


def has_gpu() -> bool:
    """Whether the driver is there and sees a device."""
    return bool(gpus())


def gpus() -> list[Gpu]:
    """The GPUs that this process sees, in CUDA's order; none without a driver."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return []
    return list(_devices(driver)) if driver.cuInit(0) == 0 else []


def release(text: str) -> str:
    """The driver's release out of what its kernel module says of itself; "" if it is not there."""
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return found[1] if found else ""


def _installed_release() -> str:
    try:
        return release(KERNEL_MODULE.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""


def _devices(driver: Any) -> Iterator[Gpu]:
    version = _number(driver.cuDriverGetVersion)
    for index in range(_number(driver.cuDeviceGetCount)):
        device = _number(driver.cuDeviceGet, index)
        name = ctypes.create_string_buffer(_NAME_BYTES)
        driver.cuDeviceGetName(name, _NAME_BYTES, device)
        capability = tuple(
            _number(driver.cuDeviceGetAttribute, which, device)
            for which in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR)
        )
        yield Gpu(
            name.value.decode(errors="replace"),
            (capability[0], capability[1]),
            (version // 1000, version % 1000 // 10),
            _installed_release(),
        )


def _number(function: Any, *arguments: int) -> int:
    """What a function of the driver writes through its first argument; 0 if it fails."""
    value = ctypes.c_int(0)
    return value.value if function(ctypes.byref(value), *arguments) == 0 else 0
