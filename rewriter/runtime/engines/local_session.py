"""Sessions of ONNX Runtime in this process, also as a `Program` of the protocol."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import count
from typing import Any
from zlib import crc32

import onnx

from rewriter.base.errors import EngineError
from rewriter.ir.graph import attribute, display_name, draws_noise
from rewriter.ir.graph.node_list import NodeList
from rewriter.ir.model import STANDARD_DOMAINS, Array, Model, load, replace_items, walk_graphs, walk_nodes
from rewriter.ir.model.graphs import weights_as_inputs
from rewriter.ir.plan import logical_name
from rewriter.runtime.engines import nvidia_driver
from rewriter.runtime.engines.onnxruntime_library import (
    array_of,
    explained,
    import_onnxruntime,
    keep_captured_casts,
    trains,
    value_of,
)
from rewriter.runtime.engines.protocol import Keep, Kernel, Variant

MAX_THREADS = 8
"""Reductions and small convolutions gain little from more, and builds often share the machine. At deployed
sizes two were not enough: a UNet of 580 MB took 50 s on 16 cores with eight until its search began."""

MANY_NODES, COPIED_BYTES = 2000, 2**16
"""Nodes from which tensors get buffers of their own, and weights from which smaller ones are copied. ONNX
Runtime otherwise compares each tensor with all buffers before it, and with all inputs: a small RT-DETR in
three computations side by side loads in 2 s so, in 41 s otherwise (2 cores), 50,000 nodes with 10,000 weights
in 5 s, not 14. Peak memory was the same, since buffers are freed after their last use."""

LIBRARIES = 'pip install "onnxruntime-gpu[cuda,cudnn]" brings the libraries that it needs'

NEWEST_IR = 10
"""IR version that every supported ONNX Runtime loads; later ones change nothing that it computes."""


class LocalSession:
    """A model, loaded and ready to run; `close` frees its memory.

    Detached weights (`Model.weights`) are neither copied nor serialised: ONNX Runtime gets them as
    inputs, by reference, so models over 2 GiB load like small ones. Where they must be constants, for
    optimisations, for operators of other domains and if one may write to them (`trains`), they are external
    initializers, which it copies.

    Raises:
        NoKernelError: an operator has no implementation.
        ArithmeticRunError: ONNX Runtime cannot load the model.
        EngineError: it cannot use a GPU here.
    """

    def __init__(
        self,
        model: Model,  # any model; FP16 and BF16 arithmetic works as far as ONNX Runtime has kernels
        *,
        # switch on ONNX Runtime's graph optimisations. They change rounding, so they are off
        optimize: bool = False,
        gpu: bool = False,  # compute with CUDA, and with the weights on the GPU
        tf32: bool = True,  # whether FP32 may be computed in TF32 there
        constant: bool = False,  # make all weights constants, so that `session` has no inputs but the model's
    ) -> None:
        ort = import_onnxruntime()
        file = str(model.path) if model.path else None
        self._running = partial(explained, file, "ONNX Runtime cannot run the model")
        self._gpu = gpu
        proto, inputs, constants = _split(
            model, all_constant=constant or optimize or gpu or trains(model.proto)
        )
        keep_captured_casts(proto)
        self._reload, self._drawn = _seed_noise(proto), False
        proto.ir_version = min(proto.ir_version, NEWEST_IR)
        self._outputs = [value.name for value in proto.graph.output]
        # an output that is an input or a constant shares the caller's or the session's memory; only ONNX
        # Runtime knows which outputs are constants after optimisations
        lent = {value.name for value in proto.graph.input} | {t.name for t in proto.graph.initializer}
        self._shared = None if optimize else lent
        self._inputs = {name: value_of(model.weights[name]) for name in inputs}
        self._constants = {name: value_of(model.weights[name]) for name in constants}
        options = _options(optimize)
        sizes = {(function.domain, function.name): len(function.node) for function in proto.functions}
        inlined = sum(sizes.get((node.domain, node.op_type), 1) for node in proto.graph.node)
        options.enable_mem_reuse = inlined < MANY_NODES
        if constants:
            options.add_external_initializers(list(self._constants), list(self._constants.values()))
        providers = _providers(gpu, tf32)
        self._load = partial(ort.InferenceSession, proto.SerializeToString(), options, providers=providers)
        with explained(file, "ONNX Runtime cannot load the model"):
            self.session: Any = self._load()
        if not self._reload:
            del self._load
        if gpu and self.session.get_providers()[0] != "CUDAExecutionProvider":
            raise EngineError("ONNX Runtime fell back to the CPU", hint=LIBRARIES)

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        names = self._outputs if outputs is None else list(outputs)
        with self._running():
            if self._reload and self._drawn:
                self.session = self._load()  # each sample gets the noise of the first
            self._drawn = True
            inputs = self._inputs | {name: value_of(array) for name, array in feeds.items()}
            values = self.session.run_with_ort_values(names, inputs)
        return {
            name: array_of(name, value, shared=self._shared is None or name in self._shared)
            for name, value in zip(names, values, strict=True)
        }

    def bound(self, feeds: Mapping[str, Array]) -> Callable[[], None]:
        """Returns a function that runs these feeds without copies: inputs and outputs stay on the device.

        Raises:
            ArithmeticRunError: a feed does not fit; or, when it is called, a node failed.
        """
        session, device = self.session, "cuda" if self._gpu else "cpu"
        binding = session.io_binding()
        with self._running():
            values = self._inputs | {name: value_of(array, device) for name, array in feeds.items()}
            for name, value in values.items():
                binding.bind_ortvalue_input(name, value)
        for name in self._outputs:
            binding.bind_output(name, device)

        def run(_kept: object = values) -> None:  # ONNX Runtime 1.28 does not keep what is bound
            with self._running():
                session.run_with_iobinding(binding)
                binding.synchronize_outputs()

        return run

    def close(self) -> None:
        """Free the session; the weights stay with the model."""
        self.session = None
        self._inputs = self._constants = {}


def _providers(gpu: bool, tf32: bool) -> list[Any]:
    """Execution providers, best first; a run without TF32 is a reference, and searches no fastest kernels."""
    if not gpu:
        return ["CPUExecutionProvider"]
    import_onnxruntime().preload_dlls()  # CUDA's libraries that pip installed
    options = {"use_tf32": str(int(tf32)), "cudnn_conv_algo_search": "EXHAUSTIVE" if tf32 else "HEURISTIC"}
    return [("CUDAExecutionProvider", options), "CPUExecutionProvider"]


def _options(optimize: bool) -> Any:
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    # The default order is a depth-first search backwards from the outputs: a cheap reader of a tensor
    # that leads to an output of its own may run last, and the tensor lives until then.
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    options.enable_mem_pattern = False  # its one block comes on top of what the arena holds already
    options.intra_op_num_threads = min(MAX_THREADS, os.cpu_count() or 1)
    options.inter_op_num_threads = 1
    # Threads that wait would spin, at the cost of other programs (docs/engines.md#what-releases-do).
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # fatal: failures of lower levels are raised as exceptions, too
    return options


def _seed_noise(proto: onnx.ModelProto) -> bool:
    """Seeds nodes that draw noise by the names of their outputs, in all versions alike; True if it did."""
    found, graphs = False, list[Any](walk_graphs(proto.graph))
    for graph in (*graphs, *proto.functions):
        for node in [node for node in graph.node if draws_noise(node)]:
            found, name = True, logical_name(node.output[0]).partition("/exact")[0]
            seed: Any = crc32(name.encode()) % 2**20  # a float holds it
            if node.op_type == "Bernoulli":  # ONNX Runtime only has its function, which passes no seed on
                _uniform_and_less(graph, node)
            if attribute(node, "seed") is None:
                seed = seed if node.op_type == "Dropout" else float(seed)
                node.attribute.append(onnx.helper.make_attribute("seed", seed))
    return found


def _uniform_and_less(graph: Any, bernoulli: onnx.NodeProto) -> None:
    """Makes a RandomUniformLike of a Bernoulli, and a Less and a Cast after it."""
    output, later = bernoulli.output[0], list[onnx.NodeProto]()
    dtype = attribute(bernoulli, "dtype", onnx.TensorProto.FLOAT)
    bernoulli.op_type, bernoulli.output[0] = "RandomUniformLike", f"{output}/drawn"
    emit = NodeList(map(f"{output}/{{}}".format, count()), 9, later)
    emit.write(f"y = Cast<to = {dtype}>(Less(x, p))", x=bernoulli.output[0], p=bernoulli.input[0])
    later[-1].output[0] = output
    replace_items(bernoulli.attribute, [item for item in bernoulli.attribute if item.name == "seed"])
    at = next(index for index, node in enumerate(graph.node) if node is bernoulli) + 1
    for node in reversed(later):
        graph.node.insert(at, node)


def _split(model: Model, *, all_constant: bool) -> tuple[onnx.ModelProto, list[str], list[str]]:
    """A proto for ONNX Runtime, whose nodes all have names, and the weights that it reads or holds."""
    proto = deepcopy(model.proto)
    foreign: set[str] = set()
    local = {(f.domain, f.name) for f in proto.functions}  # inlined: ordinary operators take any tensor
    for node in walk_nodes(proto.graph):
        node.name = display_name(node)
        if node.domain not in STANDARD_DOMAINS and (node.domain, node.op_type) not in local:
            foreign.update(node.input)
    copied = COPIED_BYTES if len(model.weights) >= MANY_NODES else 0
    detached = [t.name for t in proto.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    large = [] if all_constant else [name for name in detached if model.weights[name].nbytes >= copied]
    inputs = [name for name in large if name not in foreign]
    weights_as_inputs(proto, set(inputs))
    return proto, inputs, [name for name in detached if name not in set(inputs)]


class OnnxRuntimeProgram:
    """A session on the ONNX file, without optimisations: it computes what the file says."""

    cuda_graph = False
    kernels: tuple[Kernel, ...] = ()

    def __init__(self, variant: Variant, *, gpu: bool) -> None:
        self.notes: list[str] = []
        self.device = str(nvidia_driver.gpu()) if gpu else "CPU"
        model = load(variant.engine or variant.path)
        ports = {port.name for port in model.signature.outputs}
        # ONNX Runtime needs only the name, and infers the type
        model.proto.graph.output.extend(
            onnx.ValueInfoProto(name=name) for name in variant.outputs if name not in ports
        )
        self._session = LocalSession(model, gpu=gpu, tf32=variant.tf32)
        self.library = f"onnxruntime {import_onnxruntime().__version__}"
        self._timed: Callable[[], object] | None = None

    def run(self, feeds: Mapping[str, Array], keep: Keep | None = None) -> dict[str, Array]:
        return self._session.run(feeds)

    def prepare(self, feeds: Mapping[str, Array]) -> None:
        self._timed = self._session.bound(feeds)

    def time_us(self) -> float:
        """Wall time until the device has finished."""
        assert self._timed is not None, "nothing was prepared to be timed"
        start = time.perf_counter()
        self._timed()
        return (time.perf_counter() - start) * 1e6

    def close(self) -> None:
        self._timed = None
        self._session.close()
