"""NVIDIA's driver and its GPUs, queried by ctypes without any library."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewriter.ir.errors import EngineError

KERNEL_MODULE = Path("/proc/driver/nvidia/version")
"""File with the release of NVIDIA's kernel module, on Linux."""

_NAME_BYTES = 256
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver describes it.

    Attributes:
        capability: Compute capability, e.g. (9, 0).
        driver_cuda: Newest CUDA that the driver supports, e.g. (13, 0).
        driver: Its release, e.g. 580.65.06; "" if unknown (Windows).
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
    """True if the driver is installed and finds a device."""
    return bool(gpus())


def first_gpu() -> Gpu:
    """The GPU that engines use.

    Raises:
        EngineError: there is no GPU.
    """
    found = gpus()
    if not found:
        raise no_gpu("no GPU")
    return found[0]


def no_gpu(why: str) -> EngineError:
    """The error for a machine without a GPU."""
    return EngineError(
        f"{why}: there is no NVIDIA driver here, or it finds no device",
        hint="`nvidia-smi` lists the GPUs, and a container needs --gpus all; "
        "without a GPU: `engine=onnxruntime` or `engine=emulation`",
    )


def gpus() -> list[Gpu]:
    """The GPUs that this process sees, in CUDA's order; none without a driver."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return []
    return list(_devices(driver)) if driver.cuInit(0) == 0 else []


def release(text: str) -> str:
    """The release in the version text of the kernel module; "" if there is none."""
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
    """The number that a driver function writes through its first argument; 0 if it fails."""
    value = ctypes.c_int(0)
    return value.value if function(ctypes.byref(value), *arguments) == 0 else 0
