"""The names of ``import jaxconv``, their documentation, the table of kernels, ``installed``."""

from __future__ import annotations

import importlib.util
import inspect
import pathlib
import pydoc
import threading
import types

import cpu_features
import jax
import numpy as np
import pytest
from jax import lax

import jaxconv
from jaxconv._src.library import native
from jaxconv._src.problem.spec import Op
from jaxconv._src.report import kernel_table

X = np.ones((2, 16, 16, 64), np.float32)
W = np.ones((3, 3, 64, 64), np.float32)


@pytest.fixture(autouse=True)
def uninstalled():
    yield
    jaxconv.uninstall()


def test_all_is_what_is_public():
    given = {
        name
        for name, value in vars(jaxconv).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    modules = {name for name in jaxconv.__all__ if isinstance(getattr(jaxconv, name), type(jax))}
    assert modules == {"checkpoint_policies", "export", "int8", "winograd"}
    assert set(jaxconv.__all__) == given | modules
    assert jaxconv.__all__ == sorted(jaxconv.__all__)


@pytest.mark.parametrize("name", jaxconv.__all__)
def test_every_name_is_documented(name):
    value = getattr(jaxconv, name)
    assert inspect.getdoc(value)
    assert name in jaxconv.__doc__ or name in ("Kernel", "Kernels")
    if isinstance(value, types.FunctionType):
        hints = inspect.signature(value)
        assert hints.return_annotation is not inspect.Signature.empty
        assert all(p.annotation is not p.empty for p in hints.parameters.values())
        # A function must not hide a module of the same name.
        assert importlib.util.find_spec(f"jaxconv.{name}") is None


def test_modules_can_be_imported():
    for name in ("bench", "checkpoint_policies", "doctor", "export", "int8"):
        importlib.import_module(f"jaxconv.{name}")
    source = pathlib.Path(jaxconv.__file__).parent
    assert (source / "py.typed").exists()


def test_help_tells_the_functions():
    text = pydoc.plain(pydoc.render_doc(jaxconv))
    for name in ("conv", "conv_transpose", "explain", "install", "override", "kernels"):
        assert f"\n    {name}(" in text, name
    assert "step of the window" in text, "with their docstrings"


# --- kernels ---


def test_kernels_of_the_cpu(native_cpu):
    table = jaxconv.kernels("cpu")
    assert [k.name for k in table] == native_cpu.kernels() and len(table) == len(list(table))
    assert table[0].name == native_cpu.kernels()[0] and table.missing == {}
    found = {k.name: k for k in table}
    depthwise = found["wgrad_depthwise_f32"]
    assert (depthwise.op, depthwise.family, depthwise.dtype) == ("wgrad", "depthwise", "f32")
    assert depthwise.takes == (("depthwise",) if cpu_features.AVX512 else ())
    assert {"dense", "groups", "input dilation"} <= set(found["fprop_onednn_f32"].takes)
    assert "input dilation" not in found["wgrad_gemm_f32"].takes
    assert "epilogue" in found["fprop_onednn_f32"].takes
    if cpu_features.AVX512:
        assert "epilogue" in found["fprop_onednn_bf16"].takes
    assert ("epilogue" in found["fprop_onednn_s8"].takes) == cpu_features.VNNI
    assert not any("epilogue" in kernel.takes for kernel in table if kernel.op != "fprop")
    assert set(found["fprop_onednn_f32"].precisions) == {"default", "high", "highest"}
    text = str(table)
    assert repr(table) == text and all(k.name in text for k in table)


@pytest.mark.parametrize(
    ("label", "x", "w", "options"),
    [
        ("dense", X, W, {}),
        ("depthwise", X, W[:, :, :1], dict(groups=64)),
        ("3 input channels", X[..., :3], W[:, :, :3], {}),
        ("strides", X, W, dict(stride=2)),
    ],
)
def test_a_kernel_computes_what_it_is_said_to_take(native_cpu, label, x, w, options):
    with jax.default_device(jax.devices("cpu")[0]):
        for kernel in jaxconv.kernels("cpu"):
            if kernel.op != "fprop" or kernel.dtype != "f32":
                continue

            def f(x, w, name=kernel.name):
                return jaxconv.conv(x, w, algorithm=name, **options)

            if label in kernel.takes:
                assert jaxconv.explain(f, x, w)[0].instance == kernel.name
            else:
                with pytest.raises(ValueError, match="cannot serve"):
                    jaxconv.explain(f, x, w)


def test_a_platform_without_kernels_says_why(monkeypatch):
    refusal = native.Refusal("jaxconv[cpu]", "ImportError: taken away by a test")
    monkeypatch.setattr(native, "load", lambda name: refusal)
    table = jaxconv.kernels()
    assert len(table) == 0 and set(table.missing) == {"cpu", "cuda"}
    assert "no cpu kernels: ImportError: taken away by a test" in str(table)


def test_kernels_of_no_platform():
    with pytest.raises(ValueError, match="'cpu' or 'cuda', got 'tpu'"):
        jaxconv.kernels("tpu")


@pytest.mark.parametrize("dtype", ["f32", "s8", "u8"])
def test_every_probe_is_a_problem(native_cpu, dtype):
    """An instance is probed until one key is accepted, so an invalid key could go unnoticed."""
    for op in Op if dtype == "f32" else [Op.FPROP]:
        for probe in kernel_table._PROBES.values():
            keys = list(kernel_table._keys(op, dtype, "default", probe))
            assert len(keys) == 1 or dtype != "f32"
            for key in keys if op is Op.FPROP or "epilogue" not in probe else []:
                native_cpu.select(key, "auto", "")  # raises if the key is invalid


def test_kernels_for_a_gpu_that_is_not_here():
    cuda = native.load("cuda")
    if isinstance(cuda, native.Refusal):
        assert jaxconv.kernels("cuda").missing == {"cuda": cuda.reason}
        return
    hopper = {k.name: k.takes for k in jaxconv.kernels("cuda", target="sm_90a")}
    ampere = {k.name: k.takes for k in jaxconv.kernels("cuda", target="sm_80")}
    wgmma = [name for name in hopper if "_igemm_wgmma_" in name]
    assert any(hopper[name] for name in wgmma) and not any(ampere[name] for name in wgmma)
    assert any("odd channels" in takes for name, takes in ampere.items() if "_simt_" in name)


# --- installed ---


def on_kernels() -> bool:
    def f(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    return jaxconv.explain(f, X, W).on_kernels == 1


def test_install_in_a_with_statement(native_cpu):
    with jax.default_device(jax.devices("cpu")[0]):
        assert jaxconv.installed() is None and not on_kernels()
        with jaxconv.install():
            assert jaxconv.installed() == dict(fprop="auto", dgrad="auto", wgrad="auto")
            assert on_kernels()
            with jaxconv.install(algorithm={"wgrad": "xla"}):
                assert jaxconv.installed() == dict(fprop="auto", dgrad="auto", wgrad="xla")
            assert jaxconv.installed()["wgrad"] == "auto", "what was before"
        assert jaxconv.installed() is None and not on_kernels()
        with pytest.raises(RuntimeError, match="of the body"), jaxconv.install():
            raise RuntimeError("of the body")
        assert jaxconv.installed() is None


def test_install_for_good():
    installation = jaxconv.install(algorithm="native")
    assert jaxconv.installed()["fprop"] == "native" and "native" in repr(installation)
    with jaxconv.override(False):
        assert jaxconv.installed() is None
    with jaxconv.override(algorithm="xla"):
        assert jaxconv.installed()["fprop"] == "xla"
    seen = []
    thread = threading.Thread(target=lambda: seen.append(jaxconv.installed()))
    thread.start()
    thread.join()
    assert seen == [jaxconv.installed()]
    jaxconv.uninstall()
    assert jaxconv.installed() is None
