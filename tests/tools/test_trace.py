"""How the bench reads a GPU trace: events, unions of intervals, and which are convolutions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxconv
from jaxconv._src.problem.spec import Op
from jaxconv.bench import measure, measure_network, report_network, trace
from jaxconv.bench.layers import parse
from jaxconv.bench.problem import Problem
from jaxconv.bench.trace import Event

# A trace in the profiler's form: two streams, a line that sums them up, and the host.
PROFILE = """
planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #14(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 3000 stats { metadata_id: 1 ref_value: 9 } }
    events { metadata_id: 2 offset_ps: 2000000 duration_ps: 5000 stats { metadata_id: 2 } }
  }
  lines {
    name: "Stream #15(MemcpyD2D)" timestamp_ns: 1001
    events { metadata_id: 3 offset_ps: 0 duration_ps: 4000 }
  }
  lines { name: "XLA Ops" timestamp_ns: 1000 events { metadata_id: 1 duration_ps: 9000000 } }
  event_metadata { key: 1 value { id: 1 name: "sm90_xmma_fprop_implicit_gemm" } }
  event_metadata { key: 2 value { id: 2 name: "loop_convert_fusion_2" } }
  event_metadata { key: 3 value { id: 3 name: "MemcpyD2D" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
  stat_metadata { key: 9 value { id: 9 name: "cudnn-conv.3" } }
}
planes { name: "/host:CPU" lines { name: "Stream" events { metadata_id: 1 duration_ps: 9 } } }
"""

# Instructions in the forms of XLA:GPU's compiled programs.
PROGRAM = """
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%fused_convert.2 (param_0: f32[8]) -> bf16[8] {
  %param_0 = f32[8]{0} parameter(0)
  ROOT %convert.9 = bf16[8]{0} convert(%param_0)
}

%dot.7_computation (p0: bf16[8,8], p1: bf16[8,8]) -> bf16[8,8] {
  %p0 = bf16[8,8]{1,0} parameter(0)
  %p1 = bf16[8,8]{1,0} parameter(1)
  ROOT %dot.3 = bf16[8,8]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%command_buffer.1 (p: f32[8]) -> bf16[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %loop_convert_fusion.2 = bf16[8]{0} fusion(%p), kind=kLoop, calls=%fused_convert.2
}

ENTRY %main.9 (arg: f32[8]) -> (bf16[8,8]{1,0}, bf16[8]) {
  %arg = f32[8]{0} parameter(0)
  %cudnn-conv.3 = (bf16[8], u8[0]) custom-call(%arg), custom_call_target="__cudnn$convForward"
  %jaxconv_fprop.4 = (bf16[8]{0}, u8[0]{0}) custom-call(%arg), custom_call_target="jaxconv_fprop"
  %jaxconv_masked_sums.5 = f32[8]{0} custom-call(%arg), custom_call_target="jaxconv_masked_sums"
  %jaxconv_normalise_add.6 = f32[8]{0} custom-call(%arg), custom_call_target="jaxconv_normalise_add"
  %jaxconv_max_pool.7 = bf16[8]{0} custom-call(%arg), custom_call_target="jaxconv_max_pool_gradient"
  %topk.1 = (f32[1]{0}, s32[1]{0}) custom-call(%arg), custom_call_target="__gpu$TopK"
  %gemm_fusion_dot.7 = bf16[8,8]{1,0} fusion(%x, %y), kind=kCustom, calls=%dot.7_computation
  %call.2 = bf16[8]{0} call(%arg), to_apply=%command_buffer.1
  ROOT %tuple.1 = (bf16[8,8]{1,0}, bf16[8]{0}) tuple(%gemm_fusion_dot.7, %call.2)
}
"""


def events() -> list[Event]:
    profile = jax.profiler.ProfileData.from_text_proto(PROFILE)
    return sorted(trace.read(profile), key=lambda event: event.start)


def test_the_streams_of_a_gpu_are_read():
    assert events() == [
        Event("sm90_xmma_fprop_implicit_gemm", 1000, 3, "cudnn-conv.3"),
        Event("MemcpyD2D", 1001, 4),
        Event("loop_convert_fusion_2", 3000, 5),
    ]


def test_overlapping_events_count_once():
    assert trace.union_seconds(events()) == pytest.approx(10e-9)
    inside = [Event("a", 0, 10), Event("b", 2, 3), Event("c", 10, 1), Event("d", 20, 5)]
    assert trace.union_seconds(inside) == pytest.approx(16e-9)
    assert trace.union_seconds([]) == 0


def test_device_time_splits_into_convolutions_and_the_rest():
    parts = trace.split(events(), trace.Classifier(PROGRAM))
    assert parts == pytest.approx((3e-9, 7e-9))
    largest = trace.largest([*events(), Event("MemcpyD2D", 5000, 4)], trace.Classifier(PROGRAM))
    assert [(k.name, k.count, k.computing) for k in largest] == [
        ("MemcpyD2D", 2, False),
        ("loop_convert_fusion_2", 1, False),
        ("sm90_xmma_fprop_implicit_gemm", 1, True),
    ]


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        # The instruction decides, whatever the kernel's name.
        (Event("nchwToNhwcKernel", 0, 1, "cudnn-conv.3"), True),
        (Event("fill", 0, 1, "jaxconv_fprop.4"), True),
        (Event("cudnn_like_name", 0, 1, "topk.1"), False),
        # Sums do not count as convolutions, because other libraries leave them to XLA.
        (Event("void jaxconv::SumMasked<bf16>", 0, 1, "jaxconv_masked_sums.5"), False),
        (Event("void jaxconv::NormaliseAndAdd<bf16>", 0, 1, "jaxconv_normalise_add.6"), False),
        (Event("void jaxconv::NormaliseAndAdd<bf16>", 0, 1, "call.2"), False),
        (Event("void jaxconv::SumMasked<bf16>", 0, 1, "call.2"), False),
        (Event("void jaxconv::SumMoments<moments_bf16_y1>", 0, 1, "call.2"), False),
        (Event("void jaxconv::GatherGradient<bf16>", 0, 1, "jaxconv_max_pool.7"), False),
        (Event("void jaxconv::max_pool_internal::PoolMaxima<bf16>", 0, 1, "call.2"), False),
        # XLA names its kernels after instructions.
        (Event("gemm_fusion_dot_7", 0, 1), True),
        (Event("loop_convert_fusion_2", 0, 1), False),
        (Event("loop_convert_fusion_2", 0, 1, "call.2"), False),
        # A library's kernel in a command buffer.
        (Event("sm80_xmma_wgrad_implicit_gemm_indexed_bf16", 0, 1, "call.2"), True),
        (Event("void jaxconv::Kernel<fprop_igemm_wgmma_bf16_256x64x64>", 0, 1, "call.2"), True),
        (Event("nvjet_hsh_256x128", 0, 1, "unknown"), True),
        (Event("input_reduce_fusion_11", 0, 1), False),
        (Event("wrapped_convert_4", 0, 1), False),
    ],
)
def test_convolutions_are_told_from_the_rest(event, expected):
    assert trace.Classifier(PROGRAM)(event) is expected


@pytest.mark.parametrize("enabled", [False, True])
def test_the_convolutions_of_a_compiled_program_are_found(enabled, native_cpu):
    def convolve_and_add(x, w):
        return jnp.tanh(lax.conv(x, w, (1, 1), "SAME")) + 1

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 8, 9, 9), (8, 8, 3, 3))]
    with jaxconv.override(enabled), jax.default_device(jax.devices("cpu")[0]):
        compiled = jax.jit(convolve_and_add).lower(*shapes).compile()
    found = trace.Classifier(compiled.as_text()).instructions
    assert any(found.values()) and not all(found.values())
    assert any(name.startswith("jaxconv_fprop") and found[name] for name in found) == enabled


@pytest.mark.parametrize("ran", ["selected", "another"])
def test_a_layer_is_wrong_whose_trace_lacks_the_selected_kernel(ran, monkeypatch, native_cpu):
    problem = Problem("small", parse("1,8,8,8,8,3,3,1,1"), Op.FPROP, "f32", algorithm="native")
    seen = []

    def traced(run):
        run()
        name = f"void Kernel<{row_kernel}>" if ran == "selected" else "sgemm"
        seen.append(name)
        return [Event(name, 0, 4e6), Event("reduce", 2e6, 4e6)]

    row_kernel = measure.measure(problem, repetitions=1, seconds=0).kernel
    monkeypatch.setattr(trace, "device_events", traced)
    row = measure.measure(problem, repetitions=2, device_time=True)
    side = row.sides["jaxconv"]
    assert len(seen) == 4 and row.repetitions == 2
    assert side.kernels == sorted([seen[0], "reduce"])
    assert row.wrong == (ran == "another") and bool(side.failure) == row.wrong
    assert side.median_s == pytest.approx(6e-3 / 4 / row.copies)
    assert (row.ratio() is None) == row.wrong


def test_a_split_step_is_shown_and_drawn(tmp_path):
    run = measure_network.Run("resnet50", "train", (256, 224, 224, 3), "bf16")
    result = measure_network.Result(run, "cuda", 20, traced_steps=5, difference=1e-3)
    for library, seconds in (("lax", 0.036), ("jaxconv", 0.030)):
        parts = trace.Split(seconds / 3, seconds / 2)
        kernels = [trace.Kernel("wgrad", 10, seconds, True)]
        times = {"median_s": seconds, "least_s": seconds, "most_s": seconds}
        result.sides[library] = measure_network.Side(**times, device=parts, kernels=kernels)
    lines = report_network.Table([run]).rows(result).splitlines()
    assert lines[0].split()[5:9] == ["36.00", "36.00-36.00", "12.00", "18.00"]
    assert lines[1].split()[-1] == "1.20x"
    assert "6.000 ms     2.0 x  conv  wgrad" in report_network.largest_kernels(result)
    assert not any("not available" in line for line in report_network.summary([result], "cuda"))
    report_network.plot([result], str(tmp_path / "n.png"), {"jaxconv": "", "jax": "", "device": ""})
    assert (tmp_path / "n.png").stat().st_size > 1000


@pytest.mark.gpu
def test_a_gpu_traces_both_libraries_kernels():
    x, w = jnp.ones((8, 64, 56, 56), jnp.bfloat16), jnp.ones((64, 64, 3, 3), jnp.bfloat16)
    for algorithm in (None, "native"):
        with jaxconv.override(algorithm is not None, algorithm=algorithm or "auto"):
            lowered = jax.jit(lambda x, w: jnp.tanh(lax.conv(x, w, (1, 1), "SAME"))).lower(x, w)
        compiled = lowered.compile()
        jax.block_until_ready(compiled(x, w))
        found = trace.device_events(lambda run=compiled: jax.block_until_ready(run(x, w)))
        parts = trace.split(found, trace.Classifier(compiled.as_text()))
        assert parts.convolutions > 0 and parts.rest > 0, found
