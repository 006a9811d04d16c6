"""The files of one verification: samples, expected outputs, and both models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from rewriter.ir.errors import UsageError
from rewriter.ir.model import Model, save
from rewriter.ir.model import facts as tensor_facts
from rewriter.ir.model.facts import Facts
from rewriter.judge.expected import as_declared, widened
from rewriter.judge.judge import Judged, Standard, judge
from rewriter.runtime.emulation import reference
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.engines.protocol import EngineOutcome, Variant
from rewriter.runtime.engines.tensor_files import Span, StoredSamples, write_samples
from rewriter.runtime.figures.tolerances import TOLERANCES, Tolerance
from rewriter.runtime.inputs import Samples

MOST_SAMPLES = 16
"""Most samples that are compared; a warning reports that the others are not."""


@dataclass
class Workspace:
    """Models and arrays that all runs of one verification share, on disk.

    Attributes:
        folder: For all written files.
        shapes: The user's profile of inputs.
        expected: The original's outputs in FP32 for each sample.
    """

    original: Model
    fixed: Model
    samples: Samples
    folder: Path
    shapes: Mapping[str, Span] = field(default_factory=dict)
    fixed_facts: Facts = field(init=False)
    expected: StoredSamples = field(default_factory=lambda: StoredSamples(()))
    _stored: dict[str, StoredSamples] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_same_ports(self.original, self.fixed)
        self.fixed_facts = tensor_facts.infer(self.fixed)

    def compute_reference(self) -> None:
        """Runs the original in FP32 (no TF32) on ONNX Runtime, with one sample in memory at a time.

        Raises:
            ArithmeticRunError: ONNX Runtime cannot run the original.
        """
        with Session(reference(self.original, tensor_facts.infer(self.original)), gpu=True) as session:
            found = map(session.run, islice(self.samples, MOST_SAMPLES))
            self.expected = write_samples(self.folder / "expected", found)

    def judge(self, outcomes: Sequence[EngineOutcome], tolerance: Tolerance) -> Judged:
        """Compares builds with the original's outputs."""
        asked = None if tolerance in TOLERANCES.values() else tolerance
        return judge(self.expected, outcomes, Standard.of(self.original, tolerance, asked))

    def stored(self, model: Model, name: str) -> StoredSamples:
        """The samples on disk, in the types of the model's inputs."""
        if name not in self._stored:
            fed = (as_declared(model, feeds) for feeds in islice(self.samples, MOST_SAMPLES))
            self._stored[name] = write_samples(self.folder / f"samples-{name}", fed)
        return self._stored[name]

    def fixed_variant(self) -> Variant:
        """Returns the fixed model as it is deployed: with TF32 if the library uses it."""
        path = self._file(self.fixed, "fixed")
        return Variant("fixed", path, self.stored(self.fixed, "fixed"), shapes=self.shapes)

    def reference_variant(self) -> Variant:
        """The original in FP32, without TF32."""
        wide = widened(self.original)
        path = self._file(wide, "original")
        samples = self.stored(wide, "original")
        return Variant("original", path, samples, tf32=False, shapes=self.shapes)

    def _file(self, model: Model, name: str) -> Path:
        """Returns the file that the model was loaded from, or a new file if it was changed."""
        if model.path is not None and (model is self.original or model is self.fixed):
            return model.path
        return save(model, self.folder / f"{name}.onnx")


def require_same_ports(original: Model, fixed: Model) -> None:
    """Checks that both models have inputs and outputs of the same names; types may differ.

    Raises:
        UsageError: they are not two versions of one model.
    """
    for ports in ("inputs", "outputs"):
        names = [[port.name for port in getattr(model.signature, ports)] for model in (original, fixed)]
        missing, extra = ([n for n in names[i] if n not in names[1 - i]] for i in (0, 1))
        if missing or extra:
            found = [f"lacks {', '.join(missing)}"] if missing else []
            found += [f"has {', '.join(extra)} in addition"] if extra else []
            raise UsageError(
                f"it is not a version of {original.path or 'the original'}: of the {ports}, "
                f"it {' and '.join(found)}",
                where=str(fixed.path or "the fixed model"),
                hint="give the original first, then the model that was made from it",
            )
