"""``install``, ``uninstall`` and ``override``: lax's convolutions on this library's kernels."""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import assert_exact, on_cpu

import jaxconv
from jaxconv._src.call import record
from jaxconv._src.conv import canonical
from jaxconv._src.lax import lax_lowering
from jaxconv._src.problem.spec import Op

LAST = ("NHWC", "HWIO", "NHWC")
FIRST = ("NCHW", "OIHW", "NCHW")


@pytest.fixture(autouse=True)
def uninstalled():
    yield
    jaxconv.uninstall()


def integers(seed: int, *shapes, bound: int = 2) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(-bound, bound + 1, shape).astype(np.float32) for shape in shapes]


def same(x, w, numbers=LAST, stride=1, **parameters):
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=numbers, **parameters
    )


# --- canonical forms ------------------------------------------------------------------------------

# Shapes of lhs and rhs, and parameters, of convolutions in programs and in lax's gradient rules.
FORMS = {
    "forward": ((2, 7, 6, 4), (3, 2, 4, 5), dict(dimension_numbers=LAST)),
    "channels first": ((2, 4, 7, 6), (5, 4, 3, 2), dict(dimension_numbers=FIRST)),
    "strided, dilated, asymmetric": (
        (2, 9, 8, 3),
        (3, 2, 3, 4),
        dict(
            window_strides=(2, 1),
            padding=((0, 2), (3, 1)),
            rhs_dilation=(1, 2),
            dimension_numbers=LAST,
        ),
    ),
    "cropping": (
        (2, 9, 8, 3),
        (3, 2, 3, 4),
        dict(padding=((-1, 0), (2, -2)), dimension_numbers=LAST),
    ),
    "transposed": (
        (2, 4, 5, 3),
        (3, 3, 3, 4),
        dict(padding=((2, 1), (1, 2)), lhs_dilation=(2, 3), dimension_numbers=LAST),
    ),
    "strided and transposed": (
        (2, 4, 5, 3),
        (3, 3, 3, 4),
        dict(
            window_strides=(1, 2),
            padding=((2, 1), (1, 2)),
            lhs_dilation=(2, 1),
            dimension_numbers=LAST,
        ),
    ),
    "feature groups": (
        (2, 5, 5, 6),
        (3, 3, 2, 9),
        dict(feature_group_count=3, dimension_numbers=LAST),
    ),
    "batch groups": (
        (6, 5, 5, 2),
        (3, 3, 2, 9),
        dict(batch_group_count=3, dimension_numbers=LAST),
    ),
    "depthwise in an odd order of axes": (
        (5, 3, 4, 2),
        (1, 3, 8, 3),
        dict(feature_group_count=4, dimension_numbers=("HWCN", "IHOW", "CNHW")),
    ),
    "one axis": ((2, 3, 11), (4, 3, 3), dict(window_strides=(2,), padding=((1, 1),))),
    "three axes": ((1, 2, 4, 3, 5), (3, 2, 2, 2, 2), dict(window_strides=(2, 1, 1))),
    "no spatial axis": ((3, 4), (5, 4), dict()),
    "no spatial axis, groups": ((3, 4), (6, 2), dict(feature_group_count=2)),
}


def form(name: str):
    lhs_shape, rhs_shape, parameters = FORMS[name]
    rank = len(lhs_shape) - 2
    parameters = {"window_strides": (1,) * rank, "padding": ((1, 1),) * rank, **parameters}
    return *integers(0, lhs_shape, rhs_shape), parameters


@pytest.mark.parametrize("name", FORMS)
def test_every_canonical_form_is_the_same_convolution(name):
    lhs, rhs, parameters = form(name)
    expected = on_cpu(functools.partial(lax.conv_general_dilated, **parameters), lhs, rhs)
    equation = jax.make_jaxpr(functools.partial(lax.conv_general_dilated, **parameters))(
        lhs, rhs
    ).jaxpr.eqns[0]
    conv = lax_lowering.conv_parameters(**equation.params)
    shapes = lhs.shape, rhs.shape, expected.shape
    groups = conv.feature_group_count * conv.batch_group_count
    seen = set()
    for batch in {1, groups}:
        for canonical_form in canonical.forms(conv, *shapes, batch=batch):
            actual = jax.jit(functools.partial(canonical_form.apply, out_dtype=expected.dtype))(
                lhs, rhs
            )
            assert_exact(actual, expected, f"{name} as {canonical_form}")
            seen.add((canonical_form.op, canonical_form.swapped))
    assert seen == {
        (Op.FPROP, False),
        (Op.DGRAD, False),
        (Op.WGRAD, False),
        (Op.WGRAD, True),
    }


@pytest.mark.parametrize("name", FORMS)
def test_overridden_convolution_and_gradients_are_lax_s(platform, name):
    lhs, rhs, parameters = form(name)
    call = functools.partial(lax.conv_general_dilated, precision="highest", **parameters)

    def with_gradients(lhs, rhs):
        y, vjp = jax.vjp(call, lhs, rhs)
        return y, *vjp(jnp.sign(y))

    expected = on_cpu(with_gradients, lhs, rhs)
    with jaxconv.override():
        compiled, eager = jax.jit(with_gradients)(lhs, rhs), with_gradients(lhs, rhs)
        explanation = jaxconv.explain(with_gradients, lhs, rhs)
    for label, a, b, c in zip(("y", "dlhs", "drhs"), compiled, eager, expected, strict=True):
        assert_exact(a, c, f"{name}: {label}")
        assert_exact(b, c, f"{name}: {label}, eager")
    assert explanation.on_kernels == 3, str(explanation)


# --- which form every convolution took ------------------------------------------------------------


def forms(f, *arguments) -> list[str]:
    """For every convolution of ``f`` after lowering: its operation, and its distinctive sizes."""
    with jaxconv.override():
        convolutions = jaxconv.explain(f, *arguments).convolutions
    assert all(c.instance for c in convolutions), convolutions
    found = []
    for c in convolutions:
        line = c.problem.removesuffix(" krsc")
        fields = {field[0]: field[1:] for field in line.split()[3:]}
        found.append(
            f"{c.op} b{fields['b']} g{fields['g']} c{fields['c']} k{fields['k']} "
            f"f{fields['f']} s{fields['s']} l{fields['l']}"
        )
    return found


def res_block(numbers, params, x):
    """A ResNet bottleneck with a projection: 1x1, 3x3 with stride 2, 1x1; and 1x1 with stride 2."""
    y = jax.nn.relu(same(x, params["reduce"], numbers))
    y = jax.nn.relu(same(y, params["spatial"], numbers, stride=2))
    y = same(y, params["expand"], numbers)
    return jax.nn.relu(y + same(x, params["project"], numbers, stride=2))


def res_block_arguments(numbers):
    shapes = dict(reduce=(1, 1, 16, 4), spatial=(3, 3, 4, 4), expand=(1, 1, 4, 32))
    shapes["project"] = (1, 1, 16, 32)
    params = dict(zip(shapes, integers(1, *shapes.values()), strict=True))
    (x,) = integers(2, (2, 8, 8, 16))
    if numbers == FIRST:
        params = {name: w.transpose(3, 2, 0, 1) for name, w in params.items()}
        x = x.transpose(0, 3, 1, 2)
    return params, x


@pytest.mark.parametrize("numbers", [LAST, FIRST], ids=["channels last", "channels first"])
def test_forms_of_a_residual_block(platform, native_kernels, numbers):
    """Gradients are recognised as dgrad and wgrad, and no input is dilated."""

    def loss(params, x):
        return jnp.sum(res_block(numbers, params, x) ** 2)

    step = jax.value_and_grad(loss, argnums=(0, 1))
    reduce, spatial = "b1 g1 c16 k4 f1x1 s1x1 l1x1", "b1 g1 c4 k4 f3x3 s2x2 l1x1"
    expand, project = "b1 g1 c4 k32 f1x1 s1x1 l1x1", "b1 g1 c16 k32 f1x1 s2x2 l1x1"
    assert sorted(forms(step, *res_block_arguments(numbers))) == sorted(
        f"{op} {layer}"
        for op in ("fprop", "dgrad", "wgrad")
        for layer in (reduce, spatial, expand, project)
    )


@pytest.mark.parametrize("numbers", [LAST, FIRST], ids=["channels last", "channels first"])
def test_a_residual_block_s_gradients_are_lax_s(platform, numbers):
    params, x = res_block_arguments(numbers)

    def loss(params, x):
        return jnp.sum(res_block(numbers, params, x))

    expected = on_cpu(jax.grad(loss, (0, 1)), params, x)
    with jaxconv.override():
        jax.tree.map(
            functools.partial(assert_exact, repro="residual block"),
            jax.jit(jax.grad(loss, (0, 1)))(params, x),
            expected,
        )


def test_transposed_convolution_and_its_gradients_insert_no_zeros(platform, native_kernels):
    x, w = integers(3, (2, 5, 5, 4), (4, 4, 4, 6))

    def loss(x, w):
        return jnp.sum(lax.conv_transpose(x, w, (2, 2), "SAME") ** 2)

    layer = "b1 g1 c6 k4 f4x4 s2x2 l1x1"
    assert sorted(forms(jax.grad(loss, (0, 1)), x, w)) == [
        f"dgrad {layer}",
        f"fprop {layer}",
        f"wgrad {layer}",
    ]


def test_groups_stay_groups(platform, native_kernels):
    x, w = integers(4, (2, 5, 5, 8), (3, 3, 2, 12))

    def loss(x, w):
        return jnp.sum(same(x, w, feature_group_count=4) ** 2)

    layer = "b1 g4 c8 k12 f3x3 s1x1 l1x1"
    assert sorted(forms(jax.grad(loss, (0, 1)), x, w)) == [
        f"dgrad {layer}",
        f"fprop {layer}",
        f"wgrad {layer}",
    ]


def check_mapped(f, *arguments) -> list[str]:
    """The forms of a mapped function; its values must equal lax's, compiled and one by one."""
    expected = on_cpu(f, *arguments)
    with jaxconv.override():
        for actual in (jax.jit(f)(*arguments), f(*arguments)):
            jax.tree.map(functools.partial(assert_exact, repro=str(f)), actual, expected)
    return forms(f, *arguments)


def test_vmap_over_both_operands_is_one_batched_problem(platform, native_kernels):
    x, w = integers(5, (3, 2, 5, 5, 4), (3, 3, 3, 4, 6))
    assert check_mapped(jax.vmap(same), x, w) == ["fprop b3 g1 c4 k6 f3x3 s1x1 l1x1"]
    nested = integers(5, (2, 3, 2, 5, 5, 4), (2, 3, 3, 3, 4, 6))
    assert check_mapped(jax.vmap(jax.vmap(same)), *nested) == ["fprop b6 g1 c4 k6 f3x3 s1x1 l1x1"]
    grouped = integers(5, (3, 2, 5, 5, 4), (3, 3, 3, 2, 6))
    in_groups = functools.partial(same, feature_group_count=2)
    assert check_mapped(jax.vmap(in_groups), *grouped) == ["fprop b3 g2 c4 k6 f3x3 s1x1 l1x1"]


def test_gradient_of_a_mapped_layer_is_batched(platform, native_kernels):
    x, w = integers(6, (3, 2, 5, 5, 4), (3, 3, 3, 4, 6), bound=1)

    def loss(x, w):
        return jnp.sum(jax.vmap(same)(x, w) ** 2)

    layer = "b3 g1 c4 k6 f3x3 s1x1 l1x1"
    assert sorted(check_mapped(jax.grad(loss, (0, 1)), x, w)) == [
        f"dgrad {layer}",
        f"fprop {layer}",
        f"wgrad {layer}",
    ]


@pytest.mark.parametrize("numbers", [LAST, FIRST], ids=["channels last", "channels first"])
def test_per_example_weight_gradients_are_one_batched_problem(platform, native_kernels, numbers):
    x, w = integers(7, (5, 6, 6, 4), (3, 3, 4, 8), bound=1)
    if numbers == FIRST:
        x, w = x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1)

    def loss(w, x):
        return jnp.sum(same(x[None], w, numbers) ** 2)

    f = jax.vmap(jax.grad(loss), (None, 0))
    assert check_mapped(f, w, x) == [
        "fprop b1 g1 c4 k8 f3x3 s1x1 l1x1",
        "wgrad b5 g1 c4 k8 f3x3 s1x1 l1x1",
    ]
    with jaxconv.override():
        text = jax.jit(f).lower(w, x).as_text()
    assert "stablehlo.while" not in text and "stablehlo.convolution" not in text


def test_a_batched_problem_is_not_transposed(native_cpu):
    """The transpose by which vmap forms groups is undone before any array is copied."""
    with jax.default_device(jax.devices("cpu")[0]), jaxconv.override():
        x, w = integers(8, (3, 2, 8, 8, 4), (3, 3, 3, 4, 8))
        text = jax.jit(jax.vmap(same)).lower(x, w).compile().as_text()
    calls = [line for line in text.splitlines() if "custom-call(" in line]
    assert len(calls) == 1 and "b3" in calls[0], text
    assert "transpose(" not in text and " copy(" not in text, text


# --- the switch -----------------------------------------------------------------------------------


def on_kernels(f, *arguments) -> bool:
    return "jaxconv_" in jax.jit(f).lower(*arguments).as_text()


def runs_lowered() -> int:
    """The number of convolutions that a call lowers now: 1 if no cache has the program, else 0."""
    with record.recording() as found:
        compiled_before(*ARRAYS)
    return sum(c.instance is not None for c in found)


ARRAYS = integers(9, (1, 5, 5, 2), (3, 3, 2, 3))


@jax.jit
def compiled_before(x, w):
    return same(x, w)


def test_install_is_seen_by_functions_compiled_before(native_kernels, platform):
    expected = compiled_before(*ARRAYS)
    assert not on_kernels(compiled_before, *ARRAYS)
    jaxconv.install()
    jaxconv.install()  # repeating it changes nothing
    assert on_kernels(compiled_before, *ARRAYS)
    assert runs_lowered() == 1, "the compiled function was reused"
    assert runs_lowered() == 0, "the second call compiles nothing"
    assert_exact(compiled_before(*ARRAYS), expected, "installed")
    with record.recording() as found:
        same(*integers(10, (1, 6, 5, 2), (3, 3, 2, 3)))
    assert [c.instance is not None for c in found] == [True], "outside jit too"
    jaxconv.uninstall()
    jaxconv.uninstall()
    assert not on_kernels(compiled_before, *ARRAYS)
    assert_exact(compiled_before(*ARRAYS), expected, "uninstalled")


def test_override_nests_and_ends_with_its_block(native_kernels, platform):
    with jaxconv.override():
        assert on_kernels(same, *ARRAYS)
        with jaxconv.override(False):
            assert not on_kernels(same, *ARRAYS)
        assert on_kernels(same, *ARRAYS)
    assert not on_kernels(same, *ARRAYS)
    with pytest.raises(RuntimeError, match="inside"), jaxconv.override():
        raise RuntimeError("inside")
    assert not on_kernels(same, *ARRAYS)
    jaxconv.install()
    with jaxconv.override(False):
        assert not on_kernels(same, *ARRAYS)
    assert on_kernels(same, *ARRAYS)


def test_override_is_of_its_thread_and_install_of_all(native_cpu):
    """Threads with and without override run one function at the same time."""
    barrier = threading.Barrier(4)
    failures: list[str] = []

    def work(index: int) -> None:
        with jax.default_device(jax.devices("cpu")[0]):
            for _ in range(3):
                barrier.wait()
                with jaxconv.override(index % 2 == 0):
                    if on_kernels(compiled_before, *ARRAYS) != (index % 2 == 0):
                        failures.append(f"thread {index} sees another's override")
                    compiled_before(*ARRAYS)

    def run() -> None:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run()
    jaxconv.install()
    run()
    assert not failures, failures
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(on_kernels(compiled_before, *ARRAYS)))
    thread.start()
    thread.join()
    assert seen == [True], "install is for every thread"


# --- what stays lax's -----------------------------------------------------------------------------


def test_other_dtypes_stay_lax_s_and_say_so():
    with jax.default_device(jax.devices("cpu")[0]):
        x, w = (a.astype(np.int16) for a in ARRAYS)
        expected = same(x, w)
        with jaxconv.override():
            assert_exact(same(x, w), expected, "int16")
            (convolution,) = jaxconv.explain(same, x, w).convolutions
    assert convolution.instance is None
    assert convolution.refusals == (("jaxconv", "no kernel for dtype int16"),)


K = (None, None, None, "data")


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("split", "filter_split", "out", "op"),
    [
        (("data",), (), None, "fprop"),
        (K, (), (), "fprop"),
        (("data",), (), K, "fprop"),
        ((None, "data"), (), None, "fprop"),
        (("data",), K, K, "dgrad"),
    ],
    ids=str,
)
def test_explicit_meshes(native_cpu, devices, split, filter_split, out, op):
    """With `out_sharding`, lax accepts operands that use one mesh axis twice.

    jaxconv refuses such a forward pass, so it computes a data gradient.
    """
    kind = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((devices,), ("data",), kind, devices=jax.devices("cpu")[:devices])
    x, w = integers(14, (2, 8, 8, 4), (3, 3, 4, 6))
    expected = same(x, w)
    P = jax.sharding.PartitionSpec
    f = functools.partial(same, out_sharding=None if out is None else P(*out))
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*split)))
        w = jax.device_put(w, jax.sharding.NamedSharding(mesh, P(*filter_split)))
        with jaxconv.override():
            y = jax.jit(f)(x, w)
            (c,) = jaxconv.explain(f, x, w).convolutions
        assert y.sharding == jax.jit(f)(x, w).sharding
    assert_exact(y, expected, f"{split} to {out} on {devices} devices")
    assert c.instance is not None and c.op == op


def test_a_complex_convolution_is_three_real_ones(platform, native_kernels):
    """lax's own lowering makes real convolutions of a complex one; kernels compute these."""
    x, w = (a.astype(np.complex64) * (1 + 2j) for a in ARRAYS)
    with jaxconv.override():
        assert_exact(same(x, w, precision="highest"), on_cpu(same, x, w), "complex64")
        assert forms(same, x, w) == ["fprop b1 g1 c2 k3 f3x3 s1x1 l1x1"] * 3


def test_a_tensor_without_elements(platform):
    x = np.zeros((0, 5, 5, 2), np.float32)
    with jaxconv.override():
        y = jax.jit(same)(x, ARRAYS[1])
        (convolution,) = jaxconv.explain(same, x, ARRAYS[1]).convolutions
    assert y.shape == (0, 5, 5, 3)
    assert convolution.refusals[0].reason == "a tensor has no elements"


def test_four_spatial_axes(platform):
    x, w = integers(11, (1, 2, 3, 3, 3, 3), (2, 2, 2, 2, 2, 2))

    def f(x, w):
        return lax.conv_general_dilated(x, w, (1,) * 4, "VALID")

    with jaxconv.override():
        explanation = jaxconv.explain(f, x, w)
    assert explanation.on_kernels == 0 and "4 spatial axes" in str(explanation)


@pytest.mark.parametrize("function", [same, jaxconv.conv], ids=["lax", "jaxconv"])
def test_symbolic_shapes_go_to_xla(function):
    """A program exported for any batch keeps XLA's convolution; ``explain`` gives the reason."""
    (batch,) = jax.export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, 5, 5, 2), np.float32)
    w = jax.ShapeDtypeStruct((3, 3, 2, 3), np.float32)
    with jax.default_device(jax.devices("cpu")[0]), jaxconv.override():
        with record.recording() as found:
            exported = jax.export.export(jax.jit(function), platforms=["cpu"])(x, w)
        x, w = ARRAYS
        assert_exact(exported.call(x, w), same(x, w), "exported with a symbolic batch")
    assert {c.instance for c in found} == {None}
    assert all("symbolic" in c.refusals[0].reason for c in found)


# --- plain JAX programs ---------------------------------------------------------------------------


def test_programs_that_never_name_a_convolution(platform, native_kernels):
    a, v = integers(12, (50,), (7,))
    with jaxconv.override():
        explanation = jaxconv.explain(jnp.convolve, a, v)
        assert explanation.on_kernels == len(explanation.convolutions) == 1, str(explanation)
        assert_exact(jnp.convolve(a, v, precision="highest"), np.convolve(a, v), "jnp.convolve")


def test_inside_control_flow_and_remat(platform, native_kernels):
    x, w = integers(13, (2, 5, 5, 3), (3, 3, 3, 3), bound=1)

    def layers(x, w):
        def layer(y, _):
            return jnp.clip(same(y, w), -2, 2), None

        y = lax.scan(jax.checkpoint(layer), x, length=3)[0]
        y = lax.cond(y.sum() > 0, lambda y: same(y, w), lambda y: -same(y, w), y)
        return jnp.sum(lax.fori_loop(0, 2, lambda _, y: jnp.clip(same(y, w), -2, 2), y))

    def loss(x, w):
        return jnp.sum(lax.scan(lambda y, _: (jnp.clip(same(y, w), -2, 2), None), x, length=2)[0])

    for f in (layers, jax.grad(loss, (0, 1))):
        expected = on_cpu(f, x, w)
        with jaxconv.override():
            jax.tree.map(functools.partial(assert_exact, repro=str(f)), jax.jit(f)(x, w), expected)
            explanation = jaxconv.explain(f, x, w)
        assert explanation.on_kernels == sum(c.count for c in explanation.convolutions) > 0


def test_algorithm_xla_stays_xla_s(platform):
    """The fallback calls lax's convolution, which must not be overridden again."""
    with jaxconv.override():
        f = functools.partial(jaxconv.conv, algorithm="xla")
        (convolution,) = jaxconv.explain(f, *ARRAYS).convolutions
        assert convolution.instance is None
        assert not on_kernels(f, *ARRAYS)


# --- negative padding, which XLA:CPU computes wrongly ---------------------------------------------


@pytest.mark.parametrize("algorithm", ["auto", "xla"])
@pytest.mark.parametrize(
    "parameters",
    [
        dict(padding=((-1, 1),)),
        dict(padding=((1, -1),), lhs_dilation=(3,)),
        dict(padding=((-1, 2),), rhs_dilation=(2,)),
    ],
    ids=str,
)
def test_an_input_cropped_to_nothing_gives_zeros(platform, parameters, algorithm):
    """XLA's convolution reads outside such an input. The last gradient crops dy to nothing, too."""
    x, w = integers(0, (3, 8, 1), (4, 8, 1))

    @jaxconv.override(algorithm=algorithm)
    def with_gradients(x, w):
        y, vjp = jax.vjp(lambda x, w: lax.conv_general_dilated(x, w, (1,), **parameters), x, w)
        return y, *vjp(jnp.ones_like(y))

    for result in jax.jit(with_gradients)(x, w):
        assert result.size and not np.any(result), parameters


@pytest.mark.parametrize("dtypes", [("float16", "bfloat16"), ("int16", "int16")], ids=str)
def test_xla_is_given_what_is_already_cropped(native_cpu, dtypes):
    """Without a kernel, XLA gets an input that is cropped before the convolution."""
    operand, result = dtypes
    x, w = (array.astype(operand) for array in integers(0, (2, 4, 6), (5, 4, 3)))

    def convolve(x, padding):
        return lax.conv_general_dilated(
            x, w, (2,), padding, rhs_dilation=(2,), preferred_element_type=result
        )

    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(lambda x: convolve(x[..., 1:], ((0, 3),)))(x)
        with jaxconv.override():
            actual = jax.jit(lambda x: convolve(x, ((-1, 3),)))(x)
    assert_exact(actual, np.asarray(expected), str(dtypes))


@pytest.mark.parametrize("padding", ["VALID", ((1, 1), (1, 1))], ids=["VALID", "pairs"])
@pytest.mark.parametrize("stride", [0, -1])
@pytest.mark.parametrize("call", [jaxconv.override, jaxconv.fuse], ids=["override", "fuse"])
def test_strides_below_one_are_refused_by_lax(call, stride, padding):
    def convolve(x, w):
        return lax.conv_general_dilated(x, w, (stride, 1), padding, dimension_numbers=LAST)

    x, w = np.ones((1, 8, 8, 3), np.float32), np.ones((3, 3, 3, 4), np.float32)
    for function in (convolve, call(convolve)):
        with pytest.raises(ValueError, match="positive stride"):
            function(x, w)
