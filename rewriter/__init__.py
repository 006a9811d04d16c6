"""Makes ONNX models accurate in TensorRT FP16, and checks the result against your original.

The names below load on first use, so that `import rewriter` costs nothing.
"""

from importlib import import_module

TYPE_CHECKING = False  # `typing` takes longer to load than all that Ctrl-C is not caught in

if TYPE_CHECKING:
    from rewriter import hazards, passes
    from rewriter.api import compare_inputs, emulate, fix, locate, probe, run_passes, scan, verify
    from rewriter.base.errors import RewriterError
    from rewriter.input_comparison.job import InputComparison
    from rewriter.ir.model import Model, load, save
    from rewriter.ir.plan import Plan
    from rewriter.jobs.record import record
    from rewriter.jobs.scan import Finding, ScanResult
    from rewriter.pipeline.options import FixOptions, ScanOptions, VerifyOptions
    from rewriter.report.explain import rule, why
    from rewriter.report.results import FixResult, VerifyResult
    from rewriter.target import Target
    from rewriter.target.probes import Answers
    from rewriter.verification.locate import Location
    from rewriter.verification.verdict import Verdict

__version__ = "0.1.0"

_HOMES = {
    "target": "Target",
    "base.errors": "RewriterError",
    "ir.model": "Model load save",
    "ir.plan": "Plan",
    "report.explain": "rule why",
    "api": "compare_inputs emulate fix locate probe run_passes scan verify",
    "jobs.scan": "Finding ScanResult",
    "report.results": "FixResult VerifyResult",
    "jobs.record": "record",
    "verification.locate": "Location",
    "verification.verdict": "Verdict",
    "input_comparison.job": "InputComparison",
    "pipeline.options": "FixOptions ScanOptions VerifyOptions",
    "target.probes": "Answers",
}
"""Public names by their modules."""

_ROOMS = ("hazards", "passes")
"""Packages that are part of the API as a whole: `rewriter.passes.ALL`, `rewriter.hazards.Hazard`."""

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
    "emulate",
    "fix",
    "hazards",
    "load",
    "locate",
    "passes",
    "probe",
    "record",
    "rule",
    "run_passes",
    "save",
    "scan",
    "verify",
    "why",
]


def __getattr__(name: str) -> object:
    """Imports the module of a public name on first use (PEP 562)."""
    if name in _ROOMS:
        return import_module(f"rewriter.{name}")
    home = next((module for module, names in _HOMES.items() if name in names.split()), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"rewriter.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
