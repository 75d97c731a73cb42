"""The primitive normalise_add: its operations in JAX and its CUDA kernel agree exactly.

``test_emulated_kernels`` runs the kernel without a GPU.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxconv._src.passes import masked_sums, normalise_add
from jaxconv._src.passes.normalise_add import BlockEnd

FORMS = {
    "shortcut": BlockEnd(1, None),
    "shortcut, bounded": BlockEnd(1, 6.0),
    "two arrays": BlockEnd(2, None),
    "two arrays, bounded": BlockEnd(2, 6.0),
}
# Fewer rows than a CTA has, rows that are no multiple of its steps, a partial last slice of
# channels.
SHAPES = [(3, 5, 7, 8), (700, 72), (4, 4, 4, 64), (5, 3, 3, 264), (2, 7, 7, 2048), (3, 31, 17, 536)]


def drawn(form: BlockEnd, shape: tuple[int, ...], dtype, largest: int = 3) -> list[jax.Array]:
    """Integer operands, with scales up to ``largest`` and a NaN in the first array."""
    rng = np.random.default_rng(0)

    def integers(*shape: int, dtype=np.float32, most: int = 3):
        return jnp.asarray(rng.integers(-most, most + 1, shape), dtype)

    arrays = [integers(*shape, dtype=dtype) for _ in range(2)]
    arrays[0] = arrays[0].at[(0,) * len(shape)].set(np.nan)
    vectors = [integers(shape[-1], most=m) for m in (3, largest, largest)[:3] * form.arrays]
    return [*arrays, *vectors]


def defined(operands, form: BlockEnd) -> list[np.ndarray]:
    """The results by definition: float64, rounded where the definition rounds."""
    dtype = operands[0].dtype
    first, second, *vectors = (np.asarray(o, np.float64) for o in operands)

    def rounded(x):
        return x.astype(np.float32).astype(dtype).astype(np.float64)

    def normalised(y, mean, scale, offset):
        return rounded((y - mean) * scale + offset)

    other = normalised(second, *vectors[3:]) if form.arrays == 2 else second
    total = rounded(normalised(first, *vectors[:3]) + other)
    result = np.clip(total, 0, form.below)  # keeps NaN
    inside = (result > 0) & (True if form.below is None else result < form.below)
    return [result, np.packbits(inside, axis=-1, bitorder="little")]


def assert_equal(actual, expected) -> None:
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(e, np.float64))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float32])
@pytest.mark.parametrize("name", FORMS)
def test_operations_of_jax(name, dtype):
    form = FORMS[name]
    operands = drawn(form, (2, 3, 5, 24), dtype)
    bind = functools.partial(normalise_add.normalise_add, form=form)
    with jax.default_device(jax.devices("cpu")[0]):
        found = bind(*operands)
        assert_equal(found, defined(operands, form))
        assert [(a.dtype, a.shape) for a in found] == [
            (dtype, (2, 3, 5, 24)),
            (np.uint8, (2, 3, 5, 3)),
        ]
        assert np.isnan(np.asarray(found[0], np.float32)).sum() == 1
        assert_equal(jax.jit(bind)(*operands), defined(operands, form))
        mapped = jax.vmap(bind, in_axes=(1, *[None] * (len(operands) - 1)))
        stacked = jnp.stack([operands[0], -operands[0]], 1)
        assert_equal(
            [r[1] for r in mapped(stacked, *operands[1:])],
            defined([-operands[0], *operands[1:]], form),
        )


@pytest.mark.parametrize("name", FORMS)
def test_derivative(name):
    """Equals the activation's derivative inside its bounds; bits have no derivative."""
    form = FORMS[name]
    operands = drawn(form, (4, 6, 8), jnp.float16)
    operands[0] = jnp.nan_to_num(operands[0])
    tangents = drawn(form, (4, 6, 8), jnp.float16)
    tangents[0] = jnp.nan_to_num(tangents[0])
    bind = functools.partial(normalise_add.normalise_add, form=form)

    def program(first, second, mean, scale, offset, *of_second):
        def normalised(y, mean, scale, offset):
            return ((y.astype(np.float32) - mean) * scale + offset).astype(y.dtype)

        other = normalised(second, *of_second) if of_second else second
        total = normalised(first, mean, scale, offset) + other
        upper = jnp.inf if form.below is None else form.below
        return jnp.where((total > 0) & (total < upper), total, jnp.clip(total, 0, upper) * 0)

    with jax.default_device(jax.devices("cpu")[0]):
        primals, (tangent, of_bits) = jax.jvp(bind, operands, tangents)
        assert_equal(primals, defined(operands, form))
        assert of_bits.dtype == jax.dtypes.float0
        assert_equal([tangent], [jax.jvp(program, operands, tangents)[1]])
        _, pull = jax.vjp(lambda *a: bind(*a)[0], *operands)
        _, pull_of_program = jax.vjp(program, *operands)
        assert_equal(pull(tangents[1]), pull_of_program(tangents[1]))


@pytest.mark.parametrize(
    "form, shape, dtype",
    [
        (FORMS["shortcut"], (4, 12), jnp.bfloat16),
        (FORMS["shortcut"], (4, 8), np.float64),
        (FORMS["shortcut"], (0, 8), jnp.bfloat16),
        (BlockEnd(3, None), (4, 8), jnp.bfloat16),
        (BlockEnd(1, 0.1), (4, 8), jnp.bfloat16),  # bfloat16 does not represent 0.1
    ],
)
def test_what_the_kernel_does_not_take(form, shape, dtype):
    assert not normalise_add.accepts(form, shape, np.dtype(dtype))


def test_lowering_for_a_gpu(cuda_calls):
    """One call; under vmap, and if XLA partitions the program, operations of JAX."""
    array, vector, absent = "tensor<4x6x24xbf16>", "tensor<24xf32>", "tensor<0xf32>"
    for name, expected in (
        ("shortcut, bounded", [array, absent, array, *[vector, absent] * 3]),
        ("two arrays", [array, array, absent, *[vector] * 6]),
    ):
        operands = drawn(FORMS[name], (4, 6, 24), jnp.bfloat16)
        bind = functools.partial(normalise_add.normalise_add, form=FORMS[name])

        def lowered(function, *operands):
            return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()

        ((types, results),) = re.findall(
            r"custom_call @jaxconv_normalise_add.* : \((.*)\) -> \((.*)\)", lowered(bind, *operands)
        )
        assert types.split(", ") == expected
        assert results.split(", ") == [array, "tensor<4x6x3xui8>"]
        several = [jnp.stack([o, o]) for o in operands]
        assert "custom_call @jaxconv" not in lowered(jax.vmap(bind), *several)
        explicit = (jax.sharding.AxisType.Explicit,)
        mesh = jax.make_mesh((2,), ("d",), explicit, devices=jax.devices("cpu")[:2])
        split = [jax.device_put(o, NamedSharding(mesh, P())) for o in operands]
        assert lowered(bind, *split).count("custom_call @jaxconv") == 1  # the call of each device


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_kernel(name, shape):
    """Exact where it rounds twice; the sums by its bits equal those by its result."""
    form = FORMS[name]
    dtype = (jnp.bfloat16, jnp.float16, np.float32)[(len(shape) + len(name)) % 3]
    assert normalise_add.accepts(form, shape, np.dtype(dtype))
    bind = jax.jit(functools.partial(normalise_add.normalise_add, form=form))
    operands = drawn(form, shape, dtype, 300)
    target = f'custom_call_target="{normalise_add.TARGET}"'
    assert target in bind.lower(*operands).compile().as_text()
    result, bits = bind(*operands)
    assert_equal([result, bits], defined(operands, form))
    y, gradient, mean = operands[1], -operands[1], operands[2]

    def summed(masked_by, told):
        of = masked_sums.Sums(1, 1, masked_by, True, 0.0, form.below)
        return jax.jit(functools.partial(masked_sums.masked_sums, form=of))(gradient, y, mean, told)

    assert_equal(summed("bits", bits), summed("result", result))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "at, change, said",
    [
        (1, lambda a: jnp.ones((4, 8), jnp.bfloat16), "shortcut: expected no elements"),
        (2, lambda a: a.astype(np.float32), "shortcut: expected dtype"),
        (3, lambda a: a[:-1], "mean: expected shape"),
        (6, lambda a: jnp.ones(8), "scale2: expected no elements"),
    ],
)
def test_a_handler_names_the_buffer_that_does_not_match(at, change, said, registered_cuda_kernels):
    none = jnp.zeros(0)
    array, vector = jnp.ones((4, 8), jnp.bfloat16), jnp.ones(8)
    given = [array, none, array, vector, none, vector, none, vector, none]
    given[at] = change(given[at])
    call = jax.ffi.ffi_call(
        normalise_add.TARGET,
        (jax.ShapeDtypeStruct((4, 8), jnp.bfloat16), jax.ShapeDtypeStruct((4, 1), np.uint8)),
    )
    with pytest.raises(Exception, match=said):
        jax.block_until_ready(jax.jit(lambda *a: call(*a, below=np.float32(np.nan)))(*given))
