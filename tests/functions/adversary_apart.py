"""The cases of ``adversary.py`` that run in separate processes: sizes, threads, fresh processes."""

from __future__ import annotations

import functools
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from adversary import Answer, Case, Refused
from adversary_inputs import NHWC, W, X, in_lax, value
from jax import lax

import jaxconv

LARGE = (2**31, 2**40, 2**62)


def zeros(*shape: int) -> Answer:
    return Answer(lambda: np.zeros(shape, np.float32))


def out_of_memory() -> Refused:
    return Refused(jax.errors.JaxRuntimeError, ("RESOURCE_EXHAUSTED", "Out of memory"))


def lowered(x_shape: tuple[int, ...], w_shape: tuple[int, ...], **options: Any) -> tuple[int, ...]:
    """The shape of a result that is too large to compute. The program is only lowered."""
    x, w = (jax.ShapeDtypeStruct(s, np.float32) for s in (x_shape, w_shape))
    return jax.jit(functools.partial(jaxconv.conv, **options)).lower(x, w).out_info.shape


def sizes() -> Iterator[tuple[str, Callable[[], Any], Any]]:
    for n in LARGE:
        counted = n < 2**62
        beyond = value("result", "shape") if counted else value("64 bits")
        beyond_inside = value("padded input", "shape") if counted else value("64 bits")
        yield f"padding {n}", lambda n=n: jaxconv.conv(X, W, padding=n), beyond
        yield (
            f"stride {n}",
            lambda n=n: jaxconv.conv(X, W, stride=n, padding=((1, 1), (0, 1))),
            Answer(first_outputs),
        )
        yield (
            f"dilation {n}",
            lambda n=n: jaxconv.conv(X, W, dilation=n, padding=0),
            zeros(2, 0, 0, 6) if counted else beyond,
        )
        yield (
            f"lhs dilation {n}",
            lambda n=n: jaxconv.conv_transpose(X, W, (n, n), ((0, 0), (0, 0))),
            beyond,
        )
        yield (
            f"padding and stride {n}, im2col",
            lambda n=n: jaxconv.conv(X, W, padding=n, stride=n, algorithm="im2col"),
            beyond_inside,
        )
        yield (
            f"padding and stride {n}",
            lambda n=n: jaxconv.conv(X, W, padding=n, stride=n).shape,
            Answer(lambda: (2, 3, 3, 6)) if counted else beyond,
        )
        yield f"groups {n}", lambda n=n: jaxconv.conv(X, W, groups=n), value("groups", str(n))
        yield (
            f"patches with padding {n}",
            lambda n=n: jaxconv.conv_general_dilated_patches(
                X, (2, 2), (1, 1), [(n, n)] * 2, dimension_numbers=NHWC
            ),
            beyond_inside,
        )
        yield (
            f"a batch of {n}, lowered",
            lambda n=n: lowered((n, 3, 3, 1), (1, 1, 1, 1)),
            Answer(lambda n=n: (n, 3, 3, 1)) if counted else value("result"),
        )
        yield (
            f"a row of {n}, lowered",
            lambda n=n: lowered((1, n, 4), (3, 4, 4), stride=2),
            Answer(lambda n=n: (1, n // 2, 4)) if counted else value("result"),
        )
    yield (
        "dilation 2**62, SAME",
        lambda: jaxconv.conv(X, W, dilation=2**62),
        value("dilation", "64 bits"),
    )
    yield (
        "padding of the most negative number",
        lambda: jaxconv.conv(X, W, padding=-(2**63)),
        value("padding", "crops"),
    )
    yield (
        "more memory than there is",
        lambda: jaxconv.conv(X, W, padding=2**18),
        out_of_memory(),
    )
    yield (
        "more memory than there is, in im2col",
        lambda: jaxconv.conv(X, W, padding=2**18, algorithm="im2col"),
        out_of_memory(),
    )
    yield (
        "dilation 2**31, SAME",
        lambda: jaxconv.conv(X, W, dilation=2**31),
        in_lax(rhs_dilation=(2**31,) * 2),
    )
    yield (
        "a long row",
        lambda: jaxconv.conv(np.ones((1, 2**22, 1), "f"), np.ones((3, 1, 1), "f"), padding=0).sum(),
        Answer(lambda: np.asarray(3.0 * (2**22 - 2), np.float32)),
    )
    yield (
        "a long filter",
        lambda: jaxconv.conv(np.ones((1, 2**12, 1), "f"), np.ones((2**12, 1, 1), "f"), padding=0),
        Answer(lambda: np.full((1, 1, 1), 2.0**12, np.float32)),
    )
    yield (
        "groups of 65536 channels",
        lambda: jaxconv.conv(
            np.ones((1, 2, 2**16), "f"), np.ones((2, 1, 2**16), "f"), groups=2**16, padding=0
        ),
        Answer(lambda: np.full((1, 1, 2**16), 2.0, np.float32)),
    )
    yield (
        "int8 sums that wrap",
        lambda: jaxconv.conv(
            np.full((1, 2**18, 1), -128, np.int8),
            np.full((2**18, 1, 1), -128, np.int8),
            padding=0,
            preferred_element_type=jnp.int32,
        ),
        Answer(lambda: np.full((1, 1, 1), 0, np.int32)),  # 2**18 * 2**14 = 2**32
    )
    for name, x, w in (
        ("no batch", X[:0], W),
        ("no rows", X[:, :0], W),
        ("no channels", X[..., :0], W[:, :, :0]),
        ("no filters", X, W[..., :0]),
        ("no taps", X, W[:0]),
    ):
        yield (
            f"gradients with {name}",
            lambda x=x, w=w: jax.grad(lambda x, w: jnp.sum(jaxconv.conv(x, w)), (0, 1))(x, w),
            Answer(lambda x=x, w=w: (np.zeros_like(x), np.zeros_like(w))),
        )


def first_outputs() -> np.ndarray:
    """The expected result of any stride larger than the input: only the first window."""
    y = lax.conv_general_dilated(X, W, (1, 1), ((1, 1), (0, 1)), dimension_numbers=NHWC)
    return np.asarray(y)[:, :1, :1]


# --- threads and nesting --------------------------------------------------------------------------


def in_threads() -> bool:
    """Eight threads compile and run different shapes while others install and clear caches."""
    wrong: list[Any] = []

    def work(index: int) -> None:
        try:
            for size in range(3, 7):
                x = np.full((1, size + index, size, 2), index + 1, np.float32)
                w = np.ones((2, 2, 2, 3), np.float32)
                y = jax.jit(lambda x, w: jaxconv.conv(x, w, padding=0))(x, w)
                if not (np.asarray(y) == 8 * (index + 1)).all():
                    wrong.append((index, size))
                if index == 0:
                    jax.clear_caches()
                if index == 1:
                    jaxconv.install()
                    jaxconv.uninstall()
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong or True


def nested(depth: int) -> jax.Array:
    f = lambda x: jaxconv.conv(x, W)  # noqa: E731
    x = X
    for _ in range(depth):
        f, x = jax.vmap(f), x[None]
    return f(x).reshape(2, 5, 6, 6)


def derivatives(order: int) -> jax.Array:
    def f(s):
        return jnp.sum(jaxconv.conv(jaxconv.conv(X * s, W), W[:, :, :1].repeat(6, 2) * s))

    for _ in range(order):
        f = jax.grad(f)
    return f(1.0)


def uncompiled() -> jax.Array:
    with jax.disable_jit():
        return jaxconv.conv(X, W)


def without_caches() -> jax.Array:
    first = jaxconv.conv(X, W)
    jax.clear_caches()
    return jaxconv.conv(X, W) - first


# --- processes of their own -----------------------------------------------------------------------

PRELUDE = """
import numpy as np, jax, jaxconv
x, w = np.ones((1, 4, 4, 2), np.float32), np.ones((3, 3, 2, 2), np.float32)
"""


def said(code: str) -> str:
    """The output of a fresh process that runs ``code``."""
    command = [sys.executable, "-c", PRELUDE + code]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{run.returncode}: {run.stderr.strip()}")
    return run.stdout.strip()


LOADER = """
loaded = jax.export.deserialize(bytearray(open({file!r}, "rb").read()))
try:
    loaded.call(x, w)
except jax.errors.JaxRuntimeError as error:
    print("No FFI handler registered for jaxconv_fprop" in str(error))
jaxconv.register()
print(float(loaded.call(x, w)[0, 1, 1, 0]))
"""


def loaded() -> list[str]:
    """Loads an exported program in a fresh process, without and with ``register``."""
    checks = jaxconv.export.disabled_checks()
    x, w = np.ones((1, 4, 4, 2), np.float32), np.ones((3, 3, 2, 2), np.float32)
    blob = jax.export.export(jax.jit(jaxconv.conv), disabled_checks=checks)(x, w).serialize()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "program")
        file.write_bytes(blob)
        return said(LOADER.format(file=str(file))).split()


def with_environment(name: str, text: str) -> jax.Array:
    before = os.environ.get(name)
    os.environ[name] = text
    try:
        return jaxconv.conv(X[:, :3], W)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def apart_cases() -> Iterator[Case]:
    others: list[tuple[str, Callable[[], Any], Any]] = [
        ("eight threads", in_threads, Answer(lambda: True)),
        ("twelve nested vmaps", functools.partial(nested, 12), in_lax()),
        (
            "four derivatives",
            functools.partial(derivatives, 4),
            Answer(lambda: np.zeros((), np.float32)),
        ),
        ("cleared caches", without_caches, zeros(2, 5, 6, 6)),
        (
            "a pickled function",
            lambda: pickle.loads(pickle.dumps(jaxconv.conv))(X, W),
            in_lax(),
        ),
        ("a program loaded", loaded, Answer(lambda: ["True", "18.0"])),
        (
            "JAXCONV_ALGORITHM=nonsense",
            lambda: with_environment("JAXCONV_ALGORITHM", "nonsense"),
            value("JAXCONV_ALGORITHM", "'native'", "'nonsense'"),
        ),
        (
            "the end of a process that computes",
            lambda: said("for _ in range(50): jaxconv.conv(np.ones((4, 64, 64, 2), 'f'), w)"),
            Answer(lambda: ""),
        ),
        ("no compilation", uncompiled, in_lax()),
    ]
    for name, run, expected in [*sizes(), *others]:
        yield Case(f"apart/{name}", run, expected, apart=True)
