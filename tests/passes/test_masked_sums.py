"""The primitive masked_sums: its operations in JAX and its CUDA kernel agree exactly.

``test_emulated_kernels`` runs the kernel without a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxconv._src.passes import derivatives, masked_sums
from jaxconv._src.passes.derivatives import DERIVATIVES, VALUES
from jaxconv._src.passes.masked_sums import Sums

FORMS = {
    "one gradient": Sums(1, 1, "result", False, 0.0, None),
    "bounded, stored": Sums(1, 1, "result", True, 0.0, 2.0),
    "two gradients": Sums(2, 1, "result", True, 0.0, None),
    "two arrays": Sums(1, 2, "result", True, 0.0, None),
    "two of each": Sums(2, 2, "result", True, -1.0, None),
    "two of each, not stored": Sums(2, 2, "result", False, 0.0, 1.0),
    "from above alone": Sums(1, 1, "result", False, None, 1.0),
    "affine": Sums(1, 1, "affine", False, 0.0, None),
    "affine, stored": Sums(1, 1, "affine", True, 0.0, 1.0),
    "affine, two of each": Sums(2, 2, "affine", True, 0.0, 1.0),
    "relu6": Sums(2, 1, "affine", True, None, None, "relu6"),
    "bits": Sums(1, 1, "bits", False, 0.0, None),
    "bits, bounded, stored": Sums(2, 1, "bits", True, 0.0, 2.0),
    "bits, two of each": Sums(2, 2, "bits", True, 0.0, None),
    "no array": Sums(1, 0, "none", False, None, None),
    "no mask": Sums(1, 1, "none", False, None, None),
    "no mask, two of each": Sums(2, 2, "none", True, None, None),
    "leaky relu": Sums(2, 1, "affine", True, None, None, "leaky_relu", 0.5),
    "values": Sums(1, 1, "affine", False, None, None, "leaky_relu", 0.5, values=True),
    "values of relu6": Sums(1, 1, "affine", False, None, None, "relu6", values=True),
}
# Fewer rows than a CTA has, rows that are no multiple of its steps, a partial last slice of
# channels.
SHAPES = [(3, 5, 7, 8), (700, 72), (4, 4, 4, 64), (5, 3, 3, 264), (2, 7, 7, 2048), (3, 31, 17, 536)]

JAX_ACTIVATIONS = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "leaky_relu": functools.partial(jax.nn.leaky_relu, negative_slope=0.25),
    "elu": functools.partial(jax.nn.elu, alpha=0.25),
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "hard_swish": jax.nn.hard_swish,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "softplus": jax.nn.softplus,
    "mish": jax.nn.mish,
    "maximum": lambda u: jnp.maximum(u, 0),
    "clip6": lambda u: jnp.clip(u, 0, 6),
    "leaky_maximum": lambda u: jnp.maximum(u, 0.25 * u),
    "clip_hard_sigmoid": lambda u: jnp.clip(u + 3, 0, 6) / 6,
    "clip_hard_swish": lambda u: u * jnp.clip(u + 3, 0, 6) / 6,
}


@pytest.mark.parametrize("name", JAX_ACTIVATIONS)
def test_derivatives_at_special_numbers(name):
    """Those of the programs: NaN where these multiply infinity by a derivative of 0."""
    numbers = jnp.asarray([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e9, -1e9], np.float32)
    expected = jax.vmap(jax.grad(JAX_ACTIVATIONS[name]))(numbers)
    actual = derivatives.derivative(name, 0.25, numbers)
    if name == "clip_hard_swish":  # which ``fuse`` never chooses for this reason
        actual = actual.at[:2].set(expected[:2])
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-30)


def drawn(form: Sums, shape: tuple[int, ...], dtype, seed: int = 0) -> list[jax.Array]:
    """Operands of small integers; the result array contains a NaN."""
    rng = np.random.default_rng(seed)

    def integers(*shape: int, dtype=np.float32):
        return jnp.asarray(rng.integers(-3, 4, shape), dtype)

    arrays = [integers(*shape, dtype=dtype) for _ in range(form.gradients + form.arrays)]
    # The first mean is shared by all segments.
    leading = [(), *[masked_sums.of_segments(form.segments)] * 3]
    vectors = [
        integers(*leading[i], shape[-1])
        for i in range(form.arrays + 2 * (form.masked_by == "affine"))
    ]
    result = integers(*shape, dtype=dtype).at[(0,) * len(shape)].set(np.nan)
    if form.masked_by == "result":
        vectors.append(result)
    if form.masked_by == "bits":
        inside = (result > form.above) & (result < (np.inf if form.below is None else form.below))
        vectors.append(jnp.packbits(inside, axis=-1, bitorder="little"))
    return [*arrays, *vectors]


def defined(operands, form: Sums) -> list[np.ndarray]:
    """The results by definition, in float64."""
    dtype = operands[0].dtype
    wide = [np.asarray(o, np.float64) for o in operands]
    gradients, arrays, means, of_mask = form.split(wide)
    shape = gradients[0].shape

    def rounded(x):
        return x.astype(np.float32).astype(dtype).astype(np.float64)

    def along(vector):
        rows = np.repeat(np.atleast_2d(vector), shape[0] // np.atleast_2d(vector).shape[0], 0)
        return rows.reshape(shape[0], *[1] * (len(shape) - 2), shape[-1])

    centred = [y - along(m) for y, m in zip(arrays, means, strict=True)]
    g = rounded(sum(gradients))
    if form.masked_by == "affine":
        scale, offset = map(along, of_mask)
        a = centred[0] * scale + offset
        a = a if form.values else rounded(a)
    elif form.masked_by == "bits":
        a = np.unpackbits(np.asarray(operands[-1]), axis=-1, bitorder="little")[..., : shape[-1]]
    else:
        a = of_mask[0] if of_mask else None
    above, below = form.bounds if form.masked_by != "bits" else (0, None)
    if a is None:
        dz = g
    elif form.derivative:
        with jax.enable_x64(True):
            function = JAX_ACTIVATIONS[form.derivative]
            if form.derivative == "leaky_relu":
                function = functools.partial(jax.nn.leaky_relu, negative_slope=form.slope)
            both = jax.vmap(jax.value_and_grad(function))(a.ravel())
            value, slope = (np.asarray(found).reshape(shape) for found in both)
        dz = g * slope if form.values else rounded(g * slope)
    else:
        kept = a > (-np.inf if above is None else above)
        dz = np.where(kept & (True if below is None else a < below), g, 0)
    products = dz, *(dz * c for c in centred), *[g * value for _ in range(form.values)]
    split = [p.reshape(form.segments, -1, shape[-1]) for p in products]
    sums = np.stack([p.sum(1) for p in split], 1)
    sums = sums if form.segments > 1 else sums[0]
    return [dz, sums] if form.stores else [sums]


def assert_equal(actual, expected) -> None:
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float64), e)


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float32])
@pytest.mark.parametrize("name", FORMS)
def test_operations_of_jax(name, dtype, segments):
    form = dataclasses.replace(FORMS[name], segments=segments)
    operands = drawn(form, (4, 3, 5, 8), dtype)
    bind = functools.partial(masked_sums.masked_sums, form=form)
    with jax.default_device(jax.devices("cpu")[0]):
        found = bind(*operands)
        assert_equal(found, defined(operands, form))
        assert found[0].dtype == (dtype if form.stores else np.float32)
        mapped = jax.vmap(bind, in_axes=(1, *[None] * (len(operands) - 1)))
        stacked = jnp.stack([operands[0], 2 * operands[0]], 1)
        assert_equal(
            [r[1] for r in mapped(stacked, *operands[1:])],
            defined([2 * operands[0], *operands[1:]], form),
        )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
@pytest.mark.parametrize("activation", DERIVATIVES)
def test_derivatives_of_activations(activation, dtype):
    """Derivatives equal those of jax.nn in float64, within a rounding of the gradient's type."""
    form = Sums(1, 1, "affine", True, None, None, activation, 0.25)
    rng = np.random.default_rng(1)
    g, y = (jnp.asarray(rng.standard_normal((64, 24)) * s, dtype) for s in (1, 4))
    vectors = [jnp.asarray(rng.standard_normal(24), np.float32) for _ in range(3)]
    mean, scale, offset = vectors
    u = ((y.astype(np.float32) - mean) * scale + offset).astype(dtype)
    g = jnp.where(jnp.isin(abs(u), jnp.asarray([0, 3], dtype)), 0, g)  # jax.nn's are means there
    operands = [g, y, *vectors]
    with jax.default_device(jax.devices("cpu")[0]):
        dz, sums = masked_sums.masked_sums(*operands, form=form)
    expected_dz, expected_sums = defined(operands, form)
    # u, rounded to bfloat16, may be the neighbour of the definition's.
    error = 3e-2 if dtype == jnp.bfloat16 else 3e-6
    np.testing.assert_allclose(np.asarray(dz, np.float64), expected_dz, rtol=error, atol=error)
    np.testing.assert_allclose(sums, expected_sums, rtol=error, atol=8 * error)


@pytest.mark.parametrize("activation", VALUES)
def test_values_of_activations(activation):
    """The sums with derivative and value equal those of jax.nn in float64."""
    form = Sums(1, 1, "affine", False, None, None, activation, 0.25, 4, values=True)
    rng = np.random.default_rng(2)
    g, y = (jnp.asarray(rng.standard_normal((4, 64, 24)) * s, np.float32) for s in (1, 4))
    vectors = [jnp.asarray(rng.standard_normal((4, 24)), np.float32) for _ in range(3)]
    with jax.default_device(jax.devices("cpu")[0]):
        (sums,) = masked_sums.masked_sums(g, y, *vectors, form=form)
    (expected,) = defined([g, y, *vectors], form)
    np.testing.assert_allclose(sums, expected, rtol=2e-5, atol=2e-4)


def sums_of_unbounded_gradients(activation: str) -> jax.Array:
    """The sums where the gradient is NaN or infinite, and the activation constant."""
    form = Sums(1, 1, "affine", False, None, None, activation)
    gradient = jnp.array([np.nan, np.inf, -np.inf, 1, 2, 3], jnp.bfloat16)
    y = jnp.array([-4, 4, -8, 0, 1, -1], jnp.bfloat16)
    arrays = (jnp.broadcast_to(a[:, None], (6, 8)) for a in (gradient, y))
    zero, one = jnp.zeros(8), jnp.ones(8)
    return jax.jit(functools.partial(masked_sums.masked_sums, form=form))(*arrays, zero, one, zero)[
        0
    ]


def assert_zeros_where_programs_select():
    """relu6(u + 3) / 6 has a derivative by selection; that of jnp.clip is a factor."""
    expected = np.array([[1.0], [-1 / 6]]) * np.ones(8)
    np.testing.assert_allclose(sums_of_unbounded_gradients("hard_sigmoid"), expected, 1e-2)
    assert np.isnan(sums_of_unbounded_gradients("clip_hard_sigmoid")).all()


def test_where_programs_select_the_gradient():
    assert_zeros_where_programs_select()


@pytest.mark.gpu
def test_kernel_where_programs_select_the_gradient():
    assert_zeros_where_programs_select()


@pytest.mark.parametrize("name", ["two gradients", "bits, bounded, stored"])
def test_derivative(name):
    """The call is linear in the gradients, and is differentiated like the operations of JAX."""
    form = FORMS[name]
    g, h, *rest = drawn(form, (4, 6, 8), jnp.bfloat16)
    bind = functools.partial(masked_sums.masked_sums, form=form)
    with jax.default_device(jax.devices("cpu")[0]):
        primal, tangent = jax.jvp(lambda g: bind(g, h, *rest), (g,), (h,))
        assert_equal(primal, defined([g, h, *rest], form))
        assert_equal(tangent, defined([h, 0 * h, *rest], form))
        back = jax.grad(lambda g: (bind(g, h, *rest)[0].astype(np.float32) ** 2).sum())(g)
        assert_equal([back], [2 * defined([g, h, *rest], form)[0]])


@pytest.mark.parametrize(
    "form, shape, dtype",
    [
        (FORMS["one gradient"], (4, 12), jnp.bfloat16),
        (FORMS["one gradient"], (4, 8), np.float64),
        (FORMS["one gradient"], (0, 8), jnp.bfloat16),
        (Sums(1, 0, "affine", False, 0.0, None), (4, 8), jnp.bfloat16),
        (Sums(1, 2, "affine", False, 0.0, None, "silu"), (4, 8), jnp.bfloat16),
        (Sums(1, 1, "affine", False, 0.0, None, "softsign"), (4, 8), jnp.bfloat16),
        (Sums(1, 1, "result", False, 0.0, None, "silu"), (4, 8), jnp.bfloat16),
        (Sums(1, 1, "affine", True, None, None, "silu", values=True), (4, 8), jnp.bfloat16),
        (Sums(1, 1, "affine", False, None, None, "elu", values=True), (4, 8), jnp.bfloat16),
        (Sums(2, 1, "affine", False, None, None, "silu", values=True), (4, 8), jnp.bfloat16),
        (Sums(1, 1, "none", False, None, None, segments=3), (4, 8), jnp.bfloat16),
    ],
)
def test_what_the_kernel_does_not_take(form, shape, dtype):
    assert not masked_sums.accepts(form, shape, np.dtype(dtype))


def test_lowering_for_a_gpu(cuda_calls):
    """One call, which reads bits in place of the result where bits decide the mask."""
    array, vector, absent = "tensor<4x6x24xbf16>", "tensor<24xf32>", "tensor<0xf32>"
    for name, told in (
        ("two of each", [array, absent]),
        ("bits, two of each", [absent, "tensor<4x6x3xui8>"]),
    ):
        operands = drawn(FORMS[name], (4, 6, 24), jnp.bfloat16)
        bind = jax.jit(functools.partial(masked_sums.masked_sums, form=FORMS[name]))
        text = bind.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        (types,) = re.findall(r"custom_call @jaxconv_masked_sums.* : \((.*)\) ->", text)
        vectors = [vector, vector, absent, absent]
        assert types.split(", ") == [array, array, *told, array, array, *vectors]


def test_a_call_says_no_more_than_earlier_versions_read(cuda_calls):
    """A call has only attributes that earlier versions read, except for newer features."""
    for form, expected in (
        (FORMS["affine"], ["above", "below"]),
        (Sums(1, 1, "affine", False, 0.0, None, "silu"), ["above", "activation", "below", "slope"]),
        (dataclasses.replace(FORMS["affine"], segments=4), ["above", "below", "segments"]),
        (FORMS["values"], ["above", "activation", "below", "slope", "values"]),
    ):
        operands = drawn(form, (4, 6, 24), jnp.bfloat16)
        bind = jax.jit(functools.partial(masked_sums.masked_sums, form=form))
        text = bind.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        (attributes,) = re.findall(r"@jaxconv_masked_sums.*backend_config = \{(.*?)\}", text)
        assert sorted(re.findall(r"(\w+) = ", attributes)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_kernel(name, shape, segments):
    """Exact on integers; on other numbers, the same bits in a second run."""
    form = dataclasses.replace(FORMS[name], segments=shape[0] if segments else 1)
    dtype = (jnp.bfloat16, jnp.float16, np.float32)[(len(shape) + len(name)) % 3]
    assert masked_sums.accepts(form, shape, np.dtype(dtype))
    bind = jax.jit(functools.partial(masked_sums.masked_sums, form=form))
    operands = drawn(form, shape, dtype)
    assert 'custom_call_target="jaxconv_masked_sums"' in bind.lower(*operands).compile().as_text()
    assert_equal(bind(*operands), defined(operands, form))
    operands[0] = jax.random.normal(jax.random.key(0), shape, dtype)
    first, second = bind(*operands), bind(*operands)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "at, change, said",
    [
        (1, lambda a: a[:1], "gradient2: expected shape"),
        (2, lambda a: a.astype(np.float32), "result: expected dtype"),
        (3, lambda a: jnp.ones((4, 1), np.uint8), "bits: expected no elements"),
        (6, lambda a: a[:-1], "mean: expected shape"),
        (8, lambda a: jnp.ones(8), "scale: expected no elements"),
    ],
)
def test_a_handler_names_the_buffer_that_does_not_match(at, change, said, registered_cuda_kernels):
    none = jnp.zeros(0)
    array, vector = jnp.ones((4, 8), jnp.bfloat16), jnp.ones(8)
    given = [array, array, array, none, array, none, vector, none, none, none]
    given[at] = change(given[at])
    call = jax.ffi.ffi_call(
        masked_sums.TARGET,
        (jax.ShapeDtypeStruct((0,), np.float32), jax.ShapeDtypeStruct((1, 2, 8), np.float32)),
    )
    bound = dict(above=np.float32(0), below=np.float32(np.nan))
    with pytest.raises(Exception, match=said):
        jax.block_until_ready(jax.jit(lambda *a: call(*a, **bound))(*given))
