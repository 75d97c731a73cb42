"""Configuration: options, platforms, seeds, and the record of a GPU run."""

from __future__ import annotations

import collections
import json
import os
import re
import sys
import types

import cpu_features
import gpu_report
import gpus
import jax
import pytest
from cc_programs import choices_program, objects  # noqa: F401 (fixtures)
from jax_settings import UNOPTIMIZED, VIRTUAL_DEVICES
from selection_program import cuda_selection  # noqa: F401 (a fixture)
from worker_order import long_first

from jaxconv._src.library import native


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")
    parser.addoption("--seed", type=int, default=0, help="seed of the random problems")
    parser.addoption(
        "--random",
        type=int,
        default=300,
        help="how many random calls test_fuzz.py makes (--slow: all 2500)",
    )
    parser.addoption("--problem", type=int, help="this random problem only")
    parser.addoption(
        "--record-gpu-report",
        metavar="PATH",
        help="write the outcomes of the tests marked gpu and the kernel sources' hash to PATH",
    )


def pytest_report_header(config):
    cpu, cuda = native.load("cpu"), native.load("cuda")
    return [
        f"jaxconv: jax {jax.__version__}, devices {jax.default_backend()} x{jax.device_count()}, "
        f"seed {config.getoption('seed')}",
        *(
            f"jaxconv: {name} kernels: "
            + (p.reason if isinstance(p, native.Refusal) else f"{len(p.kernels())} instances")
            for name, p in (("cpu", cpu), ("cuda", cuda))
        ),
    ]


def pytest_terminal_summary(terminalreporter):
    """Prints the summed results of the random problems, and the state of the GPU report."""
    total: collections.Counter[str] = collections.Counter()
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "fuzz":
                total.update(json.loads(value))
            elif name == "gpu report":
                terminalreporter.section(name)
                terminalreporter.write_line(value)
    if total:
        seed = terminalreporter.config.getoption("seed")
        terminalreporter.section(f"random problems, seed {seed}")
        for name, count in sorted(total.items()):
            terminalreporter.line(f"{count:6} {name}")


def gpu_missing() -> str:
    """The reason why tests marked gpu cannot run here, or ""."""
    if jax.default_backend() != "gpu":
        return f"no GPU: jax's default backend is {jax.default_backend()}"
    return ""


@pytest.hookimpl(wrapper=True, tryfirst=True)  # sees the items that -k and -m have left
def pytest_collection_modifyitems(config, items):
    config.gpu_tests = {item.nodeid for item in items if item.get_closest_marker("gpu")}
    missing = gpu_missing()
    for item in items:
        if missing and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=missing))
        if item.get_closest_marker("slow") and not config.getoption("slow"):
            item.add_marker(pytest.mark.skip(reason="slow, needs --slow"))
    yield
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers > 1:
        items[:] = long_first(items, [bool(i.get_closest_marker("long")) for i in items], workers)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Makes ``worksteal`` pytest-xdist's default scheduler; ``long_first`` gives the reason."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture(autouse=True)
def optimization(request):
    """Turns XLA's optimisations on for tests marked ``optimized``, whose arrays are large."""
    if request.node.get_closest_marker("optimized"):
        jax.config.update("jax_disable_most_optimizations", False)
        yield
        jax.config.update("jax_disable_most_optimizations", UNOPTIMIZED)
    else:
        yield


PLATFORMS = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=PLATFORMS)
def platform(request):
    """Runs a test on every platform. Yields its name; arrays and programs are placed there."""
    kind = {"cpu": "cpu", "cuda": "gpu"}[request.param]
    with jax.default_device(jax.devices(kind)[0]):
        yield request.param


@pytest.fixture
def on_the_cpu():
    """Programs run on the CPU, and ``fuse`` rewrites for it."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def mesh():
    """Eight virtual CPU devices on one axis, "data"."""
    devices = jax.devices("cpu")
    assert len(devices) == VIRTUAL_DEVICES, "XLA_FLAGS ask for eight virtual CPU devices"
    with jax.default_device(devices[0]):
        yield jax.make_mesh(
            (VIRTUAL_DEVICES,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices
        )


class GpuRecord:
    """Collects outcomes of tests marked gpu; with pytest-xdist, in the controlling process."""

    def __init__(self, path: str, gpu_count: int):
        self.path = path
        self.gpu_count = gpu_count
        self.outcomes: dict[str, tuple[str, str]] = {}
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report):
        if "gpu" in report.keywords and (report.when == "call" or report.outcome != "passed"):
            reason = ""
            if report.skipped:  # the report is (file, line, "Skipped: reason")
                reason = str(report.longrepr[2]).removeprefix("Skipped: ")
            self.outcomes[report.nodeid] = (report.outcome, reason)
            self.seconds[report.nodeid] = report.duration

    def pytest_sessionfinish(self):
        gpu_report.update(self.path, self.outcomes, self.seconds, gpu_count=self.gpu_count)


def pytest_configure(config):
    if config.getoption("numprocesses", None):  # one core each; the processes inherit it
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    path = config.getoption("record_gpu_report")
    if path and not hasattr(config, "workerinput"):
        if gpu_missing():
            raise pytest.UsageError(f"--record-gpu-report: {gpu_missing()}")
        gpu_report.commit()  # raises now, not after the tests
        used = min(config.getoption("numprocesses", None) or 1, max(1, len(gpus.visible())))
        config.pluginmanager.register(GpuRecord(path, used))


@pytest.fixture
def seed(request) -> int:
    return request.config.getoption("seed")


@pytest.fixture
def native_cpu() -> native.Platform:
    """The CPU kernels. The test fails if they are missing in a build that should have them."""
    kernels = native.load("cpu")
    if isinstance(kernels, native.Refusal):
        if native_cpu_expected():
            pytest.fail(f"no CPU kernels on Linux x86-64: {kernels.reason}")
        pytest.skip(f"no CPU kernels for {sys.platform}: {kernels.reason}")
    return kernels


def native_cpu_expected() -> bool:
    return sys.platform == "linux" and os.uname().machine == "x86_64"


@pytest.fixture
def for_a_gpu_on_the_cpu(monkeypatch):
    """``fuse`` rewrites for a GPU, but programs run on the CPU."""
    monkeypatch.setenv("JAXCONV_TARGET", "sm_90a")
    with jax.default_device(jax.devices("cpu")[0]):
        yield


class CudaCalls:
    """Stands for the CUDA library: it lists its calls by name, and refuses every problem."""

    def __init__(self, arrays):
        self.arrays = arrays
        self.module = types.SimpleNamespace(build_info=lambda: "the calls alone")

    def select(self, *_):
        return native.Selection(None, refusals=(native.Refusal("all", "not in this test"),))

    def plan_pass(self, key, _):
        """Plans a pass if its channels are a multiple of 8, as kernels of passes require."""
        (channels,) = (int(word[1:]) for word in key.split() if re.fullmatch(r"c\d+", word))
        if channels % 8:
            return native.PassPlan(None, "not in this test", 1, 0, 0.0)
        return native.PassPlan(f"{key.split()[0]}_kernel", "", 1, 64, 1.0)


@pytest.fixture
def cuda_calls(monkeypatch, native_cpu):
    """Lowers programs as if the CUDA kernels were loaded."""
    load = native.load
    calls = CudaCalls(native_cpu.arrays)
    monkeypatch.setattr(native, "load", lambda name: calls if name == "cuda" else load(name))


@pytest.fixture
def native_kernels(platform) -> native.Platform:
    """The kernels of the test's platform. A machine with a GPU must have the CUDA kernels."""
    kernels = native.load(platform)
    if isinstance(kernels, native.Refusal):
        if platform == "cuda" or native_cpu_expected():
            pytest.fail(f"no {platform} kernels: {kernels.reason}")
        pytest.skip(f"no {platform} kernels for {sys.platform}: {kernels.reason}")
    return kernels


@pytest.fixture
def registered_cuda_kernels() -> native.Platform:
    """The CUDA kernels, known to XLA; for tests with a GPU that trace no primitive of jaxconv."""
    kernels = native.load("cuda")
    if isinstance(kernels, native.Refusal):
        pytest.fail(f"no cuda kernels: {kernels.reason}")
    return kernels


@pytest.fixture
def native_int8_kernels(platform, native_kernels) -> native.Platform:
    """The same, on a platform whose kernels compute 8-bit convolutions."""
    if platform == "cpu":
        cpu_features.skip_without("fprop_onednn_s8")
    return native_kernels
