"""Makes ONNX models safe for a TensorRT build in FP16, and proves it.

The names below load on first use, so that `import rewriter` costs nothing.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # `typing` takes longer to load than all that Ctrl-C is not caught in

if TYPE_CHECKING:
    from rewriter import hazards, passes
    from rewriter.api import compare_inputs, fix, locate, probe, scan, verify
    from rewriter.base import Target
    from rewriter.data.parity import InputComparison
    from rewriter.engines.probe.answers import Answers
    from rewriter.errors import RewriterError
    from rewriter.jobs.findings import Finding, ScanResult
    from rewriter.jobs.fix.result import FixResult
    from rewriter.model import Model, load, save
    from rewriter.pipeline.options import FixOptions, ScanOptions, VerifyOptions
    from rewriter.plan import Plan
    from rewriter.verification.locate import Location
    from rewriter.verification.verdict import Verdict
    from rewriter.verification.verify_result import VerifyResult

__version__ = "0.1.0"

_HOMES = {
    "Answers": "engines.probe.answers",
    "Finding": "jobs.findings",
    "FixOptions": "pipeline.options",
    "FixResult": "jobs.fix.result",
    "InputComparison": "data.parity",
    "Location": "verification.locate",
    "Model": "model",
    "Plan": "plan",
    "RewriterError": "errors",
    "ScanOptions": "pipeline.options",
    "ScanResult": "jobs.findings",
    "Target": "base",
    "Verdict": "verification.verdict",
    "VerifyOptions": "pipeline.options",
    "VerifyResult": "verification.verify_result",
    "compare_inputs": "api",
    "fix": "api",
    "load": "model",
    "locate": "api",
    "probe": "api",
    "save": "model",
    "scan": "api",
    "verify": "api",
}

_ROOMS = ("hazards", "passes")
"""Packages that are part of the API as a whole: `rewriter.passes.run`, `rewriter.hazards.Hazard`."""

__all__ = [
    "Answers",
    "Finding",
    "FixOptions",
    "FixResult",
    "InputComparison",
    "Location",
    "Model",
    "Plan",
    "RewriterError",
    "ScanOptions",
    "ScanResult",
    "Target",
    "Verdict",
    "VerifyOptions",
    "VerifyResult",
    "__version__",
    "compare_inputs",
    "fix",
    "hazards",
    "load",
    "locate",
    "passes",
    "probe",
    "save",
    "scan",
    "verify",
]


def __getattr__(name: str) -> object:
    """Imports the module of a public name on first use (PEP 562)."""
    if name in _ROOMS:
        return import_module(f"rewriter.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"rewriter.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
