"""Makes TensorRT's execution contexts, one for each set of shapes, and runs them."""

from typing import Any

from spec_runtime.backends.cuda.api import Cuda
from spec_runtime.backends.cuda.graph_cache import GraphRun
from spec_runtime.backends.layout import Layout, PackedFeeds
from spec_runtime.backends.tensorrt.api import TensorRT


class ContextMaker:
    """Makes execution contexts of one engine, whose memory the caller provides.

    TensorRT-RTX compiles kernels for a GPU and for shapes at run time. By default it does so during
    the runs, with general kernels until it is done, and a CUDA graph captured meanwhile would keep
    those. Here it compiles before a context's first run.
    """

    def __init__(self, engine: Any, trt: TensorRT) -> None:
        self._engine, self._trt = engine, trt
        module, config = trt.module, engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(
            module.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        config.dynamic_shapes_kernel_specialization_strategy = (
            module.DynamicShapesKernelSpecializationStrategy.EAGER
        )
        # We capture runs ourselves, and one capture cannot hold another.
        config.cuda_graph_strategy = module.CudaGraphStrategy.DISABLED
        self._config = config

    def make(self) -> Any:
        """Returns a new execution context without memory, profile, shapes or addresses."""
        context = self._engine.create_execution_context(runtime_config=self._config)
        if context is None:
            raise RuntimeError(f"TensorRT makes no execution context: {self._trt.reason}")
        return context


class ShapedContext(GraphRun):
    """One execution context, set up for one profile and one set of shapes.

    It is never changed again: a CUDA graph is valid only as long as the context that it was
    captured from stays as it was. `feeds` are in pinned memory, `results` says where the outputs
    lie in the results' memory.
    """

    def __init__(
        self, context: Any, trt: TensorRT, cuda: Cuda, feeds: PackedFeeds, results: Layout
    ) -> None:
        super().__init__(cuda)
        self.feeds, self.results = feeds, results
        self._context, self._trt = context, trt

    def enqueue(self) -> None:
        """See GraphRun.enqueue. The first run also finishes TensorRT's own preparations."""
        if not self._context.execute_async_v3(self._cuda.stream):
            raise RuntimeError(f"TensorRT does not run: {self._trt.reason}")
        if not self.has_run:
            self.may_capture = bool(self._context.is_stream_capturable(self._cuda.stream))
