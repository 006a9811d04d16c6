"""A module `tensorrt` made from a release's recorded interface: names and parameters, without the library.

Calls that do not fit a recorded signature raise TypeError, members that the release lacks AttributeError.
Methods return a value of the recorded type: an object, a member of an enumeration, 1, True, a text. `SCRIPT`
overrides that so that a network of one layer is parsed, built, loaded and run.
"""

import json
from collections.abc import Callable, Mapping
from ctypes import c_char_p, c_void_p, py_object, pythonapi
from types import ModuleType
from typing import Any

import numpy as np
from trt_surface import MODULE, Release, overloads

Behaviour = Callable[..., Any]

PLAIN: dict[str, Any] = {"int": 1, "bool": True, "str": "", "float": 1.0, "SupportsInt": 1}
"""Values of return types that are not the library's."""

LAYERS = (
    {"Name": "move", "Metadata": "", "Outputs": [{"Name": "moved"}]},
    {
        "Name": "relu+add",
        "Metadata": "[ONNX Layer: relu]\x1f[ONNX Layer: add]",
        "Outputs": [{"Name": "inner"}],
    },
    "a layer without details",
)
"""What the inspector of every engine lists."""

SCRIPT: Mapping[str, Behaviour] = {
    "INetworkDefinition.num_layers": lambda self: 1,
    "INetworkDefinition.num_inputs": lambda self: 1,
    "INetworkDefinition.get_input": lambda self, index: self.fake.made("ITensor", "x"),
    "ILayer.get_output": lambda self, index: self.fake.made("ITensor", "y"),
    "ILayer.name": lambda self: "relu",
    "ILayer.metadata": lambda self: "[ONNX Layer: relu]",
    "ITensor.name": lambda self: self.label,
    "ITensor.shape": lambda self: (-1, 2),
    "ITensor.is_shape_tensor": lambda self: False,
    "ITensor.is_network_output": lambda self: False,
    "OnnxParser.num_errors": lambda self: 1,
    "ParserError.node_name": lambda self: "relu",
    "ParserError.node_operator": lambda self: "Relu",
    "IHostMemory.nbytes": lambda self: len(self),
    "ICudaEngine.num_io_tensors": lambda self: 3,
    "ICudaEngine.get_tensor_name": lambda self, index: ("x", "y", "sized")[index],
    "ICudaEngine.get_tensor_mode": lambda self, name: getattr(
        self.fake.module.TensorIOMode, "INPUT" if name == "x" else "OUTPUT"
    ),
    "ICudaEngine.get_tensor_dtype": lambda self, name: self.fake.module.DataType.FLOAT,
    "ICudaEngine.get_tensor_location": lambda self, name: self.fake.module.TensorLocation.HOST,
    "IExecutionContext.get_tensor_shape": lambda self, name: (-1,) if name == "sized" else (2, 2),
    "IExecutionContext.set_output_allocator": lambda self, name, value: (
        self.kept.update(allocator=value) or True
    ),
    "EngineInspector.get_engine_information": lambda self, form: json.dumps({"Layers": LAYERS}),
    "IExecutionContext.set_debug_listener": lambda self, listener: (
        self.kept.update(listener=listener) or True
    ),
    "IExecutionContext.execute_async_v3": lambda self, handle: _executed(self),
}
"""What the code under test needs to get on, by class and member."""


HALVES = np.array([[1.0, 2.0], [3.0, 4.0]], np.float16)
"""The values of every tensor that a listener gets, in the host's memory."""


def _executed(context: Any) -> bool:
    """Calls back as a run does."""
    capsule = pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = py_object, [c_void_p, c_char_p, c_void_p]
    for name in ("inner", "moved") if "listener" in context.kept else ():
        trt, address = context.fake.module, capsule(HALVES.ctypes.data, None, None)
        listener, where = context.kept["listener"], trt.TensorLocation.HOST
        assert listener.process_debug_tensor(address, where, trt.DataType.HALF, (2, 2), name, 0)
    allocator = context.kept["allocator"]
    allocator.reallocate_output_async("sized", 0, 12, 256, 0)
    allocator.notify_shape("sized", (3,))
    return True


class Fake:
    """The module of one release, with a record of what was used."""

    def __init__(self, release: Release) -> None:
        self.release = release
        self.module = ModuleType(release.library)
        self.used: set[str] = set()
        self._classes: dict[str, type] = {}
        self.module.__dict__["__version__"] = release.version
        for name, what in release.members[MODULE].items():
            self.module.__dict__[name] = self._member(MODULE, name, what)

    def made(self, owner: str, label: str = "") -> Any:
        """An instance of a class without a call of its constructor."""
        kind = self._classes[owner]
        instance: Any = object.__new__(kind)
        object.__setattr__(instance, "label", label)
        object.__setattr__(instance, "kept", {})
        return instance

    def _member(self, owner: str, name: str, what: str) -> Any:
        kind, _, rest = what.partition(" ")
        if kind == "class":
            return self._class(f"{owner}.{name}".lstrip("."))
        if kind == "enum":
            return int(rest)
        if kind.startswith("property"):
            return self._property(owner, name, what)
        return self._function(owner, name, what)

    def _class(self, owner: str) -> type:
        if owner not in self._classes:
            base = self.release.base(owner)
            parents = (self._class(base),) if base in self.release.members else _native(owner)
            self._classes[owner] = type(owner.rpartition(".")[2], parents, {"fake": self})
            self._fill(owner, self._classes[owner])
        return self._classes[owner]

    def _fill(self, owner: str, kind: type) -> None:
        for name, what in self.release.members[owner].items():
            if what.startswith("enum") and name not in vars(kind):
                member = self.made(owner)
                object.__setattr__(member, "name", name)
                object.__setattr__(member, "value", int(what.split()[1]))
                setattr(kind, name, member)
            elif not (what.startswith("property") and name in ("name", "value") and self._is_enum(owner)):
                setattr(kind, name, self._member(owner, name, what))

    def _is_enum(self, owner: str) -> bool:
        return any(what.startswith("enum") for what in self.release.members[owner].values())

    def _property(self, owner: str, name: str, what: str) -> property:
        head, _, returns = what.partition(" -> ")
        key = f"{owner}.{name}"

        def read(instance: Any) -> Any:
            self.used.add(key)
            return SCRIPT[key](instance) if key in SCRIPT else self._value(returns)

        def write(instance: Any, value: Any) -> None:
            self.used.add(key)

        return property(read, write if head.endswith("=") else None)

    def _function(self, owner: str, name: str, what: str) -> Any:
        known, key = overloads(what), f"{owner}.{name}".lstrip(".")

        def call(*arguments: Any, **keywords: Any) -> Any:
            self.used.add(key)
            positional = len(arguments) - bool(owner)
            if known and not any(one.takes(positional, list(keywords)) for one in known):
                raise TypeError(f"{self.release}: {key} does not take {arguments[bool(owner) :]} {keywords}")
            if name == "__init__":
                return None
            if name == "__int__":
                return arguments[0].value
            if name == "__le__":
                return arguments[0].value <= arguments[1].value
            if key in SCRIPT:
                return SCRIPT[key](*arguments, **keywords)
            return self._value(known[0].returns) if known else None

        return call

    def _value(self, returns: str) -> Any:
        if returns == "Dims":
            return (2, 2)
        if returns == "list[Dims]":
            return [(1, 1)] * 3
        if returns == "IHostMemory":
            return self._classes[returns](b"engine")  # a real buffer, for memoryview
        if returns not in self._classes:
            return PLAIN.get(returns)
        if self._is_enum(returns):
            return next(
                v for v in vars(self._classes[returns]).values() if isinstance(v, self._classes[returns])
            )
        return self.made(returns)


def _native(owner: str) -> tuple[type, ...]:
    return (bytes,) if owner == "IHostMemory" else (_Native,)


class _Native:
    """What classes of pybind11 are like: attributes that they do not declare cannot be set."""

    fake: Fake
    label: str
    kept: dict[str, Any]
    name: str
    value: int

    def __setattr__(self, name: str, value: Any) -> None:
        if type(self) in self.fake._classes.values() and not hasattr(type(self), name):
            raise AttributeError(f"{self.fake.release}: {type(self).__name__} has no attribute {name!r}")
        object.__setattr__(self, name, value)
