"""PyTorch's convolution as a peer of the bench: cuDNN's kernels, or PyTorch's on the CPU."""

from __future__ import annotations

import importlib.util

from jaxconv._src.problem.spec import Op
from jaxconv.bench.problem import Problem
from jaxconv.bench.program import Program


class Torch:
    """A peer of the bench."""

    name = "torch"

    def missing(self, platform: str) -> str | None:
        """See ``missing`` of this module."""
        return missing(platform)

    def about(self) -> dict[str, str]:
        """See ``about`` of this module."""
        return {"torch": about()}

    def build(self, problem: Problem) -> None:
        """Does nothing: PyTorch has nothing to build ahead."""

    def program(self, problem: Problem, copies: int, platform: str) -> Program:
        """See ``program`` of this module."""
        return program(problem, copies, platform)


def missing(platform: str) -> str | None:
    """The reason why PyTorch cannot be measured on this platform, or None."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed (`pip install torch`)"
    import torch

    if platform == "cuda" and not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU; install its CUDA build"
    return None


def about() -> str:
    """The versions of PyTorch and of cuDNN."""
    import torch

    return f"{torch.__version__}, cuDNN {torch.backends.cudnn.version()}"


def program(problem: Problem, copies: int, platform: str) -> Program:
    """A program of ``copies`` convolutions, channels-last, each with its own random operands.

    On a GPU it replays a CUDA graph, captured after cuDNN's benchmark mode has chosen kernels, so
    the time contains no dispatch of PyTorch.

    Raises:
        ValueError: PyTorch has no such convolution.
    """
    import torch

    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    if problem.dtype not in dtypes:
        raise ValueError(f"PyTorch has no {problem.dtype} convolution")
    layer, device = problem.layer, "cuda" if platform == "cuda" else "cpu"
    channels_last = {2: torch.channels_last, 3: torch.channels_last_3d}
    memory_format = channels_last.get(layer.rank, torch.contiguous_format)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = problem.precision == "default"

    def draw(role: str):
        shape = layer.shape(role)
        if role == "w":  # (*window, c, k) -> (k, c, *window)
            shape = (shape[-1], shape[-2], *shape[:-2])
        else:
            shape = (shape[0], shape[-1], *shape[1:-1])
        return torch.randn(shape, device=device, dtype=dtypes[problem.dtype]).to(
            memory_format=memory_format
        )

    window = (list(layer.stride), list(layer.padding), list(layer.dilation))
    lhs_role, rhs_role, out_role = problem.op.roles
    pairs = [(draw(lhs_role), draw(rhs_role)) for _ in range(copies)]

    if problem.op is Op.FPROP:

        def one(x, w):
            return torch.ops.aten.convolution(
                x, w, None, *window, False, [0] * layer.rank, layer.groups
            )
    else:
        shaped = draw(out_role)  # a gradient reads only the shape of this array

        def one(lhs, rhs):
            dgrad = problem.op is Op.DGRAD
            dy, x, w = (lhs, shaped, rhs) if dgrad else (rhs, lhs, shaped)
            return torch.ops.aten.convolution_backward(
                *(dy, x, w, None, *window, False, [0] * layer.rank, layer.groups),
                [dgrad, not dgrad, False],
            )

    def all_pairs():
        with torch.no_grad():
            return [one(*pair) for pair in pairs]

    if device == "cpu":

        def run(starts: int):
            for _ in range(starts):
                results = all_pairs()
            return results

        return run
    for _ in range(2):
        all_pairs()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = all_pairs()

    def replay(starts: int):
        for _ in range(starts):
            graph.replay()
        torch.cuda.synchronize()
        return results  # keeps the graph's buffers alive

    return replay
