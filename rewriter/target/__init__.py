"""Facts about one TensorRT on one GPU: the operators it accepts and fuses, its defects and its costs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rewriter.base.errors import SLIP, UsageError, did_you_mean

RTX_BELOW = (5,)
"""A release below it without a library is one of TensorRT-RTX: TensorRT's own are 8 and later."""

TYPED_SINCE = (9,)
"""The first TensorRT with strongly typed networks; the builders of earlier ones choose all types."""

ALWAYS_TYPED_SINCE = (11,)
"""The first TensorRT without weakly typed networks: no precision of a layer, no FP16 flag of the builder."""

MAJORS: Mapping[str, range] = {"tensorrt": range(7, 13), "tensorrt-rtx": range(1, 3)}
"""Releases that a target may be, with one after the newest known."""

CAPABILITIES = range(50, 131)
"""Compute capabilities of the GPUs of these releases, and of some that may come."""


@dataclass(frozen=True)
class Target:
    """The TensorRT that the model is for. `version` is () when it is not known, and so is `gpus`.

    `gpus` has compute capabilities, such as `sm_87`; `device` is "dla" for the accelerator beside the GPU.
    `answers` holds the answer of each probe of `rewriter probe`, by name.
    `known_from` names the library, the GPU and the source of these; "" if there are no probe results.
    """

    library: str = "tensorrt"
    version: tuple[int, ...] = ()
    answers: Mapping[str, str] = field(default_factory=dict, compare=False)
    known_from: str = field(default="", compare=False)
    gpus: tuple[str, ...] = ()
    device: str = ""

    def __str__(self) -> str:
        release = f" {'.'.join(map(str, self.version))}" if self.version else ""
        gpus = " or ".join(self.gpus) + (f" ({self.device.upper()})" if self.device else "")
        return f"{self.library}{release}" + (f" on {gpus}" if gpus else "")

    @property
    def weakly_typed(self) -> bool:
        """True if the builder takes precisions of layers: TensorRT before 11, or of an unknown release."""
        return self.library == "tensorrt" and self.version < ALWAYS_TYPED_SINCE

    @classmethod
    def parse(cls, text: str) -> Target:
        """`tensorrt`, `tensorrt-rtx`, a version such as `10.0.1`, or both: `tensorrt-rtx 1.6`.

        A compute capability may follow: `10.13 sm_110`. Names such as `jetpack-6.2` are in `NAMED_TARGETS`.

        Raises:
            UsageError: no such library, or no release.
        """
        if named := NAMED_TARGETS.get(text.strip().lower()):
            return named
        number = r"(?:0|[1-9]\d*)"
        match = re.fullmatch(
            rf"(tensorrt(?:-rtx)?)?[ =:-]*({number}(?:\.{number})*)?(?:[ ,]*(sm_\d+))?", text.strip().lower()
        )
        version = tuple(int(part) for part in (match[2] or "").split(".") if part) if match else ()
        library = (match and match[1]) or ("tensorrt-rtx" if () < version < RTX_BELOW else "tensorrt")
        majors, gpu = MAJORS[library], int(match[3][3:]) if match and match[3] else None
        if not match or not text.strip() or (version or (majors[0],))[0] not in majors:
            near = did_you_mean(text.strip().lower(), (*MAJORS, *NAMED_TARGETS), SLIP)
            releases = ", or ".join(f"{name} {m[0]} to {m[-1]}" for name, m in MAJORS.items())
            hint = near or f"{releases}, such as 10.0.1; {', '.join(NAMED_TARGETS)}"
            raise UsageError(f"unknown target {text!r}", option="target", hint=hint)
        if gpu is not None and gpu not in CAPABILITIES:
            hint = f"sm_{CAPABILITIES[0]} to sm_{CAPABILITIES[-1]}, such as sm_87"
            raise UsageError(f"no GPU has the compute capability {match[3]}", option="target", hint=hint)
        return cls(library, version, gpus=(match[3],) if match[3] else ())


NAMED_TARGETS = {
    "jetpack-6.2": Target(version=(10, 3), gpus=("sm_87",)),
    "jetpack-7.1": Target(version=(10, 13, 3), gpus=("sm_110",)),
    "jetpack-7.2.2": Target(version=(11, 4, 1), gpus=("sm_87", "sm_110")),
    "dla": Target(version=(11, 4, 1), gpus=("sm_87",), device="dla"),
}
"""Targets by name. Nodes that the accelerator `dla` does not accept (`operators.toml`) run on the GPU."""


def title(library: str) -> str:
    """NVIDIA's name for a library, from the name of its target or its module."""
    return "TensorRT-RTX" if library.endswith("rtx") else "TensorRT"


def numbers(release: str) -> tuple[int, ...]:
    """The numbers of a release: (10, 13, 3) of 10.13.3."""
    return tuple(map(int, re.findall(r"\d+", release)))
