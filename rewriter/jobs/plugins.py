"""Models with plugins that are not on this machine: `fix` and `verify` work on what comes before them."""

from collections.abc import Sequence
from dataclasses import replace

from rewriter.base.errors import ModelError
from rewriter.ir.graph import display_name
from rewriter.ir.model import Model
from rewriter.ir.model.split import Split, split_at_plugins
from rewriter.jobs.fix.job import FixJob
from rewriter.passes.base import Context
from rewriter.passes.upgrade_opset import UpgradeOpset
from rewriter.pipeline.driver import Driver
from rewriter.runtime.engines.deployment import Deployment
from rewriter.verification.verdict import PLUGINS, Check, remark

LISTED = 3  # plugins that the check names


def parts(model: Model, deployment: Deployment, types: Sequence[str] = ()) -> Split | None:
    """The part of a model before its plugins, and the rest; None if there are none, or `types` are given."""
    if types or deployment.plugins or deployment.choose().engine == "tensorrt":
        return None
    return split_at_plugins(model)


def without_inner_ports(job: FixJob, split: Split) -> FixJob:
    """The job with `io` for the ports of the whole model only: what a plugin reads keeps its type."""
    io = job.precision.io
    inner = [port.name for port in split.head.signature.outputs if port.name not in split.outputs]
    if io == "keep" or not inner:
        return job
    io = ",".join([*(f"{name}=keep" for name in inner), io])
    first = replace(job.first, precision=replace(job.precision, io=io))
    return replace(job, first=first, request=replace(job.request, io=io))


def whole(split: Split, fixed: Model) -> Model:
    """The rewritten first part with the rest, at its operator set; ModelError: the rest has no form in it."""
    tail = split.tail
    if tail.opset != fixed.opset:
        tail, (result,) = Driver().run(tail, [UpgradeOpset()], Context(fixed.opset))
        if tail.opset != fixed.opset:
            why = "; ".join(f"{refusal.node}: {refusal.reason}" for refusal in result.refusals)
            what = f"the part after its plugins cannot be converted to opset {fixed.opset}: {why}"
            raise ModelError(what, hint="leave out `upgrade-opset`: `skip=upgrade-opset`")
    return split.joined(fixed, tail)


def plugin_check(split: Split) -> Check:
    """The check that was impossible: what the plugins compute."""
    names = ", ".join(f"{display_name(node)} ({node.op_type})" for node in split.plugins[:LISTED])
    more = max(0, len(split.plugins) - LISTED) or None
    read = ", ".join(port.name for port in split.tail.signature.inputs)
    return Check(
        PLUGINS,
        None,
        remark("plugins", plugins=names, more=more, ports=read),
        advice="`plugin-lib` names the library of a plugin, on a machine with a GPU",
    )
