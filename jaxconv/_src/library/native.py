"""Loads the compiled kernels and registers their FFI handlers, one library per platform.

The libraries are in the package ``_jaxconv`` that the build installs. A library that is missing,
cannot be loaded or was built against a newer FFI than the running jaxlib is not registered, and the
reason is kept: registering it would break every JAX program of the process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import os
import pathlib
import re
from typing import NamedTuple

import jax

# The platforms with kernels.
PLATFORMS = ("cpu", "cuda")


class Refusal(NamedTuple):
    """Why one kernel, or a whole platform, does not accept a problem."""

    kernel: str
    reason: str


class Selection(NamedTuple):
    """The plan of one custom call, or why XLA computes the convolution.

    Attributes:
        instance: the kernel instance, or None if XLA computes the convolution.
        workspace_bytes: memory that it needs in addition to its operands and result.
        slices: split-K slices.
        refusals: without an instance, each refusing kernel and its reason; a single entry "xla" if
            XLA's convolution is predicted to be faster.
        microseconds: predicted time of the fastest kernel, 0 if unknown.
        xla_microseconds: predicted time of XLA's convolution, 0 if unknown.
        krsc: the instance reads the filter as (k, spatial, c), not as (spatial, c, k).
        packed: the instance reads a packed int8 filter and is called like ``conv_int8_p``.
        in_jax: the instance is no kernel but an algorithm written in JAX.
    """

    instance: str | None
    workspace_bytes: int = 0
    slices: int = 1
    refusals: tuple[Refusal, ...] = ()
    microseconds: float = 0.0
    xla_microseconds: float = 0.0
    krsc: bool = False
    packed: bool = False
    in_jax: bool = False

    @property
    def xla_is_faster(self) -> bool:
        """Whether a kernel accepts the problem, but XLA is predicted to be faster."""
        return self.instance is None and self.microseconds > 0 and self.xla_microseconds > 0

    @property
    def expected_microseconds(self) -> float:
        """Predicted time of the chosen implementation, 0 if unknown."""
        return self.xla_microseconds if self.xla_is_faster else self.microseconds


class PassPlan(NamedTuple):
    """The plan of a pass, or why no kernel accepts it.

    Attributes:
        kernel: the kernel's name, or None.
        reason: why there is no kernel.
        parts: the parts of a segment's rows, if the program adds up partial sums.
        block_rows: the rows that a part processes at a time.
        microseconds: predicted time.
    """

    kernel: str | None
    reason: str
    parts: int
    block_rows: int
    microseconds: float


def runtime_ffi_version() -> tuple[int, int]:
    """The FFI API version of the installed jaxlib, read from the header it ships."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    if len(found) != 2:
        raise ValueError("c_api.h defines no XLA_FFI_API_MAJOR and XLA_FFI_API_MINOR")
    return int(found["MAJOR"]), int(found["MINOR"])


def _load_openmp() -> None:
    """Loads libgomp, on which oneDNN and this library depend.

    The system's copy comes first, because other packages may have loaded it: two copies in a
    process would be two thread pools. A wheel contains a copy for systems without one.
    """
    copy = importlib.resources.files("_jaxconv").joinpath("libgomp.so.1")
    try:
        ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        if copy.is_file():
            ctypes.CDLL(str(copy), mode=ctypes.RTLD_GLOBAL)


def _load_onednn() -> None:
    """Loads oneDNN's shared object, a pip package outside the loader's path."""
    for file in importlib.metadata.files("onednn-cpu-gomp") or ():
        if file.name.startswith("libdnnl.so."):
            ctypes.CDLL(str(file.locate()), mode=ctypes.RTLD_GLOBAL)
            return
    raise ImportError("the package onednn-cpu-gomp holds no libdnnl.so")


def _driver_release() -> int:
    """The CUDA release of the NVIDIA driver, 12080 for 12.8; 0 without a driver."""
    release = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(release))
    except OSError:
        return 0
    return release.value


def _check_driver(module) -> None:
    """Raises ImportError where the driver is older than the CUDA release of the kernels."""
    release = _driver_release()
    # A driver of CUDA 13 serves all releases that build the kernels; ``build_info`` asks the GPU.
    if 0 < release < 13000 and int((built := module.build_info()["cuda"]).split(".")[0]) >= 13:
        raise ImportError(
            f"built with CUDA {built}, which needs an NVIDIA driver of the 580 series or newer; "
            f"this one is of CUDA {release // 1000}.{release % 1000 // 10}. Update it, or build "
            "jaxconv with an installed toolkit of CUDA 12 (CUDA 12's pip packages have no nvcc)"
        )


class Platform:
    """The kernels of one platform, registered with XLA on construction."""

    def __init__(self, name: str):
        if name == "cpu":
            _load_openmp()
            _load_onednn()
        self.name = name
        self.module = importlib.import_module(f"_jaxconv.{name}")
        built, running = self.module.ffi_version(), runtime_ffi_version()
        if built[0] != running[0] or built[1] > running[1]:
            raise ImportError(
                f"built against FFI {built[0]}.{built[1]}, newer than jaxlib's "
                f"{running[0]}.{running[1]}; rebuild jaxconv or update jaxlib"
            )
        if name == "cuda":
            _check_driver(self.module)
        # The names of every call's operands and results, in order.
        self.arrays: dict[str, tuple[list[str], list[str]]] = self.module.arrays()
        for target, handler in self.module.registrations().items():
            jax.ffi.register_ffi_target(
                target, handler, platform={"cpu": "cpu", "cuda": "CUDA"}[name]
            )

    @functools.lru_cache(maxsize=4096)  # noqa: B019 (a platform lives as long as the process)
    def select(self, key: str, algorithm: str, target: str) -> Selection:
        """Chooses an instance for a problem key, or XLA's convolution.

        Args:
            key: the problem, in the form of ``problem_key``.
            algorithm: "auto", "native" (without XLA as a candidate), a family or an instance.
            target: "" for the devices of this process, or an architecture such as "sm_90a".

        Raises:
            ValueError: the problem cannot be parsed, or the algorithm is unknown.
        """
        instance, workspace_bytes, slices, microseconds, xla_microseconds, refusals = (
            self.module.select(key, algorithm, target)
        )
        return Selection(
            instance or None,
            workspace_bytes,
            slices,
            tuple(Refusal(*refusal) for refusal in refusals),
            microseconds,
            xla_microseconds,
        )

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def plan_pass(self, key: str, target: str) -> PassPlan:
        """Plans a pass by its key (cc/cuda/common/pass.h).

        Args:
            key: the key of the pass.
            target: as in ``select``.

        Raises:
            ValueError: the key cannot be parsed.
        """
        kernel, reason, parts, block_rows, microseconds = self.module.plan_pass(key, target)
        return PassPlan(kernel or None, reason, parts, block_rows, microseconds)

    def pass_kernels(self) -> list[list[str]]:
        """The name, family and pass of every kernel of a pass; none on a CPU."""
        return self.module.pass_kernels() if hasattr(self.module, "pass_kernels") else []

    def kernels(self) -> list[str]:
        """Names of every instance of this build."""
        return self.module.kernels()


_NOT_BUILT = {
    "cpu": "this installation has no CPU kernels (they are built on Linux x86-64)",
    "cuda": "this installation has no CUDA kernels; build it with nvcc and JAXCONV_CUDA=ON",
}


@functools.cache
def load(name: str) -> Platform | Refusal:
    """The platform's kernels, or the reason why this process has none."""
    try:
        return Platform(name)
    except ModuleNotFoundError as error:
        if error.name not in ("_jaxconv", f"_jaxconv.{name}"):
            return Refusal(f"jaxconv[{name}]", f"{type(error).__name__}: {error}")
        return Refusal(f"jaxconv[{name}]", _NOT_BUILT[name])
    except (ImportError, OSError, importlib.metadata.PackageNotFoundError) as error:
        return Refusal(f"jaxconv[{name}]", f"{type(error).__name__}: {error}")


def automatic() -> str:
    """The meaning of "auto" in this process: $JAXCONV_ALGORITHM, "auto" or "native".

    Raises:
        ValueError: the variable has another value.
    """
    value = os.environ.get("JAXCONV_ALGORITHM", "auto")
    if value not in ("auto", "native"):
        raise ValueError(f"JAXCONV_ALGORITHM: expected 'auto' or 'native', got {value!r}")
    return value


def target() -> str:
    """The architecture to lower for: $JAXCONV_TARGET, or "" for the devices of this process."""
    return os.environ.get("JAXCONV_TARGET", "")


def fusing() -> bool:
    """Whether ``fuse`` changes functions in this process: $JAXCONV_FUSE, "1" or "0".

    Raises:
        ValueError: the variable has another value.
    """
    value = os.environ.get("JAXCONV_FUSE", "1")
    if value not in ("0", "1"):
        raise ValueError(f"JAXCONV_FUSE: expected '0' or '1', got {value!r}")
    return value == "1"


def settings() -> tuple[str, str]:
    """The environment's settings for selection: ``automatic`` and ``target``."""
    return automatic(), target()


@functools.cache
def code_digest() -> str:
    """Identifies this version of the package and of the kernels by the content of every file.

    A version number would not distinguish two checkouts, nor builds with and without CUDA kernels.
    Reading and hashing takes 10 ms, plus 60 ms for the CUDA library.
    """
    digest = hashlib.sha256()
    for package in ("jaxconv", "_jaxconv"):
        found = importlib.util.find_spec(package)
        for folder in (found and found.submodule_search_locations) or ():
            for file in sorted(pathlib.Path(folder).rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    content = file.read_bytes()
                    name = f"{package}/{file.relative_to(folder).as_posix()}"
                    digest.update(f"{name} {len(content)}\n".encode())
                    digest.update(content)
    return digest.hexdigest()


def described(name: str) -> str:
    """The inputs of a platform's selection other than the problem, the code and ``settings``.

    These are the kernels' build options and runtime (oneDNN and its instruction set), or the reason
    why there are none; and the CPU cores or the GPUs of this process.
    """
    kernels = load(name)
    if isinstance(kernels, Refusal):
        return kernels.reason
    return f"{kernels.module.build_info()} on {_devices(name)}"


def _devices(name: str) -> str:
    if name == "cpu":
        return f"{len(os.sched_getaffinity(0))} cores"
    try:
        return ", ".join(sorted({d.device_kind for d in jax.local_devices(backend=name)}))
    except RuntimeError:  # lowered for an absent device
        return "no device"
