"""A model in memory: a small proto beside its large weights, loaded and saved without loss.

Initializers of the main graph of `DETACH_BYTES` or more are kept in `Model.weights` as read-only
arrays, not in the proto. Copies, checks and shape inference then cost the same for a model of 1 MB
and one of 10 GB, and files with external data are mapped, not read.
"""

from rewriter.ir.model.external_data import data_files as data_files
from rewriter.ir.model.files import check as check
from rewriter.ir.model.files import check_model_output as check_model_output
from rewriter.ir.model.files import load as load
from rewriter.ir.model.files import save as save
from rewriter.ir.model.files import set_metadata as set_metadata
from rewriter.ir.model.files import write_json as write_json
from rewriter.ir.model.files import write_text as write_text
from rewriter.ir.model.graphs import STANDARD_DOMAINS as STANDARD_DOMAINS
from rewriter.ir.model.graphs import holds_graphs as holds_graphs
from rewriter.ir.model.graphs import replace_items as replace_items
from rewriter.ir.model.graphs import walk_graphs as walk_graphs
from rewriter.ir.model.graphs import walk_nodes as walk_nodes
from rewriter.ir.model.model import Model as Model
from rewriter.ir.model.tensors import DETACH_BYTES as DETACH_BYTES
from rewriter.ir.model.tensors import Array as Array
from rewriter.ir.model.tensors import Port as Port
from rewriter.ir.model.tensors import Signature as Signature
