"""Families of ONNX operators: the one place that lists them.

A set that differs from a family is derived from it where it is used, with the reason beside it.
"""

RESHAPES = frozenset("Identity Reshape Squeeze Unsqueeze Flatten".split())
"""Keep the elements and their order; only the shape changes."""

LAYOUTS = RESHAPES | {"Transpose"}
"""Keep the elements, each once."""

SHUFFLES = frozenset({"DepthToSpace", "SpaceToDepth"})
"""Move elements between channels and places."""

SAME_VALUES = LAYOUTS | SHUFFLES | {"Expand", "Tile"}
"""The output holds exactly the values of the first input, each equally often."""

VIEWS = SAME_VALUES | {"Slice", "Gather", "Split", "Concat"}
"""Move elements and compute nothing."""

LOOPS = frozenset({"Loop", "Scan"})
"""Run their body more than once."""

CONTROL_FLOW = LOOPS | {"If"}
"""Operators whose inputs and outputs are, unchanged, inputs and outputs of their subgraphs."""

VALUE_PRESERVING = VIEWS | CONTROL_FLOW
VALUE_PRESERVING |= frozenset(
    "GatherElements GatherND ScatterElements ScatterND TopK Compress ReverseSequence Trilu Where Dropout "
    "Relu Neg Abs Max Min MaxPool GlobalMaxPool ReduceMax ReduceMin".split()
)
"""Outputs hold only values of their inputs: what was rounded stays rounded."""

SCALING = frozenset({"Mul", "Div"})
"""Multiply by a factor or its inverse."""

SUMS = frozenset({"Add", "Sub", "Sum"})
"""Add tensors element by element."""

ELEMENTWISE = SCALING | SUMS
ELEMENTWISE |= frozenset(
    "Pow Neg Abs Sqrt Reciprocal Exp Log Erf Tanh Sigmoid Relu LeakyRelu Elu Celu Selu Gelu "
    "Softplus Softsign Mish Swish HardSigmoid HardSwish PRelu Clip Min Max".split()
)
"""Float arithmetic element by element, which TensorRT computes in the kernel of the product before it."""

SOFTMAX = frozenset({"Softmax", "LogSoftmax"})
"""Normalise exponentials along an axis."""

INEQUALITIES = frozenset({"Greater", "Less", "GreaterOrEqual", "LessOrEqual"})
"""Compare floats by size."""

SELECTIONS = frozenset({"TopK", "ArgMax", "ArgMin"})
"""Return positions of the largest or smallest elements."""

REDUCTIONS = frozenset(
    "ReduceMax ReduceMin ReduceMean ReduceSum ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSum "
    "ReduceLogSumExp".split()
)
"""Reduce along axes that are given."""

ROW_NORMS = frozenset({"LayerNormalization", "RMSNormalization"})
"""Norms over the last axes; they compute in FP32 inside, whatever type they read."""

NORMS = ROW_NORMS | frozenset({"SimplifiedLayerNormalization", "GroupNormalization", "InstanceNormalization"})
"""Divide by statistics of the tensor that they read."""

REDUCING = NORMS | REDUCTIONS | SOFTMAX | {"GlobalAveragePool", "GlobalMaxPool"}
"""Their kernels take elementwise operators before them away from a product's kernel."""

PRODUCTS = frozenset({"MatMul", "Gemm"})
"""Matrix products."""

CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
"""Convolutions with weights in the second input."""

TENSOR_CORE = PRODUCTS | CONVOLUTIONS
"""Products of their first two inputs on Tensor Cores."""

RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
"""Operators that go through a sequence step by step."""

COMPUTE_BOUND = TENSOR_CORE | RECURRENT | {"Einsum", "Attention"}
"""Limited by arithmetic; the tensors that they read are the network's stream of features."""

CHEAP = VIEWS | ELEMENTWISE | SOFTMAX | REDUCTIONS
CHEAP |= frozenset("Where Pad Sin Cos Sign Floor Ceil Round Mod Cast".split())
"""Limited by memory: in FP32 they cost bandwidth, not Tensor Cores. The Cast is one from integers."""

RESIZES = frozenset({"Resize", "Upsample"})
"""Resample along axes."""

QUANTISING = frozenset({"QuantizeLinear", "DequantizeLinear"})
"""Between floats and quantised integers, with given scales."""

NOISE = frozenset(
    "RandomNormal RandomNormalLike RandomUniform RandomUniformLike Multinomial Bernoulli".split()
)
"""Operators that draw random numbers."""
