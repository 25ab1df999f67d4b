"""Lists the operators that a bundle's graphs may use, and refuses graphs that use others.

ONNX has operators that run graphs inside themselves ("Loop", "Scan") and so can run for ever. None
of ours needs one. Every operator here ends in time that follows from the sizes of its tensors.
"""

from pathlib import PurePosixPath

from spec_runtime.bundle.manifest import Bundle, BundleError, Graph
from spec_runtime.bundle.onnx_file import OnnxOutline, read_outline
from spec_runtime.errors import UserError

# What the graphs of spec-export build use, whatever its options.
_OURS = """
    Abs Add And ArgMax Attention Cast Clip Concat CumSum Div Equal Exp Expand Gather GatherElements
    GatherND Gemm Greater GreaterOrEqual Identity Less Log LogSoftmax MatMul MatMulInteger Max Min
    Mul Not Or Pad QuantizeLinear RMSNormalization Range ReduceMax ReduceSum Reshape RotaryEmbedding
    ScatterElements ScatterND Shape Sigmoid Slice Softmax Split Squeeze Sub TensorScatter TopK
    Transpose Unsqueeze Where
    com.microsoft.GroupQueryAttention com.microsoft.MatMulBlockQuantizedFp8Weight
    com.microsoft.MatMulIntegerToFloat com.microsoft.MatMulNBits com.microsoft.MoE
    com.microsoft.QMoE com.microsoft.SkipSimplifiedLayerNormalization
"""
# Plain arithmetic that a drafter of one's own may need, and that exporters write.
_PLAIN = """
    Ceil Constant ConstantOfShape Cos DequantizeLinear DynamicQuantizeLinear Einsum Elu Erf Flatten
    Floor Gelu HardSigmoid HardSwish IsInf IsNaN LayerNormalization LeakyRelu LessOrEqual
    Mish Mod Neg Pow Reciprocal ReduceL2 ReduceMean ReduceMin ReduceProd Relu Round Selu Sign Sin
    Softplus Sqrt Sum Swish Tanh Tile Trilu Xor com.microsoft.FastGelu com.microsoft.QuickGelu
    com.microsoft.SimplifiedLayerNormalization com.microsoft.SkipLayerNormalization
    SimplifiedLayerNormalization
"""
OPERATORS = frozenset(f"{_OURS} {_PLAIN}".split())


def require_known_graph(bundle: Bundle, graph: Graph) -> None:
    """Refuses the ONNX file of `graph` before ONNX Runtime reads it.

    Raises BundleError if it is no ONNX model, uses an operator that is not in OPERATORS, or has
    weights in a file that the manifest does not list: its hash would go unchecked.
    """
    path = bundle.file(graph.file)
    try:
        outline = read_outline(path)
    except UserError as error:
        raise BundleError(f"{path} is not an ONNX model: {error}; build it again") from None
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror}); build it again") from None
    _require_known_operators(graph, outline)
    folder = PurePosixPath(graph.file).parent
    for name in sorted(outline.weight_files):
        if (folder / name).as_posix() not in bundle.manifest.files or ".." in name.split("/"):
            raise BundleError(
                f"{graph.file}: got weights in {name!r:.80}, expected a file that the manifest "
                "lists under files; build the bundle again"
            )


def _require_known_operators(graph: Graph, outline: OnnxOutline) -> None:
    unknown = sorted((outline.operators - OPERATORS) | outline.nested)
    if outline.has_functions:
        unknown.append("functions of its own")
    if unknown:
        names = ", ".join(ascii(name)[1:-1][:60] for name in unknown[:5])
        raise BundleError(
            f"{graph.file}: got operators {names}, expected those that spec-export build uses; "
            "build the bundle again"
        )
