"""cuDNN's own int8 convolution as a further side, through cuDNN's Python frontend.

``jax.lax`` and PyTorch have no int8 convolution on GPUs; cuDNN's graph API has one, in NHWC, with
scale, bias and ReLU fused. PyTorch holds the buffers. Every execution plan that cuDNN's heuristics
offer is timed once, and the fastest is measured.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from jaxconv.bench import peer
from jaxconv.bench.problem import Problem
from jaxconv.bench.program import Program

# Runs of a plan before and while it is timed.
_WARM_UPS, _TIMED_RUNS = 2, 20


def missing(platform: str) -> str | None:
    """Why cuDNN cannot be measured beside the given platform, or None."""
    if platform != "cuda":
        return f"cuDNN needs an NVIDIA GPU, and JAX's default backend is {platform}"
    if importlib.util.find_spec("cudnn") is None:
        return "cuDNN's frontend is not installed (`pip install nvidia-cudnn-frontend`)"
    return peer.missing(platform)


def about() -> str:
    """The frontend's version and cuDNN's."""
    import cudnn

    return f"frontend {cudnn.__version__}, cuDNN {cudnn.backend_version()}"


def program(problem: Problem, copies: int) -> Program:
    """A program of ``copies`` convolutions, each with random operands of its own.

    Raises:
        ValueError: the problem is not a 2-D convolution of int8.
        RuntimeError: cuDNN has no plan for it.
    """
    if not problem.dtype.startswith("int8") or problem.layer.rank != 2:
        raise ValueError("cuDNN is measured on 2-D convolutions of int8")
    import cudnn
    import torch

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    graph, tensors = _graph(problem, handle)
    buffers = [_buffers(problem, tensors) for _ in range(copies)]
    plan, workspace = _fastest(graph, buffers[0], handle)

    def run(starts: int):
        for _ in range(starts):
            for each in buffers:
                graph.execute_plan_at_index(each, workspace, plan, handle=handle)
        torch.cuda.synchronize()
        return buffers

    return run


def _graph(problem: Problem, handle: Any) -> tuple[Any, dict[str, Any]]:
    """The convolution as a graph of cuDNN's, and its tensors by name."""
    import cudnn

    layer, types, fused = problem.layer, cudnn.data_type, problem.requantized
    graph = cudnn.pygraph(
        io_data_type=types.INT8,
        intermediate_data_type=types.FLOAT if fused else types.INT32,
        compute_data_type=types.INT32,
        handle=handle,
    )

    def nhwc(name: str, n: int, c: int, h: int, w: int, dtype: Any = types.INT8) -> Any:
        strides = [c * h * w, 1, c * w, c]
        return graph.tensor(name=name, dim=[n, c, h, w], stride=strides, data_type=dtype)

    x = nhwc("x", layer.n, layer.c, *layer.spatial)
    w = nhwc("w", layer.k, layer.c // layer.groups, *layer.window)
    y = graph.conv_fprop(
        image=x,
        weight=w,
        padding=list(layer.padding),
        stride=list(layer.stride),
        dilation=list(layer.dilation),
        compute_data_type=types.INT32,
    )
    tensors = {"x": x, "w": w}
    if fused:
        for name, operation in (("scale", graph.mul), ("bias", graph.add)):
            tensors[name] = nhwc(name, 1, layer.k, 1, 1, types.FLOAT)
            y = operation(a=y, b=tensors[name], compute_data_type=types.FLOAT)
        y = graph.relu(input=y, compute_data_type=types.FLOAT)
    y.set_output(True).set_data_type(types.INT8 if fused else types.INT32)
    graph.validate()
    graph.build_operation_graph()
    modes = cudnn.heur_mode
    graph.create_execution_plans([modes.A, modes.B, modes.FALLBACK])
    graph.check_support()
    graph.build_plans(cudnn.build_plan_policy.ALL)
    return graph, {**tensors, "y": y}


def _buffers(problem: Problem, tensors: dict[str, Any]) -> dict[Any, Any]:
    """One convolution's buffers: what is read is random, the result is not written yet."""
    import torch

    layer, on_gpu = problem.layer, {"device": "cuda"}

    def integers(*shape: int):
        return torch.randint(-127, 128, shape, dtype=torch.int8, **on_gpu)

    shapes = {
        "x": integers(*layer.shape("x")),
        "w": integers(layer.k, *layer.window, layer.c // layer.groups),
        "y": torch.empty(
            layer.shape("y"), dtype=torch.int8 if problem.requantized else torch.int32, **on_gpu
        ),
    }
    if problem.requantized:
        # Of the order of 40 / (73^2 sqrt(terms)), so that results fill the range of int8.
        deviation = 73**2 * (layer.c // layer.groups * layer.window[0] * layer.window[1]) ** 0.5
        shapes["scale"] = (torch.rand(layer.k, **on_gpu) + 0.5) * (48 / deviation)
        shapes["bias"] = torch.rand(layer.k, **on_gpu) * 48 - 24
    return {tensors[name]: buffer for name, buffer in shapes.items()}


def _fastest(graph: Any, buffers: dict[Any, Any], handle: Any) -> tuple[int, Any]:
    """The index of the plan that takes least time, and a workspace for it."""
    import torch

    seconds: dict[int, float] = {}
    refusals: list[str] = []
    for plan in range(graph.get_execution_plan_count()):
        try:
            size = max(1, graph.get_workspace_size_plan_at_index(plan))
            workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
            seconds[plan] = _time(
                lambda plan=plan, workspace=workspace: graph.execute_plan_at_index(
                    buffers, workspace, plan, handle=handle
                )
            )
        except Exception as error:  # a plan that the heuristics offer may still not run
            refusals.append(str(error).partition("\n")[0])
    if not seconds:
        raise RuntimeError(f"cuDNN has no plan that runs: {'; '.join(refusals) or 'none offered'}")
    best = min(seconds, key=seconds.__getitem__)
    size = max(1, graph.get_workspace_size_plan_at_index(best))
    return best, torch.empty(size, dtype=torch.uint8, device="cuda")


def _time(run: Callable[[], Any]) -> float:
    """Milliseconds of one run on the GPU."""
    import torch

    for _ in range(_WARM_UPS):
        run()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_TIMED_RUNS):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / _TIMED_RUNS
