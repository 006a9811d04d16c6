"""Functions of NVIDIA's AutoCast and of onnxconverter-common under their own names, with this engine beneath.

The import changes, and the call stays:

    from rewriter.compat import convert_to_mixed_precision  # in place of modelopt.onnx.autocast
    from rewriter import compat as float16  # in place of onnxconverter_common, onnxruntime.transformers

They return the converted ModelProto, and need neither a GPU nor PyTorch: ONNX Runtime measures ranges on the
CPU. Nothing is built, and only `auto_convert_mixed_precision` compares outputs: see `rewriter.fix`. An
argument without a meaning here is a warning.
"""

import functools
import glob
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
from onnx import ModelProto

from rewriter.api import fix
from rewriter.base.errors import UsageError
from rewriter.hazards.user_rules import limits
from rewriter.ir.model import Array, Model, load, walk_nodes
from rewriter.runtime.emulation import reference
from rewriter.verification.expected import as_declared, run_all

DEFAULT_OP_BLOCK_LIST = "NonMaxSuppression TopK RoiAlign Resize Range CumSum Min Max Upsample".split()
"""Kept in FP32 by `convert_float_to_float16` where no list is given; ai.onnx.ml has no FP16 in any case."""

LIGHT = "inline-functions,clamp-constants,mixed-precision,clean-casts"
"""Passes of `convert_float_to_float16`: its callers rely on names and operators of the nodes."""

OWN = {"io": "keep_io_types", "plugin-lib": "trt_plugins", "plugin-types": "trt_plugins_precision"}
"""Options of ours, and the arguments here that they come from."""

IGNORED = (
    "init_conversion_max_bytes providers use_standalone_type_inference min_positive_val max_finite_val "
    "disable_shape_infer force_fp16_initializers force_fp16_inputs use_bfloat16_as_blocked_nodes_dtype"
).split()
"""Arguments without a meaning here."""

_ACCEPTED: ContextVar[Callable[[Mapping[str, Array], Mapping[str, Array]], bool]] = ContextVar("accepted")
LOGGER = logging.getLogger(__name__)
Arguments = ParamSpec("Arguments")


def configure_logging(level: int | str | None = None) -> None:
    """Sets the level of this module's logger."""
    LOGGER.setLevel(level or logging.INFO)


def _warns(function: Callable[Arguments, ModelProto]) -> Callable[Arguments, ModelProto]:
    """Warns of arguments without a meaning; Python prints a warning once for each line that calls."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> ModelProto:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            same = tuple(value) if isinstance(value, list) else value
            if name in IGNORED and same != signature.parameters[name].default:
                what = f"rewriter.compat.{function.__name__}: `{name}` has no meaning here and is ignored"
                warnings.warn(what, stacklevel=2)
        return function(*args, **kwargs)

    return run


@_warns
def convert_to_mixed_precision(
    onnx_path: str,
    low_precision_type: str = "fp16",
    nodes_to_exclude: Sequence[str] | None = None,
    op_types_to_exclude: Sequence[str] | None = None,
    nodes_to_include: Sequence[str] | None = None,
    op_types_to_include: Sequence[str] | None = None,
    data_max: float | None = 512,
    init_max: float | None = 65504.0,
    keep_io_types: bool = False,
    calibration_data: Any = None,
    custom_rule: Any = None,
    init_conversion_max_bytes: int | None = None,
    providers: Sequence[str] = ("cpu",),
    trt_plugins: Sequence[str] = (),
    trt_plugins_precision: Sequence[str] = (),
    max_depth_of_reduction: int | None = None,
    opset: int | None = None,
    use_standalone_type_inference: bool = False,
) -> ModelProto:
    """Convert the model in a file to FP16 or BF16 with nodes in FP32.

    Regular expressions fit the beginning of a node's name. What is included is lowered, whatever a rule or
    an exclusion says. Values above `data_max` or `init_max`, and products of more terms than
    `max_depth_of_reduction`, keep a node in FP32 beside our own rules, as does a `custom_rule` whose
    `check(node)` is True. `calibration_data` is what `rewriter.fix` takes as `inputs`.
    """
    model = _loaded(onnx_path, "onnx_path")
    operators = {node.op_type for node in walk_nodes(model.proto.graph)}
    types = {text: text.partition(":")[0] in operators for text in trt_plugins_precision}
    for absent in (text for text, is_there in types.items() if not is_there):
        warnings.warn(f"`trt_plugins_precision`: the model has no operator of {absent}", stacklevel=3)
    return _converted(
        model,
        low_precision_type,
        keep_io_types,
        opset,
        keep_fp32=_named(model, nodes_to_exclude, "nodes_to_exclude"),
        keep_fp32_op=op_types_to_exclude or (),
        lower=_named(model, nodes_to_include, "nodes_to_include"),
        lower_op=op_types_to_include or (),
        hazards=list(limits(data_max, init_max, max_depth_of_reduction, custom_rule)),
        inputs=calibration_data,
        plugin_lib=trt_plugins,
        plugin_types=[text for text, is_there in types.items() if is_there],
    )


@_warns
def convert_to_f16(
    model: ModelProto,
    low_precision_type: str = "fp16",
    keep_io_types: bool = True,
    op_block_list: Sequence[str] = (),
    tensor_block_dict: Mapping[str, Any] | None = None,
    trt_plugins: Sequence[str] | None = (),
    use_standalone_type_inference: bool = False,
    opset: int | None = None,
) -> ModelProto:
    """Convert a model to FP16 or BF16; operators of `tensor_block_dict` stay in FP32 as a whole."""
    options = {"keep_fp32_op": [*op_block_list, *(tensor_block_dict or ())], "plugin_lib": trt_plugins or ()}
    return _converted(load(model), low_precision_type, keep_io_types, opset, **options)


@_warns
def convert_float_to_float16(
    model: ModelProto | str,
    min_positive_val: float = 1e-7,
    max_finite_val: float = 1e4,
    keep_io_types: bool | Sequence[str] = False,
    disable_shape_infer: bool = False,
    op_block_list: Sequence[str] | None = None,
    node_block_list: Sequence[str] | None = None,
    check_fp16_ready: bool = True,
    force_fp16_initializers: bool = False,
    force_fp16_inputs: Mapping[str, Sequence[int]] | None = None,
    use_bfloat16_as_blocked_nodes_dtype: bool = False,
) -> ModelProto:
    """Convert a model to FP16; `keep_io_types` may also name the inputs and outputs that stay FP32.

    Weights beyond FP16 stay in FP32, masks of such numbers are clamped; what has FP16 already is converted.
    """
    loaded, exactly = _loaded(model, "model"), [f"{re.escape(name)}$" for name in node_block_list or ()]
    names = _named(loaded, exactly, "node_block_list")
    blocked = DEFAULT_OP_BLOCK_LIST if op_block_list is None else op_block_list
    return _converted(loaded, "fp16", keep_io_types, passes=LIGHT, keep_fp32=names, keep_fp32_op=blocked)


def convert_float_to_float16_model_path(model_path: str, *arguments: Any, **named: Any) -> ModelProto:
    """The same for a file, by its path."""
    return convert_float_to_float16(model_path, *arguments, **named)


def auto_convert_mixed_precision(
    model: ModelProto | str,
    feed_dict: Mapping[str, Array],
    validate_fn: Callable[[list[Array], list[Array]], bool] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    keep_io_types: bool = False,
) -> ModelProto:
    """Convert a model to FP16, with the FP32 nodes that its outputs on one sample need: all, at worst.

    Outputs are lists of arrays in the order of the model. They are close as `numpy.allclose` defines it, and
    `validate_fn` of the original's and the result's is True, where these are given.

    Raises:
        ValueError: neither is given, or the original or the result is not accepted.
    """
    if rtol is None and atol is None and validate_fn is None:
        raise ValueError("Argument `validate_fn` and `rtol` cannot both be `None`.")

    def accepted(expected: Mapping[str, Array], actual: Mapping[str, Array]) -> bool:
        first, second = ([outputs[name] for name in expected] for outputs in (expected, actual))
        if validate_fn is not None and not validate_fn(first, second):
            return False
        near, far = 1e-5 if rtol is None else rtol, 1e-8 if atol is None else atol
        judged = zip(first, second, strict=True) if (rtol, atol) != (None, None) else ()
        return all(np.allclose(one, other, near, far) for one, other in judged)

    loaded = _loaded(model, "model")
    (exact,) = run_all(reference(loaded), [feed_dict])
    if not accepted(exact, exact):
        raise ValueError("validation failed for original fp32 model")
    token = _ACCEPTED.set(accepted)
    try:
        search: dict[str, Any] = {"inputs": feed_dict, "metric": f"{__name__}:rejected", "tolerance": 0.5}
        return _converted(loaded, "fp16", keep_io_types, passes=LIGHT, verify=True, build=False, **search)
    except _RejectedError:
        whole: dict[str, Any] = {"passes": LIGHT, "keep_fp32": "*", "inputs": feed_dict}
        result = load(_converted(loaded, "fp16", keep_io_types, **whole))
        (last,) = run_all(reference(result), [as_declared(result, feed_dict)])
        if not accepted(exact, last):
            raise ValueError("validation failed for final fp16 model") from None
        return result.whole()
    finally:
        _ACCEPTED.reset(token)


class _RejectedError(Exception):
    """A result that was compared, and is not accepted."""


def rejected(expected: Mapping[str, Array], actual: Mapping[str, Array]) -> float:
    """The metric of `auto_convert_mixed_precision` while it runs: 0 if the outputs are accepted, else 1."""
    return float(not _ACCEPTED.get()(expected, actual))


def _converted(model: Model, low: Any, keep_io: Any, opset: int | None = None, **more: Any) -> ModelProto:
    if low not in ("fp16", "bf16"):
        raise UsageError(f"it cannot be {low!r}", option="low_precision_type", hint="fp16 or bf16")
    if opset is not None and opset < model.opset:
        warnings.warn(f"`opset`: the model has {model.opset}, and keeps it", stacklevel=4)
    io = "keep" if keep_io is True else ",".join((low, *(f"{glob.escape(n)}=keep" for n in keep_io or ())))
    more = {"preset": f"trt-{low}", "precision": low, "io": io, "verify": False} | more
    try:
        result = fix(model, opset=opset and max(opset, model.opset), **more)
    except UsageError as error:
        error.options = tuple(OWN.get(key, key) for key in error.options)
        raise
    LOGGER.info("%s", result)
    if result.verified is False:
        raise _RejectedError
    return result.proto


def _loaded(source: Any, argument: str) -> Model:
    if isinstance(source, (str, Path)) and not Path(source).is_file():
        raise FileNotFoundError(f"`{argument}`: no such file: {source}")
    return load(source)


def _named(model: Model, patterns: Sequence[str] | None, argument: str) -> list[str]:
    """The names of nodes that one of these expressions fits from the beginning, as `keep_fp32` takes them."""
    try:
        listed = [patterns] if isinstance(patterns, str) else patterns or ()
        fitting = [re.compile(pattern) for pattern in listed]
    except (re.error, TypeError) as error:
        raise UsageError(f"it cannot be {patterns!r}", option=argument, hint=f"{error}") from error
    nodes = enumerate(walk_nodes(model.proto.graph))
    names = ((n.name or f"{n.op_type}_{i}", n.name or "".join(n.output[:1])) for i, n in nodes)
    return [glob.escape(own) for name, own in names if own and any(p.match(name) for p in fitting)]
