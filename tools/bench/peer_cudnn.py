"""cuDNN's own convolutions as a peer of the bench, through cuDNN's Python frontend.

``jax.lax`` and PyTorch have no int8 convolution on GPUs; cuDNN's graph API has one, in NHWC, with
scale, bias and ReLU fused. Unlike ``jax.lax``, it also identifies plans that use Winograd; these
support only NCHW. PyTorch holds the buffers. Every execution plan from cuDNN's heuristics is timed
once, and the fastest is measured.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import peer_torch

from jaxconv._src.problem.spec import Op
from jaxconv.bench.layers import Layer
from jaxconv.bench.problem import Problem
from jaxconv.bench.program import Program

# The number of timed runs of each plan.
_TIMED_RUNS = 5

# A plan is not timed if its first convolution takes this many times as long as another's.
_TOO_SLOW = 4


@dataclasses.dataclass(frozen=True)
class Cudnn:
    """A peer of the bench."""

    name: str
    winograd: bool

    def missing(self, platform: str) -> str | None:
        """See ``missing`` of this module."""
        return missing(platform)

    def about(self) -> dict[str, str]:
        """See ``about`` of this module."""
        return {"cudnn": about()}

    def build(self, problem: Problem) -> None:
        """See ``build`` of this module."""
        build(problem, self.winograd)

    def program(self, problem: Problem, copies: int, platform: str) -> Program:
        """See ``program`` of this module."""
        return program(problem, copies, self.winograd)


def missing(platform: str) -> str | None:
    """The reason why cuDNN cannot be measured on this platform, or None."""
    if platform != "cuda":
        return f"cuDNN needs an NVIDIA GPU, and JAX's default backend is {platform}"
    if importlib.util.find_spec("cudnn") is None:
        return "cuDNN's frontend is not installed (`pip install nvidia-cudnn-frontend`)"
    return peer_torch.missing(platform)


def about() -> str:
    """The versions of the frontend and of cuDNN."""
    import cudnn

    return f"frontend {cudnn.__version__}, cuDNN {cudnn.backend_version()}"


def program(problem: Problem, copies: int, winograd: bool = False) -> Program:
    """A program of ``copies`` convolutions, each with its own random operands.

    It replays a CUDA graph, because the frontend's work for a call takes longer than a small
    convolution.

    Args:
        problem: fprop in 2-D, in int8, float16 or bfloat16.
        copies: the number of convolutions.
        winograd: in NCHW, by a plan that cuDNN marks as Winograd.

    Raises:
        ValueError: the problem is not of this kind.
        RuntimeError: cuDNN has no plan for it.
    """
    return _program(_wanted(problem, winograd), copies)


def build(problem: Problem, winograd: bool = False) -> None:
    """Builds cuDNN's plans for ``program``, which is most of its time.

    Each layer is built once. Any thread may call this, one at a time. Building holds the GIL, so a
    second thread gains nothing.

    Raises:
        ValueError, RuntimeError: as ``program``.
    """
    wanted = _wanted(problem, winograd)
    if wanted not in _asked:
        _asked.add(wanted)
        _ahead[wanted] = _built(wanted)


class _Wanted(NamedTuple):
    layer: Layer
    dtype: str
    fused: bool
    winograd: bool


class _Built(NamedTuple):
    graph: Any
    tensors: dict[str, Any]
    handle: Any


# The problems that ``build`` was asked for, and the built graphs that no program has taken yet.
_asked: set[_Wanted] = set()
_ahead: dict[_Wanted, _Built] = {}


def _wanted(problem: Problem, winograd: bool) -> _Wanted:
    dtype = "int8" if problem.dtype.startswith("int8") else problem.dtype
    if (
        dtype not in ("int8", "f16", "bf16")
        or problem.layer.rank != 2
        or problem.op is not Op.FPROP
    ):
        raise ValueError("cuDNN is measured in fprop, in 2-D, of int8, float16 and bfloat16")
    return _Wanted(problem.layer, dtype, problem.requantized, winograd)


def _built(wanted: _Wanted) -> _Built:
    import cudnn

    handle = cudnn.create_handle()
    return _Built(*_graph(wanted, handle), handle)


# Rows for two layouts of one layer follow each other, and share cuDNN's program.
@functools.lru_cache(maxsize=2)
def _program(wanted: _Wanted, copies: int) -> Program:
    import torch

    graph, tensors, handle = _ahead.pop(wanted, None) or _built(wanted)
    make = (
        _integers
        if wanted.dtype == "int8"
        else functools.partial(_floats, wanted.dtype, wanted.winograd)
    )
    buffers = [make(wanted.layer, tensors) for _ in range(copies)]
    replayed, workspace = _fastest(graph, buffers, handle)

    def run(starts: int):
        for _ in range(starts):
            replayed.replay()
        torch.cuda.synchronize()
        return buffers, workspace  # keeps the graph's buffers alive

    return run


def _graph(wanted: _Wanted, handle: Any) -> tuple[Any, dict[str, Any]]:
    """The convolution as a graph of cuDNN with all plans built, and its tensors by name."""
    import cudnn

    layer, dtype, fused, winograd = wanted
    types = cudnn.data_type
    own = {"int8": types.INT8, "f16": types.HALF, "bf16": types.BFLOAT16}[dtype]
    sums = types.INT32 if dtype == "int8" else types.FLOAT
    graph = cudnn.pygraph(
        io_data_type=own,
        intermediate_data_type=types.FLOAT if fused else sums,
        compute_data_type=sums,
        handle=handle,
    )

    def tensor(name: str, n: int, c: int, h: int, w: int, dtype: Any = own) -> Any:
        strides = [c * h * w, h * w, w, 1] if winograd else [c * h * w, 1, c * w, c]
        return graph.tensor(name=name, dim=[n, c, h, w], stride=strides, data_type=dtype)

    x = tensor("x", layer.n, layer.c, *layer.spatial)
    w = tensor("w", layer.k, layer.c // layer.groups, *layer.window)
    y = graph.conv_fprop(
        image=x,
        weight=w,
        padding=list(layer.padding),
        stride=list(layer.stride),
        dilation=list(layer.dilation),
        compute_data_type=sums,
    )
    tensors = {"x": x, "w": w}
    if fused:
        for name, operation in (("scale", graph.mul), ("bias", graph.add)):
            tensors[name] = tensor(name, 1, layer.k, 1, 1, types.FLOAT)
            y = operation(a=y, b=tensors[name], compute_data_type=types.FLOAT)
        y = graph.relu(input=y, compute_data_type=types.FLOAT)
    y.set_output(True).set_data_type(types.INT32 if dtype == "int8" and not fused else own)
    graph.validate()
    graph.build_operation_graph()
    modes = cudnn.heur_mode
    graph.create_execution_plans([modes.A, modes.B, modes.FALLBACK])
    if winograd:
        graph.select_numeric_notes([cudnn.numerical_note.WINOGRAD])
    graph.check_support()
    graph.build_plans(cudnn.build_plan_policy.ALL)
    return graph, {**tensors, "y": y}


def _floats(
    dtype: str, channels_first: bool, layer: Layer, tensors: dict[str, Any]
) -> dict[Any, Any]:
    """The buffers of one convolution: random operands, and an uninitialised result."""
    import torch

    types = {"f16": torch.float16, "bf16": torch.bfloat16}
    order = torch.contiguous_format if channels_first else torch.channels_last

    def normal(n: int, c: int, h: int, w: int):
        drawn = torch.randn((n, c, h, w), device="cuda", dtype=types[dtype])
        return drawn.to(memory_format=order)

    return {
        tensors["x"]: normal(layer.n, layer.c, *layer.spatial),
        tensors["w"]: normal(layer.k, layer.c // layer.groups, *layer.window),
        tensors["y"]: normal(layer.n, layer.k, *layer.out_spatial),
    }


def _integers(layer: Layer, tensors: dict[str, Any]) -> dict[Any, Any]:
    """``_floats`` for int8."""
    import torch

    on_gpu, fused = {"device": "cuda"}, "scale" in tensors

    def integers(*shape: int):
        return torch.randint(-127, 128, shape, dtype=torch.int8, **on_gpu)

    filled = {
        "x": integers(*layer.shape("x")),
        "w": integers(layer.k, *layer.window, layer.c // layer.groups),
        "y": torch.empty(layer.shape("y"), dtype=torch.int8 if fused else torch.int32, **on_gpu),
    }
    if fused:
        # A scale of about 40 / (73^2 sqrt(terms)) makes results fill the range of int8.
        deviation = 73**2 * (layer.c // layer.groups * layer.window[0] * layer.window[1]) ** 0.5
        filled["scale"] = (torch.rand(layer.k, **on_gpu) + 0.5) * (48 / deviation)
        filled["bias"] = torch.rand(layer.k, **on_gpu) * 48 - 24
    return {tensors[name]: buffer for name, buffer in filled.items()}


def _fastest(graph: Any, buffers: list[dict[Any, Any]], handle: Any) -> tuple[Any, Any]:
    """A CUDA graph of all convolutions by the fastest plan, and its workspace."""
    import torch

    best, least, least_first = None, float("inf"), float("inf")
    refusals: list[str] = []
    for plan in range(graph.get_execution_plan_count()):
        try:
            size = max(1, graph.get_workspace_size_plan_at_index(plan))
            workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
            first = _first(graph, buffers[0], workspace, plan, handle)
            if first > _TOO_SLOW * least_first:
                continue
            least_first = min(first, least_first)
            captured = _captured(graph, buffers, workspace, plan, handle)
            milliseconds = _time(captured.replay)
        except Exception as error:  # a plan from the heuristics may still fail
            refusals.append(str(error).partition("\n")[0])
            continue
        if milliseconds < least:
            best, least = (captured, workspace), milliseconds
    if best is None:
        raise RuntimeError(f"cuDNN has no plan that runs: {'; '.join(refusals) or 'none offered'}")
    return best


def _first(graph: Any, buffers: dict[Any, Any], workspace: Any, plan: int, handle: Any) -> float:
    """Milliseconds of a plan's second run. The first loads code, which cannot be captured."""
    import cudnn
    import torch

    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    graph.execute_plan_at_index(buffers, workspace, plan, handle=handle)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.execute_plan_at_index(buffers, workspace, plan, handle=handle)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def _captured(
    graph: Any, buffers: list[dict[Any, Any]], workspace: Any, plan: int, handle: Any
) -> Any:
    """A CUDA graph of all convolutions in sequence, by one of cuDNN's plans."""
    import cudnn
    import torch

    def execute(chosen: list[dict[Any, Any]]) -> None:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        for each in chosen:
            graph.execute_plan_at_index(each, workspace, plan, handle=handle)

    captured = torch.cuda.CUDAGraph()
    # "relaxed", because JAX's threads may allocate memory during the capture.
    with torch.cuda.graph(captured, capture_error_mode="relaxed"):
        execute(buffers)
    return captured


def _time(run: Callable[[], Any]) -> float:
    """Milliseconds of a run on the GPU, the minimum of several."""
    import torch

    run()
    times = []
    for _ in range(_TIMED_RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)
