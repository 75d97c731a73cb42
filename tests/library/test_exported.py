"""Programs exported by earlier versions run, and consist of calls that this version knows."""

from __future__ import annotations

import collections
import json
import pathlib
import re
import subprocess
import sys

import cpu_features
import exported.exported_programs as exported_programs
import exported.gpu_bits as gpu_bits
import jax
import kernel_tables
import numpy as np
import pytest

import jaxconv
from jaxconv._src.library import native
from jaxconv._src.library.retired import RETIRED, Retired
from jaxconv._src.passes import masked_sums, max_pool_gradient, max_pooling

FOLDER = pathlib.Path(__file__).parent / "exported"
PROGRAMS = exported_programs.programs()
VERSIONS = sorted(path.name for path in FOLDER.iterdir() if list(path.glob("*.bin")))

PASSES = (masked_sums.TARGET, max_pooling.TARGET, max_pool_gradient.TARGET)

CALL = re.compile(
    r"stablehlo\.custom_call @(jaxconv_\w+)\(.*?\) \{.*?mhlo\.backend_config = \{(.*?)\}"
    r".*\} : (\(.*?\) -> [^\n]*?)(?: loc\(.*)?\n"
)


def restored(version: str, platform: str, name: str) -> jax.export.Exported:
    return jax.export.deserialize(
        bytearray((FOLDER / version / f"{platform}_{name}.bin").read_bytes())
    )


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("version", VERSIONS)
def test_results_are_those_of_the_program_retraced(native_cpu, version, name):
    if name.startswith("int8"):
        cpu_features.skip_without("fprop_onednn_s8")  # which the programs name
    function, arguments = PROGRAMS[name]
    with jax.default_device(jax.devices("cpu")[0]):
        found = jax.tree.leaves(restored(version, "cpu", name).call(*arguments))
        expected = jax.tree.leaves(jax.jit(function)(*arguments))
    exact = not name.startswith(exported_programs.ROUNDED)
    for actual, each in zip(found, expected, strict=True):
        actual, each = (np.asarray(a, np.float64) for a in (actual, each))
        if exact:
            np.testing.assert_array_equal(actual, each)
        else:
            scale = max(1.0, np.abs(each).max())
            np.testing.assert_allclose(actual / scale, each / scale, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("version", VERSIONS)
def test_bits_on_a_gpu_are_the_recorded_ones(version, name):
    record = json.loads((FOLDER / version / gpu_bits.RECORD).read_text())
    if jax.devices("gpu")[0].device_kind != record["device"]:
        pytest.skip(f"recorded on {record['device']}")
    jaxconv.register()
    assert gpu_bits.digest(version, name) == record["digests"][name]


def calls(text: str) -> collections.Counter[str]:
    """The custom calls of a lowered program: target, names of attributes, types of all arrays.

    The workspace's size and the number of parts are left out, because the plan decides them.
    """
    found: collections.Counter[str] = collections.Counter()
    for target, attributes, types in CALL.findall(text):
        named = " ".join(sorted(re.findall(r"(\w+) = ", attributes)))
        found[f"{target} {named} {re.sub('tensor<[0-9]+xui8>', 'workspace', types)}"] += 1
    return found


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("version", VERSIONS)
def test_calls_of_cuda_are_those_of_this_version(cuda_selection, version, name):
    """Compares targets, attributes, and the order and types of operands and results."""
    function, arguments = PROGRAMS[name]
    found = calls(restored(version, "cuda", name).mlir_module())
    retraced = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    today = calls(retraced)
    # If this version's fuse leaves a convolution alone, the call with statistics has no
    # counterpart.
    both = {call.split()[0] for call in found} & {call.split()[0] for call in today}
    for target in both - ({"jaxconv_fprop"} if "jaxconv_fused" not in both else set()):
        of_target = [
            {c: n for c, n in each.items() if c.startswith(f"{target} ")} for each in (found, today)
        ]
        if target in PASSES:  # fuse decides which operands are absent
            of_target = [{c.split(" (")[0] for c in each} for each in of_target]
        assert of_target[0] == of_target[1]
    assert found and both
    for call in found:
        operands, results = native.load("cpu").arrays[call.split()[0]]
        given, made = call.split(" (", 1)[1].split(" -> ")
        assert given.count("tensor") == len(operands)
        assert made.count("tensor") + made.count("workspace") == len(results)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_instance_is_known_or_retired(native_cpu, version):
    known = {each.name for each in kernel_tables.all_instances()} | set(native_cpu.kernels())
    for path in (FOLDER / version).glob("*.bin"):
        text = jax.export.deserialize(bytearray(path.read_bytes())).mlir_module()
        for instance in re.findall(r'instance = "(\w+)"', text):
            assert instance in known or instance in RETIRED, (path.name, instance)


def test_no_retired_name_is_in_use(native_cpu):
    known = {each.name for each in kernel_tables.all_instances()} | set(native_cpu.kernels())
    assert not known & RETIRED.keys()
    assert {each.instead for each in RETIRED.values()} <= known


def test_an_instance_that_this_version_lacks(native_cpu):
    """The error names the instance and gives advice."""
    key = "fprop f32:f32:f32 default b1 n1 g1 c1 k1 i2x2 f1x1 o2x2 s1x1 l1x1 d1x1 p0_0x0_0"
    program = f"""
import jax, jaxconv, numpy as np
jaxconv.register()
out = jax.ShapeDtypeStruct((1, 2, 2, 1), np.float32), jax.ShapeDtypeStruct((0,), np.uint8)
axes = {{f"{{name}}_axes": np.arange(4) for name in ("lhs", "rhs", "out")}}
call = jax.ffi.ffi_call("jaxconv_fprop", out)
x, w = np.zeros((1, 2, 2, 1), np.float32), np.zeros((1, 1, 1, 1), np.float32)
attributes = dict(instance="fprop_of_yore", problem="{key}", slices=np.int64(1), **axes)
jax.block_until_ready(jax.jit(lambda x, w: call(x, w, **attributes))(x, w))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ran.returncode
    assert "'fprop_of_yore' is no kernel" in ran.stderr, ran.stderr[-800:]
    assert "another version of jaxconv exported" in ran.stderr, ran.stderr[-800:]


def test_kernels_that_are_missing_are_named_before_a_run(native_cpu, monkeypatch):
    """For a retired kernel the message names its replacement."""
    (version, *_) = VERSIONS
    program = restored(version, "cpu", "conv_f32")
    assert jaxconv.export.missing_kernels(program) == {}
    others = ["fprop_onednn_f32", "dgrad_onednn_f32"]
    monkeypatch.setattr(native_cpu, "kernels", lambda: others)
    (name,) = jaxconv.export.missing_kernels(program)
    monkeypatch.setitem(RETIRED, name, Retired("9.9", "wgrad_other_f32"))
    told = jaxconv.export.missing_kernels(program)
    assert "since 9.9 wgrad_other_f32 takes the place of this kernel" in told[name]
    if isinstance(native.load("cuda"), native.Refusal):
        told = jaxconv.export.missing_kernels(restored(version, "cuda", "conv_f32"))
        assert told.keys() == {"cuda"} and "CUDA kernels" in told["cuda"]


def test_the_number_of_partial_sums_stays(cuda_selection):
    """The bits of the sums depend on this number, also in exported programs."""
    shapes = {
        (256, 112, 112, 64): 264,
        (256, 56, 56, 256): 264,
        (256, 7, 7, 2048): 33,
        (4, 4, 4, 16): 1,
        (8, 14, 14, 24): 2,
        (64, 64): 1,
    }
    form = masked_sums.Sums(1, 1, "result", False, 0.0, None)
    for target in ("sm_80", "h200"):
        keys = {shape: masked_sums.key(form, shape, np.dtype(np.float16)) for shape in shapes}
        plan = native.load("cuda").plan_pass
        assert {shape: plan(key, target).parts for shape, key in keys.items()} == shapes
    assert jaxconv.export.disabled_checks()
