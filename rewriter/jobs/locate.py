"""`locate`: finds the first tensor at which a model leaves its original when an engine runs it."""

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rewriter.base.errors import UsageError
from rewriter.base.stopwatch import Progress, silent
from rewriter.ir.model import load
from rewriter.ir.model.output_files import work_folder
from rewriter.jobs.fix.provenance import PIPELINE, VERSION, noted, sums_of
from rewriter.jobs.verify import ENGINE, KERNELS, verify_in
from rewriter.passes.clamp_constants import ClampConstants
from rewriter.pipeline.driver import run
from rewriter.pipeline.options import LocateOptions, VerifyOptions, combined, documented
from rewriter.runtime.engines.protocol import MeasureSettings
from rewriter.runtime.expectations import data_warnings
from rewriter.runtime.metrics.parts import Part
from rewriter.runtime.metrics.tolerances import RELATIVE_L2
from rewriter.verification import locate as search
from rewriter.verification.expected import judging, with_states
from rewriter.verification.locate import SAME, TOLERANCE, Location
from rewriter.verification.locate.alignment import aligned


@documented(LocateOptions)
def locate(
    original: str | os.PathLike[str] | Any,
    other: str | os.PathLike[str] | Any,
    options: LocateOptions | None = None,
    *,
    progress: Progress | None = None,
    **keywords: Any,
) -> Location:
    """Finds the first tensor at which `other` leaves `original`.

    Args:
        original, other: Path, onnx.ModelProto or onnx_graphsurgeon.Graph, with tensor names in common.
        options: Options as a whole; keywords replace single ones.

    Raises:
        RewriterError: bad model, data or option; an engine that was named and cannot run here.
    """
    request = combined(LocateOptions, options, keywords)
    with work_folder() as folder:
        return _located(original, other, request, folder, progress or silent)


def _located(original: Any, other: Any, request: LocateOptions, folder: Path, progress: Progress) -> Location:
    deployed, models = request.deployment(), (load(original), load(other))
    samples, verdict, tolerance = request.samples(models[0], deployed), None, request.tolerance
    with suppress(UsageError):  # of other inputs or outputs, which `verify` cannot judge
        judged = VerifyOptions(build=False, timing=False, **vars(request))
        verdict = verify_in(folder, original, other, judged, progress, unfused=True)
    before, after = (model.path for model in models)
    chosen, indices = deployed.choose().engine, judging(samples)
    limit, notes = TOLERANCE if tolerance is None else tolerance, list[str]()
    parts = dict[str, Part]()
    if verdict is not None and verdict.outputs:
        if tolerance is None and verdict.tolerance.metric == RELATIVE_L2:
            limit = verdict.tolerance.value
        check = next(check for check in verdict.checks if check.name in ("run", "emulation", "tf32"))
        failed = {o.output for o in check.outputs if not o.passed} or {o.output for o in check.outputs}
        wrong = sorted((o for o in check.outputs if o.part and not o.passed), key=lambda o: o.excess)
        parts = {o.of: o.part for o in wrong if o.part}  # the worst of each output
        notes += [f"{o.name} has an error of {o.relative_l2:.2g}" for o in wrong if parts[o.of] is o.part]
        worst = max((o for o in verdict.outputs if o.name in failed), key=lambda o: o.badness)
        if check.wrong_states and chosen is None:  # final states fail it, which are no outputs
            models = with_states(models[0]), with_states(models[1])
        if verdict.passed and worst.relative_l2 > limit:
            limit = SAME * worst.relative_l2
            notes.append(f"allowed by verify: {worst.name} has an error of {worst.relative_l2:.2g}")
        indices, names = [indices[worst.sample]], verdict.data.names
        if len(names) > 1:
            notes.append(f"on {names[worst.sample]}, the worst of {len(names)} samples by verify")
    if not noted(models[1], VERSION):  # what `fix` made has the original's names
        matched, note = aligned(*models)
        models, notes = (models[0], matched), [*notes, *[note] * bool(note)]
    elif ClampConstants.name in noted(models[1], PIPELINE):  # its smaller masks are not wrong
        models = run(models[0], ClampConstants.name).model, models[1]
    rules, used = search.LocateOptions(limit, parts=parts), [samples.feeds(index) for index in indices]
    if chosen is None:
        exact = run(models[0], "upgrade-opset", opset=models[1].opset).model  # both in one session
        sums = sums_of(models[1])  # as `verify`
        result = search.locate_by_emulation(exact, models[1], used, rules, sums)
    else:
        settings = MeasureSettings(
            chosen, plugins=deployed.plugins, kernels=folder / KERNELS, timeout_s=request.timeout
        )
        result = search.locate(
            *models,
            used,
            settings,
            rules,
            deployed.filled(samples.source.all_spans).profile,
            progress,
            folder / ENGINE if (folder / ENGINE).exists() else None,
        )
    notes += [*([] if samples.source.real else [samples.source.text]), *data_warnings(models[0], samples)]
    notes += result.notes
    return replace(result, notes=tuple(notes), data=samples.source, original=before, other=after)
