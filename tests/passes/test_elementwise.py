"""The primitive elementwise: its operations in JAX and its CUDA kernel.

``test_emulated_kernels`` runs the kernel without a GPU.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxconv._src.passes import elementwise
from jaxconv._src.passes.elementwise import Function, Result

CONVERTS = Function(1, (), ())
# gain * rsqrt(variance + 1e-3), offset - mean * scale
SCALE = Function(2, (1e-3,), (("add", (1, 2)), ("rsqrt", (3,)), ("mul", (0, 4))))
BIAS = Function(3, (), (("mul", (1, 2)), ("sub", (0, 3))))
ROUNDS = Function(2, (), (("bfloat16", (0,)), ("div", (2, 1)), ("neg", (3,))))

BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
RESULTS = (
    Result(CONVERTS, (0,), (3, 3, 8, 40), BF16),
    Result(SCALE, (1, 2), (40,), F32),
    Result(BIAS, (3, 4, 2), (1, 40), F32),
    Result(ROUNDS, (1, 5), (40,), np.dtype(np.float16)),
)


def operands() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    vectors = [1 + rng.random(40) for _ in range(4)]
    shapes = [rng.standard_normal((3, 3, 8, 40)), *vectors, np.asarray([3.0])]
    return [jnp.asarray(a, np.float32) for a in shapes]


def expected(given) -> list[np.ndarray]:
    w, gain, variance, offset, mean, three = (np.asarray(o, np.float64) for o in given)
    rounded = np.asarray(jnp.asarray(gain, jnp.bfloat16), np.float64)
    scale = gain / np.sqrt(variance + 1e-3)
    return [w, scale, (offset - mean * variance)[None], -rounded / three]


def assert_close(found, given) -> None:
    for actual, wanted, result in zip(found, expected(given), RESULTS, strict=True):
        assert (actual.shape, actual.dtype) == (result.shape, result.dtype)
        ulp = 2 * float(jnp.finfo(result.dtype).eps)
        np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, rtol=ulp, atol=1e-6)


def bound(*given: jax.Array) -> list[jax.Array]:
    return elementwise.elementwise(*given, results=RESULTS)


@pytest.fixture
def on_a_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def test_operations_of_jax(on_a_cpu):
    given = operands()
    assert_close(bound(*given), given)
    axes = (None, 0, None, None, None, None)
    gains = jnp.stack([given[1], 2 * given[1]])
    mapped = jax.vmap(bound, axes)(given[0], gains, *given[2:])
    second = [m[1] for m in mapped]
    assert_close(second, [given[0], 2 * given[1], *given[2:]])


def test_derivative(on_a_cpu):
    given = operands()
    ours, plain = (
        functools.partial(function, results=RESULTS[1:])
        for function in (elementwise.elementwise, elementwise.in_jax)
    )

    tangents = [jnp.ones_like(o) for o in given]
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, jax.jvp(ours, given, tangents), jax.jvp(plain, given, tangents))
    cts = [jnp.ones(r.shape, r.dtype) for r in RESULTS[1:]]
    jax.tree.map(close, jax.vjp(ours, *given)[1](cts), jax.vjp(plain, *given)[1](cts))


def test_a_filters_gradient_is_converted_back(on_a_cpu):
    def loss(w):
        (narrow,) = elementwise.elementwise(w, results=RESULTS[:1])
        return narrow.astype(np.float32).sum()

    found = jax.grad(loss)(operands()[0])
    assert found.dtype == np.float32 and (np.asarray(found) == 1).all()


@pytest.mark.gpu
def test_kernel():
    given = operands()
    function = jax.jit(bound)
    text = function.lower(*given).compile().as_text()
    assert text.count('custom_call_target="jaxconv_elementwise"') == 1
    assert_close(function(*given), given)


@pytest.mark.gpu
def test_kernel_of_the_most_results():
    arrays = [jnp.full((7 + i,), i / 3, np.float32) for i in range(elementwise.MOST_RESULTS)]
    results = tuple(Result(CONVERTS, (i,), a.shape, BF16) for i, a in enumerate(arrays))
    function = jax.jit(lambda *given: elementwise.elementwise(*given, results=results))
    for actual, array in zip(function(*arrays), arrays, strict=True):
        np.testing.assert_array_equal(actual, array.astype(BF16))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "functions, results",
    [
        ([1, 0, 0], [0, 1]),  # an operand that the call lacks
        ([1, 0, 1, 0, 0, 1], [0, 0]),  # a step that reads itself
        ([7, 0, 0], [0, 0]),
        ([1, 0, 1, 99, 0, 0], [0, 0]),
        ([1, 0], [0, 0]),
        ([1, 0, 0], [0, 0, 0]),
    ],
)
def test_functions_that_the_handler_refuses(functions, results, registered_cuda_kernels):
    call = jax.ffi.ffi_call(elementwise.TARGET, [jax.ShapeDtypeStruct((4,), BF16)])
    attributes = dict(
        functions=np.asarray(functions, np.int64), results=np.asarray(results, np.int64)
    )
    with pytest.raises(Exception, match="describe no elementwise functions"):
        jax.block_until_ready(jax.jit(lambda a: call(a, **attributes))(jnp.ones(4)))
