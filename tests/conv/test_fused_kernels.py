"""The call ``jaxconv_fused``: its kernels on one device and on several, and its handler."""

from __future__ import annotations

import dataclasses
import functools
import re

import cpu_features
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_reference import TERMS, before_activation, fused, operands
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec
from numerics import assert_exact
from problems import Problem, problem

import jaxconv
from jaxconv._src.conv import fused as primitive
from jaxconv._src.problem.epilogue import Epilogue
from jaxconv._src.problem.spec import Op

# A problem for each CPU kernel: a task with several regions of rows, or of whole images.
OF_KERNEL = {
    "fprop_few_pixels_f32": problem("few pixels", (4, 4), 4, n=2, c=32, k=16),
    "fprop_few_outputs_f32": problem("few outputs", (33, 64), 3, n=2, c=16, k=3, padding=1),
    "fprop_small_groups_f32": problem("groups", (33, 64), 3, n=2, c=40, k=40, groups=10, padding=1),
    "fprop_onednn_f32": problem("several regions", (64, 48), 3, n=3, c=4, k=130, padding=1),
    "fprop_onednn_bf16": problem("whole images", (9, 9), 3, n=40, c=8, k=130, padding=1),
    "fprop_onednn_f16": problem("padding alone", (5, 5), 1, n=2, c=16, k=8, padding=2),
}
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
ALL = Epilogue(True, True, True, "relu6", pre=True, statistics=True)


def all_results(p: Problem, values, epilogue=ALL, **changes):
    terms = {name: values[name] for name in epilogue.terms}
    spec = dataclasses.replace(p.spec(), **changes)
    return primitive.bind(
        values["x"], values["w"], terms, spec=spec, epilogue=epilogue, out_dtype=values["x"].dtype
    )


def check_all(results, p: Problem, values, label: str) -> None:
    y, pre, statistics = results
    t = before_activation(p, values, TERMS)
    expected = [np.asarray(a.astype(np.float32)).astype(y.dtype) for a in (np.clip(t, 0, 6), t)]
    assert_exact(y, expected[0], f"{label}: y")
    assert_exact(pre, expected[1], f"{label}: pre")
    exact = expected[0].astype(np.float64).reshape(-1, p.k)
    mean = exact.mean(0)
    np.testing.assert_allclose(statistics[0], mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(statistics[1], ((exact - mean) ** 2).sum(0), rtol=1e-6, atol=1e-6)


def instances(f, *args) -> list[tuple[str | None, str]]:
    return [(c.instance, c.epilogue) for c in jaxconv.explain(f, *args, platform="cpu")]


@pytest.mark.parametrize("name", OF_KERNEL)
def test_every_cpu_kernel(native_cpu, name):
    cpu_features.skip_without(name)
    p = OF_KERNEL[name]
    values = operands(p, DTYPES[name.rpartition("_")[2]])
    f = functools.partial(all_results, p, algorithm=(name, "auto", "auto"))
    assert instances(f, values) == [(name, "scale bias residual relu6 pre statistics")]
    with jax.default_device(jax.devices("cpu")[0]):
        check_all(jax.jit(f)(values), p, values, name)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_dilated_input(native_cpu, dtype):
    """On the CPU the call is a data gradient (transposed convolution) followed by the epilogue."""
    p = problem("dilated", (5, 4), 3, n=2, c=4, k=8, padding=2, lhs_dilation=2)
    values = operands(p, DTYPES[dtype])
    f = functools.partial(all_results, p)
    assert [i for i, _ in instances(f, values)] == [f"fprop_onednn_{dtype}"]
    with jax.default_device(jax.devices("cpu")[0]):
        check_all(jax.jit(f)(values), p, values, dtype)


def drawn(rng) -> Problem | None:
    """A random problem, or None if a tensor is empty."""
    rank, groups = int(rng.integers(1, 4)), int(rng.choice([1, 1, 2, 4]))

    def each(low, high):
        return tuple(map(int, rng.integers(low, high, rank)))

    p = problem(
        "random",
        each(1, 14 if rank < 3 else 7),
        each(1, 4),
        n=int(rng.integers(1, 5)),
        c=groups * int(rng.choice([1, 2, 3, 8, 16])),
        k=groups * int(rng.choice([1, 2, 3, 4, 8, 33, 160])),
        groups=groups,
        stride=each(1, 3),
        dilation=each(1, 3),
        padding=tuple(zip(each(-1, 3), each(-1, 3), strict=True)),
        lhs_dilation=each(1, 3) if rng.random() < 0.3 else (1,) * rank,
    )
    cropped = [e + lo + hi for e, (lo, hi) in zip(p.spatial, p.padding, strict=True)]
    return p if min(*p.canonical_shape("y"), *cropped) > 0 else None


def test_random_problems(native_cpu, seed):
    """Fused or not, results are exact on integers."""
    rng = np.random.default_rng(seed)
    taken = 0
    problems = [p for p in (drawn(rng) for _ in range(32)) if p is not None]
    for i, p in enumerate(problems):
        values = operands(p, DTYPES[str(rng.choice(list(DTYPES)))], seed=seed + i)
        terms = map(bool, rng.integers(0, 2, 3))
        form = Epilogue(*terms, "relu6", pre=bool(rng.integers(0, 2)))
        f = functools.partial(all_results, p, epilogue=form)
        taken += any(epilogue for _, epilogue in instances(f, values))
        with jax.default_device(jax.devices("cpu")[0]):
            y, *pre = jax.jit(f)(values)
        t = before_activation(p, values, form.terms).astype(np.float32)
        label = f"--seed {seed}, {i}: {p} {form} {y.dtype}"
        assert_exact(y, np.clip(t, 0, 6).astype(y.dtype), label)
        for result in pre:
            assert_exact(result, t.astype(y.dtype), f"{label} pre")
    assert taken > len(problems) / 4


def test_every_fprop_kernel_of_the_cpu_is_tested(native_cpu):
    floats = [n for n in native_cpu.kernels() if re.fullmatch(r"fprop_\w+_(f32|f16|bf16)", n)]
    assert set(floats) == set(OF_KERNEL)


def test_one_custom_call_and_no_transpose(native_cpu):
    p = problem("nchw", (6, 5), 3, n=2, c=4, k=8, padding=1)
    values = operands(p)
    f = functools.partial(fused(p, "relu", data_format="NCHW"), scale=values["scale"])
    x, residual = (jnp.moveaxis(values[n], -1, 1) for n in ("x", "residual"))
    w = jnp.transpose(values["w"], (3, 2, 0, 1))
    text = jax.jit(f).trace(x, w, residual=residual).lower(lowering_platforms=("cpu",)).as_text()
    assert text.count("stablehlo.custom_call") == 1 and "@jaxconv_fused" in text
    assert "stablehlo.transpose" not in text


def test_explain_says_what_is_fused_and_why_not(native_cpu):
    p = problem("one", (6, 5), 3, n=2, c=4, k=8, padding=1)
    values = operands(p)
    given = {n: values[n] for n in ("x", "w", "bias")}
    text = str(jaxconv.explain(lambda v: fused(p, "silu")(**v), given, platform="cpu"))
    assert re.search(r"fprop_onednn_f32 \+ bias silu ", text) and "apart" not in text
    apart = jaxconv.explain(lambda v: fused(p, "silu", algorithm="im2col")(**v), given)
    assert apart[0].epilogue == "" and [r.kernel for r in apart[0].apart] == ["jaxconv"]
    assert re.search(r'epilogue apart, in XLA:\n +1  jaxconv: algorithm="im2col"', str(apart))


# --- many devices ---


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("a", "b"), (kind, kind), devices=jax.devices("cpu"))


def collectives(text: str) -> set[str]:
    return set(re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute)[-a-z]*\(", text))


BIG = problem("split", (8, 8), 3, n=8, c=4, k=8, padding=1)
GROUPED = problem("split groups", (8, 8), 3, n=8, c=4, k=8, padding=1, groups=2)
# The splits of x, w and y; the program's collectives; whether the epilogue is in the call.
SPLITS = {
    "images": (BIG, Spec("a"), Spec(), Spec("a"), set(), True),
    "images and filters": (BIG, Spec("a"), Spec(None, None, None, "b"), None, set(), True),
    "groups": (
        GROUPED,
        Spec("a", None, None, "b"),
        Spec(None, None, None, "b"),
        Spec("a", None, None, "b"),
        set(),
        True,
    ),
    "rows": (BIG, Spec(None, "a"), Spec(), Spec(None, "a"), {"collective-permute"}, True),
    "input channels": (
        BIG,
        Spec("a", None, None, "b"),
        Spec(None, None, "b"),
        Spec("a"),
        {"all-reduce"},
        False,
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_automatic_sharding(native_cpu, name):
    p, x, w, y, expected, stays = SPLITS[name]
    devices = mesh()
    values = operands(p)
    form = Epilogue(True, True, True, "relu6", pre=True)
    placed = {
        **{n: jax.device_put(a, NamedSharding(devices, Spec())) for n, a in values.items()},
        "x": jax.device_put(values["x"], NamedSharding(devices, x)),
        "w": jax.device_put(values["w"], NamedSharding(devices, w)),
    }
    if y is not None:
        placed["residual"] = jax.device_put(values["residual"], NamedSharding(devices, y))
    compiled = jax.jit(functools.partial(all_results, p, epilogue=form)).lower(placed).compile()
    text = compiled.as_text()
    assert collectives(text) - {"all-to-all"} == expected
    assert ('custom_call_target="jaxconv_fused"' in text) == stays
    t = before_activation(p, values, TERMS).astype(np.float32)
    for result, exact in zip(compiled(placed), (np.clip(t, 0, 6), t), strict=True):
        assert_exact(result, exact, name)


def test_statistics_of_split_images(native_cpu):
    devices = mesh()
    values = operands(BIG)
    placed = jax.device_put(values, NamedSharding(devices, Spec()))
    for spec in (Spec("a"), Spec("a", "b")):
        placed["x"] = jax.device_put(values["x"], NamedSharding(devices, spec))
        compiled = jax.jit(functools.partial(all_results, BIG)).lower(placed).compile()
        assert 'custom_call_target="jaxconv_fused"' in compiled.as_text()
        check_all(compiled(placed), BIG, values, str(spec))


@pytest.mark.parametrize("name", ["images", "images and filters", "groups", "rows"])
def test_explicit_sharding(native_cpu, name):
    p, x, w, *_ = SPLITS[name]
    devices = mesh(AxisType.Explicit)
    values = operands(p)
    with jax.set_mesh(devices):
        placed = {
            **values,
            "x": jax.device_put(values["x"], NamedSharding(devices, x)),
            "w": jax.device_put(values["w"], NamedSharding(devices, w)),
        }
        results = jax.jit(functools.partial(all_results, p))(placed)
        gradients = jax.jit(jax.grad(lambda v: fused(p, "relu")(**v).sum()))(placed)
    check_all(results, p, values, name)
    alone = jax.jit(jax.grad(lambda v: fused(p, "relu")(**v).sum()))(values)
    for key, gradient in gradients.items():
        assert_exact(np.asarray(gradient), np.asarray(alone[key]), f"{name}: {key}")


def test_gradients_inside_shard_map(native_cpu):
    """The batch is split, the rest replicated: its gradients are summed over the devices."""
    devices = mesh()
    values = operands(BIG)
    specs = {n: Spec("a") if n in ("x", "residual") else Spec() for n in values}

    def loss(v):
        inside = jax.shard_map(
            lambda v: fused(BIG, "relu")(**v), mesh=devices, in_specs=(specs,), out_specs=Spec("a")
        )
        return inside(v).sum()

    gradients = jax.jit(jax.grad(loss))(values)
    alone = jax.jit(jax.grad(lambda v: fused(BIG, "relu")(**v).sum()))(values)
    for key, gradient in gradients.items():
        assert_exact(np.asarray(gradient), np.asarray(alone[key]), key)


# --- the handler ---

P = problem("handler", (6, 5), 3, n=2, c=4, k=8, padding=1)
ABSENT = np.zeros((0,), np.float32)


def call_handler(kernels, words="scale bias residual relu pre statistics", **changes):
    values = operands(P)
    line = f"{P.line(Op.FPROP, 'f32')} {words}".strip()
    instance, workspace, slices, *_ = kernels.module.select(line, "native", "")
    given = {
        **{name: values[name] for name in ("x", "w", *TERMS)},
        "y": jax.ShapeDtypeStruct(values["residual"].shape, np.float32),
        "pre": jax.ShapeDtypeStruct(values["residual"].shape, np.float32),
        "statistics": jax.ShapeDtypeStruct((2, P.k), np.float32),
        "workspace": jax.ShapeDtypeStruct((workspace,), np.uint8),
        **{name: np.arange(4, dtype=np.int64) for name in ("lhs_axes", "rhs_axes", "out_axes")},
        "instance": instance,
        "problem": line,
        "slices": np.int64(slices),
        **changes,
    }
    out = [given.pop(name) for name in ("y", "pre", "statistics", "workspace")]
    arguments = [given.pop(name) for name in ("x", "w", *TERMS)]
    call = jax.ffi.ffi_call("jaxconv_fused", tuple(out))
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.block_until_ready(jax.jit(lambda *a: call(*a, **given))(*arguments))


REFUSED = {
    "short scale": (dict(scale=np.ones(7, np.float32)), r"scale: expected shape \(8\), got \(7\)"),
    "scale in two axes": (dict(scale=np.ones((1, 8), np.float32)), "scale: expected shape"),
    "bias of another dtype": (dict(bias=np.ones(8, np.float16)), "bias: expected dtype f32"),
    "absent bias": (dict(bias=ABSENT), "bias: expected shape"),
    "residual too small": (dict(residual=np.zeros((2, 6, 5, 7), np.float32)), "residual: expected"),
    "pre too small": (dict(pre=jax.ShapeDtypeStruct((1,), np.float32)), "pre: expected"),
    "statistics as a vector": (
        dict(statistics=jax.ShapeDtypeStruct((16,), np.float32)),
        r"statistics: expected shape \(2, 8\), got \(16\)",
    ),
    "a bias that the problem lacks": (
        dict(words="scale residual relu pre statistics"),
        "bias: expected no elements",
    ),
    "statistics that the problem lacks": (
        dict(words="scale bias residual relu pre"),
        "statistics: expected no elements",
    ),
    "a plain problem": (dict(words=""), "epilogue"),
}


def test_the_handler_accepts_what_the_lowering_sends(native_cpu):
    y, pre, statistics, _ = call_handler(native_cpu)
    t = before_activation(P, operands(P), TERMS).astype(np.float32)
    assert_exact(pre, t, "pre")
    assert_exact(y, np.maximum(t, 0), "y")
    np.testing.assert_allclose(statistics[0], np.maximum(t, 0).reshape(-1, P.k).mean(0), rtol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_the_handler_refuses(native_cpu, name):
    changes, words = REFUSED[name]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"(?s)INVALID_ARGUMENT.*{words}"):
        call_handler(native_cpu, **changes)


def test_a_workspace_that_is_too_small_is_replaced(native_cpu):
    """A program exported by another version passes the workspace of that version's plan."""
    y, *_ = call_handler(native_cpu, workspace=jax.ShapeDtypeStruct((0,), np.uint8))
    t = before_activation(P, operands(P), TERMS).astype(np.float32)
    assert_exact(y, np.maximum(t, 0), "y")


def test_the_plain_handler_refuses_an_epilogue(native_cpu):
    values = operands(P)
    line = f"{P.line(Op.FPROP, 'f32')} relu"
    instance, workspace, slices, *_ = native_cpu.module.select(line, "native", "")
    out = jax.ShapeDtypeStruct(values["residual"].shape, np.float32)
    call = jax.ffi.ffi_call("jaxconv_fprop", (out, jax.ShapeDtypeStruct((workspace,), np.uint8)))
    axes = {name: np.arange(4, dtype=np.int64) for name in ("lhs_axes", "rhs_axes", "out_axes")}
    attributes = dict(instance=instance, problem=line, slices=np.int64(slices), **axes)
    with (
        jax.default_device(jax.devices("cpu")[0]),
        pytest.raises(jax.errors.JaxRuntimeError, match="expected a plain epilogue"),
    ):
        jax.block_until_ready(
            jax.jit(lambda x, w: call(x, w, **attributes))(values["x"], values["w"])
        )


def test_equal_bits_in_every_run(native_cpu):
    """Also statistics, whose sums come from several tasks and regions."""
    p = OF_KERNEL["fprop_onednn_f32"]
    rng = np.random.default_rng(0)
    values = {n: rng.standard_normal(a.shape).astype(a.dtype) for n, a in operands(p).items()}
    f = jax.jit(functools.partial(all_results, p))
    with jax.default_device(jax.devices("cpu")[0]):
        first, *others = [[np.asarray(a).tobytes() for a in f(values)] for _ in range(4)]
    assert all(other == first for other in others)
