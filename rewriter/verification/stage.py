"""The files of one verification: samples, what the original gives, and the two models as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rewriter.data.inputs import Samples
from rewriter.emulation import reference
from rewriter.engines.onnxruntime import Session
from rewriter.engines.protocol import Span, Variant
from rewriter.engines.tensors import Samples as StoredSamples
from rewriter.engines.tensors import read_tensors, write_samples, write_tensors
from rewriter.errors import UsageError
from rewriter.figures.tolerances import precision_of
from rewriter.model import Array, Model, save
from rewriter.model import facts as tensor_facts
from rewriter.model.facts import Facts
from rewriter.verification.checks import as_declared, selects_rows

MOST_SAMPLES = 16
"""Samples that are compared; the rest is left out, and told."""


@dataclass
class Stage:
    """What all runs of one verification share; the large arrays stay on disk.

    Attributes:
        folder: Everything that is written goes there.
        shapes: Profile of inputs, from the user.
    """

    original: Model
    fixed: Model
    samples: Samples
    folder: Path
    shapes: Mapping[str, Span] = field(default_factory=dict)
    fixed_facts: Facts = field(init=False)
    _expected: list[Path] = field(default_factory=list)
    _stored: dict[str, StoredSamples] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_alike(self.original, self.fixed)
        self.fixed_facts = tensor_facts.infer(self.fixed)

    @property
    def selects_rows(self) -> bool:
        """Whether rows of the outputs may come in another order."""
        return selects_rows(self.original)

    def __len__(self) -> int:
        return min(len(self.samples), MOST_SAMPLES)

    def compute_reference(self) -> None:
        """Run the original in FP32 on ONNX Runtime's CPU, one sample in memory at a time.

        Raises:
            ArithmeticRunError: ONNX Runtime cannot run the original.
        """
        wide = reference(self.original, tensor_facts.infer(self.original))
        with Session(wide) as session:
            for number, sample in zip(range(len(self)), self.samples, strict=False):
                folder = self.folder / "expected" / str(number)
                self._expected.append(write_tensors(folder, session.run(sample)))

    def take_reference(self, folders: Sequence[Path]) -> None:
        """Compare with what an engine made of the original, one folder of tensors for each sample."""
        self._expected = list(folders)

    def expected(self, sample: int) -> dict[str, Array]:
        """What the original gives in FP32, memory-mapped."""
        return read_tensors(self._expected[sample])

    def stored(self, model: Model, name: str) -> StoredSamples:
        """The samples on disk, in the types of the model's inputs."""
        if name not in self._stored:
            fed = (
                as_declared(model, feeds) for _, feeds in zip(range(len(self)), self.samples, strict=False)
            )
            self._stored[name] = write_samples(self.folder / f"samples-{name}", fed)
        return self._stored[name]

    def fixed_variant(self, engine: Path | None = None) -> Variant:
        """The fixed model as it would be deployed: TF32 as the library likes."""
        path = self._file(self.fixed, "fixed")
        return Variant("fixed", path, self.stored(self.fixed, "fixed"), shapes=self.shapes, engine=engine)

    def reference_variant(self) -> Variant:
        """The original in FP32, without TF32."""
        facts = tensor_facts.infer(self.original)
        wide = self.original if precision_of(facts) == "fp32" else reference(self.original, facts)
        path = self._file(wide, "original")
        samples = self.stored(wide, "original")
        return Variant("original", path, samples, tf32=False, shapes=self.shapes)

    def _file(self, model: Model, name: str) -> Path:
        """The model's own file, if it is what was loaded from it."""
        if model.path is not None and (model is self.original or model is self.fixed):
            return model.path
        return save(model, self.folder / f"{name}.onnx")


def require_alike(original: Model, fixed: Model) -> None:
    """Both must take and give the same names; types may differ.

    Raises:
        UsageError: they are not two versions of one model.
    """
    for what in ("inputs", "outputs"):
        names = [[port.name for port in getattr(model.signature, what)] for model in (original, fixed)]
        missing, extra = ([n for n in names[i] if n not in names[1 - i]] for i in (0, 1))
        if missing or extra:
            told = [f"lacks {', '.join(missing)}"] if missing else []
            told += [f"has {', '.join(extra)} on top"] if extra else []
            raise UsageError(
                f"it is not a version of {original.path or 'the original'}: of the {what}, "
                f"it {' and '.join(told)}",
                where=str(fixed.path or "the fixed model"),
                hint="give the original first, then what was made of it",
            )
