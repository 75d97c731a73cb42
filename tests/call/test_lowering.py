"""Compiled programs: one custom call for each convolution, no transpose, no hidden memory."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_exact, exact_operands, reference
from problems import BY_NAME, DTYPES, LAYOUTS

import jaxconv
from jaxconv._src.library import native
from jaxconv._src.problem.spec import Op

CALL = re.compile(r"custom_call @(\w+)\(")
PLAIN = BY_NAME["plain"]


def lowered_text(op, layout, dtype="f32", **options) -> str:
    arrays = [problem_array(PLAIN, role, layout, dtype) for role in op.roles[:2]]
    return PLAIN.operation(op, dtype, layout=layout, **options).lower(*arrays).as_text()


def problem_array(problem, role, layout, dtype="f32"):
    return problem.to_layout(
        role, np.zeros(problem.canonical_shape(role), DTYPES[dtype][0]), layout
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", Op)
def test_one_custom_call_with_its_instance_and_no_transpose(platform, native_kernels, op, layout):
    """Channels-first arrays are not transposed either: layout constraints set their order."""
    text = lowered_text(op, layout)
    assert CALL.findall(text) == [f"jaxconv_{op.value}"]
    (instance,) = re.findall(r'instance = "([^"]+)"', text)
    assert instance in native_kernels.kernels() and instance.startswith(f"{op.value}_")
    (problem,) = re.findall(r'problem = "([^"]+)"', text)
    line = PLAIN.line(op, "f32")
    assert problem == line or (layout, problem) == ("krsc", f"{line} krsc")
    assert "stablehlo.transpose" not in text and "stablehlo.convolution" not in text
    # Minor to major; the channels are minor-most: axis 3 channels-last, axis 1 channels-first.
    fastest = "dense<[1, 3, 2, 0]>" if layout == "first" else "dense<[3, 2, 1, 0]>"
    assert f"operand_layouts = [{fastest}" in text


class OneKernel:
    """A platform with one kernel for each operation, which reads krsc filters if ``reads_krsc``."""

    def __init__(self, reads_krsc: bool, arrays):
        self.reads_krsc = reads_krsc
        self.arrays = arrays

    def select(self, line: str, algorithm: str, target: str) -> native.Selection:
        if line.endswith(" krsc") and not self.reads_krsc:
            return native.Selection(None, refusals=(native.Refusal("kernel", "rsck only"),))
        return native.Selection(f"{line.split()[0]}_kernel")


@pytest.mark.parametrize(
    ("letters", "window", "rsck", "lies_as_krsc"),
    [
        ("OHWI", (3, 3), [0, 3, 2, 1], True),
        ("OIHW", (1, 1), [0, 1, 3, 2], True),
        ("HWIO", (3, 3), [3, 2, 1, 0], False),
        ("OIHW", (3, 3), [0, 1, 3, 2], False),
        ("HWIO", (1, 1), [3, 2, 1, 0], False),
    ],
)
@pytest.mark.parametrize("reads_krsc", [False, True])
def test_a_filter_is_read_as_it_lies(
    native_cpu, monkeypatch, letters, window, rsck, lies_as_krsc, reads_krsc
):
    """A filter stored as (k, spatial, c) is read so if the kernel can, else as (spatial, c, k)."""
    monkeypatch.setattr(native, "load", lambda name: OneKernel(reads_krsc, native_cpu.arrays))
    extents = dict(zip("OIHW", (16, 8, *window), strict=True))
    x = jax.ShapeDtypeStruct((2, 9, 9, 8), jnp.bfloat16)
    w = jax.ShapeDtypeStruct([extents[letter] for letter in letters], jnp.bfloat16)

    def step(x, w):
        y, vjp = jax.vjp(functools.partial(conv, dimension_numbers=("NHWC", letters, "NHWC")), x, w)
        return y, *vjp(y)

    def conv(x, w, **options):
        return jaxconv.conv_general_dilated(x, w, (1, 1), "SAME", **options)

    found = {}
    with jax.default_device(jax.devices("cpu")[0]):
        text = jax.jit(step).lower(x, w).as_text()
        explained = str(jaxconv.explain(step, x, w))
        compiled = jax.jit(lambda x, w: step(x, w)[0]).lower(x, w).compile().as_text()
    for call in (line for line in text.splitlines() if CALL.search(line)):
        (op,), (line,) = CALL.findall(call), re.findall(r'problem = "([^"]+)"', call)
        layouts = re.findall(r"dense<(\[[\d, ]+\])>", call[call.index("operand_layouts") :])
        found[op] = line.endswith(" krsc"), [json.loads(layout) for layout in layouts]
    as_krsc = reads_krsc and lies_as_krsc
    for op in ("fprop", "dgrad"):
        said, layouts = found[f"jaxconv_{op}"]
        assert said == as_krsc and layouts[1] == ([3, 2, 1, 0] if as_krsc else rsck), op
        assert (f"{op}_kernel (krsc)" in explained) == as_krsc
    said, layouts = found["jaxconv_wgrad"]
    assert not said and layouts[2] == rsck, "wgrad writes one order"
    assert "stablehlo.transpose" not in text
    assert ("copy" in compiled) == (letters != "HWIO" and not as_krsc), compiled


def test_training_step_is_three_custom_calls(platform, native_kernels):
    x, w = (problem_array(PLAIN, role, "first") for role in "xw")

    def loss(x, w):
        return jnp.sum(jaxconv.conv(x, w, padding=1, data_format="NCHW") ** 2)

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, w).as_text()
    assert sorted(CALL.findall(text)) == ["jaxconv_dgrad", "jaxconv_fprop", "jaxconv_wgrad"]
    assert "stablehlo.transpose" not in text and "stablehlo.convolution" not in text


@pytest.mark.parametrize("op", Op)
def test_xla_on_request(platform, op):
    text = lowered_text(op, "last", algorithm="xla")
    assert CALL.findall(text) == []
    assert text.count("stablehlo.convolution") == 1


def test_vmap_over_both_operands_is_one_batched_call(platform, native_kernels):
    """The call has a batch of filters, not feature groups: each convolution stays dense."""
    x, w = np.zeros((3, 2, 8, 8, 16), np.float32), np.zeros((3, 3, 3, 16, 16), np.float32)
    text = jax.jit(jax.vmap(functools.partial(jaxconv.conv, padding=1))).lower(x, w).as_text()
    assert CALL.findall(text) == ["jaxconv_fprop"]
    assert " b3 n2 g1 c16 k16 " in text and "stablehlo.transpose" not in text


def test_a_chain_of_channels_first_layers_is_transposed_at_its_ends_only(native_cpu):
    """Layout constraints let XLA keep channels minor-most between neighbouring convolutions."""
    x, w = np.zeros((2, 16, 8, 8), np.float32), np.zeros((4, 16, 16, 3, 3), np.float32)

    def chain(x, w):
        for one in w:
            x = jax.nn.relu(jaxconv.conv(x, one, padding=1, data_format="NCHW"))
        return x

    with jax.default_device(jax.devices("cpu")[0]):
        text = jax.jit(chain).lower(x, w).compile().as_text()
    assert text.count('custom_call_target="jaxconv_fprop"') == 4
    body = text[text.index("ENTRY") :]
    activations = re.findall(r"f32\[2,16,8,8\]\{([\d,]+)\}[^=]*? custom-call", body)
    assert set(activations) == {"1,3,2,0"}, activations
    copies = re.findall(r"= f32\[2,16,8,8\]\S* (?:copy|transpose)\(", body)
    assert len(copies) <= 2, copies


def test_the_instance_reaches_the_compiled_program(platform, native_kernels):
    x, w = (problem_array(PLAIN, role, "last") for role in "xw")
    compiled = jax.jit(functools.partial(jaxconv.conv, padding=1)).lower(x, w).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="jaxconv_fprop"') == 1
    (instance,) = set(re.findall(r'instance = "([^"]+)"', text))
    assert instance in native_kernels.kernels()


def test_memory_analysis_counts_the_workspace(platform, native_kernels):
    """XLA plans and reports the workspace; the library allocates no memory itself."""
    arrays = [problem_array(PLAIN, role, "last") for role in "xw"]
    compiled = PLAIN.operation(Op.FPROP, "f32").lower(*arrays).compile()
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes >= sum(a.nbytes for a in arrays)
    assert memory.output_size_in_bytes >= 4 * np.prod(PLAIN.canonical_shape("y"))
    (dump,) = re.findall(r"jaxconv_fprop[^\n]*?u8\[(\d+)\]", compiled.as_text())[:1]
    assert memory.temp_size_in_bytes >= int(dump)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [Op.FPROP, Op.DGRAD])
def test_implicit_gemm_on_a_gpu_needs_no_memory_of_its_own(op):
    """There is no im2col matrix: the program allocates only operands and results."""
    arrays = [problem_array(PLAIN, role, "last") for role in op.roles[:2]]
    call = PLAIN.operation(op, "f32", algorithm="igemm_simt", precision="highest")
    memory = call.lower(*arrays).compile().memory_analysis()
    # XLA rounds each buffer up to 256 bytes. The empty workspace result is a buffer, and the tuple
    # of two results is a table of two pointers.
    assert memory.temp_size_in_bytes <= 1024


# --- selection ------------------------------------------------------------------------------------


def test_selection_is_a_function_of_its_arguments(platform, native_kernels):
    for op in Op:
        line = PLAIN.line(op, "f32")
        first = native_kernels.module.select(line, "native", "")
        assert first == native_kernels.module.select(line, "native", "")
        instance, workspace_bytes, slices, microseconds, xla_microseconds, refusals = first
        assert instance and workspace_bytes >= 0 and slices >= 1
        assert microseconds >= 0 and xla_microseconds >= 0
        assert all(name and reason for name, reason in refusals)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux")
def test_as_many_tasks_as_this_thread_may_use_cores(native_cpu):
    # Two problems, because selections are cached.
    key = "fprop f32:f32:f32 default b1 n{} g1 c64 k64 i56x57 f3x3 o56x57 s1x1 l1x1 d1x1 p1_1x1_1"
    cores = os.sched_getaffinity(0)
    assert native_cpu.select(key.format(8), "native", "").slices == min(len(cores), 8 * 56)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert native_cpu.select(key.format(9), "native", "").slices == 1
    finally:
        os.sched_setaffinity(0, cores)


def test_selection_refuses_what_it_cannot_read(platform, native_kernels):
    select = native_kernels.module.select
    line = PLAIN.line(Op.FPROP, "f32")
    with pytest.raises(ValueError, match="operation"):
        select("nonsense", "auto", "")
    with pytest.raises(ValueError, match="output extent"):
        select(line.replace("o14x14", "o13x14"), "auto", "")
    with pytest.raises(ValueError, match="no_such_kernel"):
        select(line, "no_such_kernel", "")


def test_every_platform_reports_how_it_was_built(platform, native_kernels):
    module = native_kernels.module
    info = module.build_info()
    assert info["version"] == jaxconv.__version__
    assert all(str(value).strip() for value in info.values())
    built, running = module.ffi_version(), native.runtime_ffi_version()
    assert built[0] == running[0] and built[1] <= running[1]
    assert set(module.registrations()) >= {f"jaxconv_{op.value}" for op in Op}


def test_the_log_says_why_a_convolution_goes_to_xla(platform, caplog):
    x, w = np.zeros((1, 4, 4, 2), np.complex64), np.zeros((3, 3, 2, 2), np.complex64)
    with caplog.at_level(logging.INFO, logger="jaxconv"):
        jax.jit(jaxconv.conv).lower(x, w)
    (record,) = [r for r in caplog.records if r.name == "jaxconv" and r.levelno == logging.INFO]
    assert "goes to XLA" in record.getMessage() and "complex64" in record.getMessage()
    assert platform in record.getMessage()


def test_the_log_is_silent_at_info_for_a_kernel(platform, native_kernels, caplog):
    arrays = [problem_array(PLAIN, role, "last") for role in "xw"]
    with caplog.at_level(logging.DEBUG, logger="jaxconv"):
        jax.jit(lambda *a: jaxconv.conv(*a, padding=1)).lower(*arrays)
    records = [r for r in caplog.records if r.name == "jaxconv"]
    assert [r.levelno for r in records] == [logging.DEBUG]
    instance = records[0].getMessage().rpartition(" ")[2]
    assert instance in native_kernels.kernels() and instance.startswith("fprop_")


def test_without_native_kernels_everything_still_runs():
    """On a platform without kernels XLA computes the convolution, and the log gives the reason."""
    program = """
    import logging, sys
    sys.modules["_jaxconv"] = None  # import of it fails
    logging.basicConfig(level=logging.INFO)
    import jax, numpy as np, jaxconv
    from jaxconv._src.library import native
    assert isinstance(native.load("cpu"), native.Refusal)
    x, w = np.ones((1, 4, 4, 2), np.float32), np.ones((3, 3, 2, 2), np.float32)
    dx = jax.jit(jax.grad(lambda x: jaxconv.conv(x, w).sum()))(x)
    assert dx[0, 1, 1, 0] == 18 and dx[0, 0, 0, 0] == 8, dx
    """
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    platform = {"cpu": "cpu", "gpu": "cuda"}[jax.default_backend()]
    assert f"goes to XLA: jaxconv[{platform}]: " in done.stderr


def run_python(program: str, *arguments: str, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# --- many executions ------------------------------------------------------------------------------


def test_a_chain_executed_many_times_with_fresh_inputs(platform):
    """Plans, workspaces and captured graphs keep no buffers of an earlier call."""
    problem = BY_NAME["groups"]
    _, w, _ = exact_operands(Op.FPROP, problem, "f32")
    w = np.sign(w)

    @jax.jit
    def chain(x, w):
        y = jaxconv.conv(x, w, padding=1, groups=4)
        dx, dw = jax.vjp(lambda x, w: jaxconv.conv(x, w, padding=1, groups=4), x, w)[1](jnp.sign(y))
        return y, dx, dw

    for seed in range(20):
        x = np.random.default_rng(seed).integers(-3, 4, problem.canonical_shape("x"))
        x = x.astype(np.float32)
        y, dx, dw = chain(jnp.asarray(x), jnp.asarray(w))
        expected = reference(Op.FPROP, problem, x, w).astype(np.float32)
        assert_exact(y, expected, f"run {seed}")
        dy = np.sign(expected)
        assert_exact(dx, reference(Op.DGRAD, problem, dy, w).astype(np.float32), f"run {seed}")
        assert_exact(dw, reference(Op.WGRAD, problem, x, dy).astype(np.float32), f"run {seed}")


def test_calls_from_several_threads(platform):
    """Four threads at a time run one compiled program, and with it one cached plan."""
    import concurrent.futures

    problem = BY_NAME["stride_and_tail"]
    calls = {op: problem.operation(op, "f32") for op in Op}

    def work(seed):
        reports = []
        for op, call in calls.items():
            lhs, rhs, expected = exact_operands(op, problem, "f32", seed=seed)
            for _ in range(5):
                reports.append(np.array_equal(call(lhs, rhs), expected))
        return all(reports)

    device = jax.devices({"cpu": "cpu", "cuda": "gpu"}[platform])[0]

    def placed(seed):
        with jax.default_device(device):
            return work(seed)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(placed, range(8)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("algorithm", "dtype", "channels"),
    [("igemm_simt", "float32", 8), ("igemm_wgmma", "bfloat16", 64)],
)
def test_command_buffers(algorithm, dtype, channels):
    """CUDA graphs capture every handler, and replay it on fresh inputs."""
    if algorithm == "igemm_wgmma" and jax.devices()[0].compute_capability != "9.0":
        pytest.skip("igemm_wgmma is for compute capability 9.0")
    program = """
    import jax, jax.numpy as jnp, numpy as np, jaxconv
    rng = np.random.default_rng(0)

    def draw():
        shapes = (2, 9, 9, CHANNELS), (3, 3, 3, CHANNELS, CHANNELS)
        return [jnp.asarray(rng.integers(-2, 3, shape), DTYPE) for shape in shapes]

    def step(convolve):
        def loss(x, w):
            for one in w:
                x = jnp.clip(convolve(x, one), -3, 3)
            return x.astype(jnp.float32).sum()
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))

    ours = step(lambda x, w: jaxconv.conv(x, w, algorithm=ALGORITHM, precision="highest"))
    reference = step(lambda x, w: jaxconv.conv(x, w, algorithm="xla", precision="highest"))
    text = ours.lower(*draw()).compile().as_text()
    assert all(name in text for name in ("jaxconv_fprop", "jaxconv_dgrad", "jaxconv_wgrad"))
    for run in range(20):
        x, w = draw()
        a, b = ours(x, w), reference(x, w)
        jax.tree.map(np.testing.assert_array_equal, a, b)
    print("replayed")
    """
    given = {"ALGORITHM": algorithm, "DTYPE": dtype, "CHANNELS": channels}
    for name, value in given.items():
        program = program.replace(name, repr(value))
    flags = " ".join(
        (
            os.environ.get("XLA_FLAGS", ""),
            "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL",
            "--xla_gpu_graph_min_graph_size=1",
        )
    )
    done = run_python(program, XLA_FLAGS=flags)
    assert done.returncode == 0 and "replayed" in done.stdout, done.stderr


@pytest.mark.parametrize("how", ["ours", "lax overridden"])
def test_lowering_is_quick(platform, native_kernels, how):
    """Lowering takes less than 10 times lax's time for a new convolution, 40 for one seen before.

    Lax's lowering of one seen before takes 0.2 ms. Compared is the CPU time of the thread, the
    minimum of several runs, because the machine may be busy.
    """
    x = jax.ShapeDtypeStruct((8, 28, 28, 16), np.float32)
    lax_conv = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )

    def milliseconds(conv, override: bool) -> tuple[float, float]:
        """Of a new convolution, and of one more that was lowered before."""

        def lower(convolutions: int, channels: int) -> float:
            w = jax.ShapeDtypeStruct((3, 3, 16, channels), np.float32)
            with jaxconv.override(override):
                traced = jax.jit(lambda x, w: [conv(x, w) for _ in range(convolutions)]).trace(x, w)
                start = time.thread_time()
                traced.lower()
                return 1e3 * (time.thread_time() - start)

        lower(1, 1)  # loads the kernels
        alone = min(lower(1, channels) for channels in range(8, 13))  # five different problems
        more, least = (min(lower(n, 8) for _ in range(3)) for n in (21, 1))
        return alone, (more - least) / 20

    unit = milliseconds(lax_conv, False)
    found = milliseconds(jaxconv.conv if how == "ours" else lax_conv, True)
    said = f"{how}: {found[0]:.1f} and {found[1]:.2f} ms; lax: {unit[0]:.1f} and {unit[1]:.2f} ms"
    assert found[0] < 10 * unit[0] and found[1] < 40 * unit[1], said
    print(said)


@pytest.mark.parametrize("algorithm", ["xla", "im2col"])
def test_a_demanded_precision_counts_more_than_the_global_default(algorithm):
    """Also in operations that XLA computes. The global default is read when a call is traced."""
    x, w = np.ones((1, 6, 6, 3), np.float32), np.ones((3, 3, 3, 4), np.float32)

    def text(precision):
        call = functools.partial(jaxconv.conv, precision=precision, algorithm=algorithm)
        return jax.jit(call).lower(x, w).as_text()

    default = text(None)
    with jax.default_matmul_precision("highest"):
        assert text("default") == default
        assert text(None) == text("highest") != default
