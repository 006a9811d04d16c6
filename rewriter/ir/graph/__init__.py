"""Safe edits of a graph, and an index of its tensors and nodes.

A `GraphEditor` keeps producers and consumers indexed while it edits, so that a look-up or edit takes no
walk over the graph. The edits of a `with` block reach the model at its end.
"""

from rewriter.ir.graph.editor import TAG as TAG
from rewriter.ir.graph.editor import GraphEditor as GraphEditor
from rewriter.ir.graph.editor import made_by as made_by
from rewriter.ir.graph.editor import open_graphs as open_graphs
from rewriter.ir.graph.nodes import attribute as attribute
from rewriter.ir.graph.nodes import casts_to as casts_to
from rewriter.ir.graph.nodes import constant_value as constant_value
from rewriter.ir.graph.nodes import display_name as display_name
from rewriter.ir.graph.nodes import draws_noise as draws_noise
from rewriter.ir.graph.nodes import is_op as is_op
from rewriter.ir.graph.nodes import reachable as reachable
from rewriter.ir.graph.nodes import states as states
from rewriter.ir.graph.view import GraphView as GraphView
from rewriter.ir.graph.weights import constant_row as constant_row
from rewriter.ir.graph.weights import is_quantised as is_quantised
from rewriter.ir.model.graphs import captured as captured
from rewriter.ir.model.graphs import reads as reads
