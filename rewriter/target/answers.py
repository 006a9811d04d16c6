"""Answers of probes, as they are recorded in the package with their source."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from rewriter.base.text import Row, Summary, listed
from rewriter.ir.reading import read_json
from rewriter.target import Target, numbers
from rewriter.target.probes import UNKNOWN, Answer

RECORDED = Path(str(files("rewriter.target"))) / "recorded"
"""Files of `rewriter probe --json`, one for each GPU and release."""


@dataclass(frozen=True, repr=False)
class Answers(Summary):
    """The answers of one library on one GPU.

    Attributes:
        library: `tensorrt` or `tensorrt-rtx`, as a target calls it; `version`: its release.
        gpu, driver, sm: Name of the GPU; newest CUDA that its driver supports; compute capability, `sm_90`.
        recorded: True if they come from the package, not from this machine.
    """

    # rises when a field changes its meaning or goes away; a new field leaves it
    schema_version: Literal[1] = field(default=1, kw_only=True)
    library: str
    version: str
    gpu: str
    driver: str = ""
    source: str = ""
    sm: str = ""
    recorded: bool = False
    answers: Mapping[str, Answer] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, str]:
        """The known answers, by probe."""
        return {name: a.value for name, a in self.answers.items() if a.value != UNKNOWN}

    @property
    def title(self) -> str:
        driver = f", driver {self.driver}" if self.driver else ""
        return f"{self.library} {self.version} on {self.gpu}{driver}"

    @property
    def origin(self) -> str:
        """`title`, with a remark whether that is this machine."""
        if self.recorded:
            return f"recorded of {self.title}, not measured here"
        return f"measured here: {self.title}"

    def summary(self) -> Iterator[Row]:
        yield "of", self.origin
        yield from listed("answers", (f"{name}: {answer.value}" for name, answer in self.answers.items()), 10)

    def fits(self, target: Target) -> bool:
        """True if library, release and GPU match a target, which may leave some of them open."""
        release = numbers(self.version)[: len(target.version)]
        elsewhere = self.sm and target.gpus and self.sm not in target.gpus
        return self.library == target.library and release == target.version and not elsewhere


@lru_cache(maxsize=1)
def recorded() -> tuple[Answers, ...]:
    """The answers that come with the package, newest library first."""
    content = [replace(read(path), recorded=True) for path in RECORDED.glob("*.json")]
    return tuple(sorted(content, key=lambda a: (a.library, a.version, len(a.answers)), reverse=True))


def plain_fields(answers: Answers) -> dict[str, Any]:
    """The answers as they are written; a file in `RECORDED` has the same form."""
    plain = asdict(answers)
    del plain["recorded"]
    return plain


def read(path: Path) -> Answers:
    """Raises UsageError for a file that is broken or of another version."""
    answers: Answers = read_json(path, Answers, "measure them again with `rewriter probe --ask`")
    return answers
