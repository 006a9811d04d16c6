"""A model in memory: a small proto beside its large weights, loaded and saved without loss.

Initializers of the main graph of `DETACH_BYTES` or more are kept in `Model.weights` as read-only
arrays, not in the proto. Copies, checks and shape inference then cost the same for a model of 1 MB
and one of 10 GB, and files with external data are mapped, not read.
"""

from rewriter.ir.model.external_data import data_files
from rewriter.ir.model.files import (
    check,
    check_model_output,
    load,
    save,
    set_metadata,
    write_json,
    write_text,
)
from rewriter.ir.model.graphs import STANDARD_DOMAINS, holds_graphs, replace_items, walk_graphs, walk_nodes
from rewriter.ir.model.model import Model
from rewriter.ir.model.tensors import DETACH_BYTES, Array, Port, Signature

__all__ = [
    "DETACH_BYTES",
    "STANDARD_DOMAINS",
    "Array",
    "Model",
    "Port",
    "Signature",
    "check",
    "check_model_output",
    "data_files",
    "holds_graphs",
    "load",
    "replace_items",
    "save",
    "set_metadata",
    "walk_graphs",
    "walk_nodes",
    "write_json",
    "write_text",
]
