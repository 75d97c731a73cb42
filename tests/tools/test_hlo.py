"""Bytes of compiled programs, read from their text, and the programs that are counted."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxconv
from jaxconv.bench import described_gpu, hlo, networks
from jaxconv.bench.networks import NETWORKS, programs
from jaxconv.bench.networks.blocks import PASSES

TOOLS = pathlib.Path(__file__).resolve().parents[2] / "tools"

# Instructions in the forms of XLA:GPU's compiled programs.
PROGRAM = """
HloModule jit_step, is_scheduled=true, entry_computation_layout={(bf16[4,8]{1,0})->f32[8]{0}}

%fused_sums (param_0: bf16[4,8], param_1: f32[8]) -> f32[8] {
  %param_0 = bf16[4,8]{1,0} parameter(0)
  %convert.1 = f32[4,8]{1,0} convert(%param_0)
  %zero = f32[] constant(0)
  ROOT %reduce.1 = f32[8]{0} reduce(%convert.1, %zero), dimensions={0}, to_apply=%add
}

%fused_product (param_0.1: bf16[4,8], param_1.1: bf16[8,8]) -> bf16[4,8] {
  %param_0.1 = bf16[4,8]{1,0} parameter(0)
  %param_1.1 = bf16[8,8]{1,0} parameter(1)
  ROOT %dot.1 = bf16[4,8]{1,0} dot(%param_0.1, %param_1.1), lhs_contracting_dims={1}
}

%dynamic-slice-fusion (param_0.2: bf16[4,8], param_1.2: f32[8]) -> f32[8] {
  %param_0.2 = bf16[4,8]{1,0} parameter(0)
  %param_1.2 = f32[8]{0} parameter(1)
  %row = bf16[1,8]{1,0} slice(%param_0.2), slice={[0:1], [0:8]}
  ROOT %ours.2 = f32[8]{0} custom-call(%row, %param_1.2), custom_call_target="jaxconv_wgrad"
}

%command_buffer (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %copy.9 = f32[8]{0:S(1)} copy(%p)
}

ENTRY %main.1 (x: bf16[4,8], /*index=1*/v: f32[8]) -> (f32[8], pred[4,8]) {
  %x = bf16[4,8]{1,0} parameter(0)
  %v = f32[8]{0} parameter(1)
  %sums = f32[8]{0} fusion(%x, %v), kind=kInput, calls=%fused_sums
  %twice = f32[8]{0} fusion(bf16[4,8]{1,0} %x, bf16[4,8]{1,0} %x), kind=kInput, calls=%fused_sums
  %cublas = (bf16[8,8]{1,0}, s8[4096]{0}) custom-call(%x), custom_call_target="__cublas$gemm"
  %w = bf16[8,8]{1,0} get-tuple-element(%cublas), index=0
  %product = bf16[4,8]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused_product
  %ours = (bf16[4,8]{1,0}, /*index=1*/u8[4,1]{1,0}) custom-call(%product, %v), \
custom_call_target="jaxconv_normalise", api_version=API_VERSION_TYPED_FFI
  %fused_call = f32[8]{0} fusion(%x, %v), kind=kCustom, calls=%dynamic-slice-fusion
  %call = f32[8]{0} call(%sums), to_apply=%command_buffer
  ROOT %tuple = (f32[8]{0}, bf16[4,8]{1,0}) tuple(%call, %product)
}
"""


def test_kernels_of_a_program():
    found = {k.name: k for k in hlo.kernels(hlo.parse(PROGRAM))}
    assert [(name, k.kind, k.read, k.written, k.computing) for name, k in found.items()] == [
        ("sums", "fusion: sums", 64 + 32, 32, False),
        ("twice", "fusion: sums", 64, 32, False),  # an operand counts once
        ("cublas", "__cublas$gemm", 64, 128, True),  # without the workspace
        ("product", "fusion: product", 64 + 128, 64, True),
        ("ours", "jaxconv_normalise", 64 + 32, 64 + 4, False),
        ("fused_call", "jaxconv_wgrad", 64 + 32, 32, True),
        ("copy.9", "copy", 32, 32, False),  # in a command buffer
    ]
    assert hlo.outside(list(found.values())) == 128 + 96 + 164 + 64
    totals = hlo.totals(list(found.values()))
    assert totals["fusion: sums, below 1 MB"] == hlo.Total(2, 224)
    assert totals["jaxconv_normalise"] == hlo.Total(1, 164)


@pytest.mark.parametrize(
    ("type_", "sizes"),
    [
        ("f32[2,3]{1,0}", [24]),
        ("(bf16[4]{0}, pred[], u8[0]{0})", [8, 1, 0]),
        ("s4[5]{0:E(4)}", [3]),
        ("f8e4m3fn[2,2]{1,0}", [4]),
        ("token[]", []),
    ],
)
def test_bytes_of_types(type_, sizes):
    assert hlo.array_bytes(type_) == sizes


def test_a_program_of_this_machine_is_read():
    with jax.default_device(jax.devices("cpu")[0]):
        x = jnp.ones((64, 64))
        text = jax.jit(lambda x: jnp.tanh(x @ x).sum(0)).lower(x).compile().as_text()
    found = list(hlo.kernels(hlo.parse(text)))
    assert any(k.computing for k in found)
    assert sum(k.bytes for k in found) >= x.nbytes


def shallow(monkeypatch):
    monkeypatch.setattr(networks.mobilenet, "STAGES", ((6, 24, 2, 2),))
    network = NETWORKS["mobilenet_v2"]
    return network, programs.input_shape(network, 2, 32)


def test_both_spellings_of_batch_norm_are_one_network(monkeypatch):
    network, shape = shallow(monkeypatch)
    with jax.default_device(jax.devices("cpu")[0]):
        state = programs.initial_state(network, jax.ShapeDtypeStruct(shape, jnp.float32))
        examples = programs.random_examples(network, shape, jnp.float32)
        losses, outputs = [], []
        for make_pass in PASSES.values():
            _, loss = jax.jit(programs.training_step(network, make_pass))(state, examples)
            infer = jax.jit(programs.inference(network, make_pass))
            outputs.append(infer(state, examples.x))
            losses.append(loss)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    np.testing.assert_allclose(outputs[0], outputs[1], atol=1e-3 * np.abs(outputs[0]).max())


def test_the_bytes_of_a_network(monkeypatch, capsys, tmp_path, native_cpu):
    shallow(monkeypatch)
    tool = runpy.run_path(str(TOOLS / "network_bytes.py"))
    command = ["--network", "mobilenet_v2", "--batch", "2", "--size", "32", "--dtype", "f32"]
    with jax.default_device(jax.devices("cpu")[0]):
        assert tool["main"]([*command, "--batch-norm", "product", "--save", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "mobilenet_v2 train f32 N=2, batch norm product, fused" in said
    assert "outside convolutions and products" in said and "custom calls: dgrad" in said
    (saved,) = tmp_path.iterdir()
    assert tool["main"](["--hlo", str(saved), "--largest", "2"]) == 0
    again = capsys.readouterr().out
    assert all(line in said for line in again.splitlines()[:-2])


def test_the_networks_of_keras(capsys, monkeypatch):
    """With Keras the networks are measured; without it, the program says what to install."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    tool = runpy.run_path(str(TOOLS / "keras_networks.py"))
    arguments = ["--network", "VGG16", "--batch", "1", "--size", "32", "--dtype", "f32"]
    with jax.default_device(jax.devices("cpu")[0]):
        status = tool["main"]([*arguments, *["--steps", "1", "--rounds", "1", "--mode", "infer"]])
    said = capsys.readouterr().out
    if importlib.util.find_spec("keras"):
        assert status == 0 and re.search(r"VGG16 +infer fused .* 13/13 ", said)
    else:
        assert status == 1 and "pip install keras" in said


def test_a_gpu_that_is_not_here(monkeypatch):
    """XLA compiles a program for its description, or the error says what is absent."""
    monkeypatch.setenv("JAXCONV_TARGET", "")  # which ``described`` sets
    try:
        device, _ = described_gpu.described("h200", 2)
    except RuntimeError as error:
        assert re.search(r"cannot compile for h200.*(JAXCONV_CUDA=ON|pip install)", str(error))
        return
    types = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 28, 28, 64), (3, 3, 64, 64))]
    program = jax.jit(lambda x, w: jaxconv.conv(x, w, algorithm="igemm_wgmma"))
    made = program.lower(*described_gpu.types_on(device, types)).compile()
    (kernel,) = (k for k in hlo.kernels(hlo.parse(made.as_text())) if k.computing)
    assert kernel.kind == "jaxconv_fprop" and kernel.bytes > 2 * 8 * 28 * 28 * 64 * 2
