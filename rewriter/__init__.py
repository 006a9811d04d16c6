"""Makes ONNX models safe for a TensorRT build in FP16, and proves it.

The names below load on first use, so that `import rewriter` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rewriter.base import Target
    from rewriter.data.parity import InputComparison
    from rewriter.engines.probe.answers import Answers
    from rewriter.errors import RewriterError
    from rewriter.jobs.compare_inputs import compare_inputs
    from rewriter.jobs.findings import Finding, ScanResult
    from rewriter.jobs.fix.api import fix
    from rewriter.jobs.fix.result import FixResult
    from rewriter.jobs.locate import locate
    from rewriter.jobs.probe import probe
    from rewriter.jobs.scan import scan
    from rewriter.jobs.verify import verify
    from rewriter.model import Model, load, save
    from rewriter.plan import Plan
    from rewriter.verification.locate import Location
    from rewriter.verification.result import VerifyResult
    from rewriter.verification.verdict import Verdict

__version__ = "0.1.0"

_HOMES = {
    "Answers": "engines.probe.answers",
    "Finding": "jobs.findings",
    "FixResult": "jobs.fix.result",
    "InputComparison": "data.parity",
    "Location": "verification.locate",
    "Model": "model",
    "Plan": "plan",
    "RewriterError": "errors",
    "ScanResult": "jobs.findings",
    "Target": "base",
    "Verdict": "verification.verdict",
    "VerifyResult": "verification.result",
    "compare_inputs": "jobs.compare_inputs",
    "fix": "jobs.fix.api",
    "load": "model",
    "locate": "jobs.locate",
    "probe": "jobs.probe",
    "save": "model",
    "scan": "jobs.scan",
    "verify": "jobs.verify",
}

__all__ = [
    "Answers",
    "Finding",
    "FixResult",
    "InputComparison",
    "Location",
    "Model",
    "Plan",
    "RewriterError",
    "ScanResult",
    "Target",
    "Verdict",
    "VerifyResult",
    "__version__",
    "compare_inputs",
    "fix",
    "load",
    "locate",
    "probe",
    "save",
    "scan",
    "verify",
]


def __getattr__(name: str) -> object:
    """Imports the module of a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"rewriter.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
