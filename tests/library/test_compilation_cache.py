"""JAX's persistent compilation cache and programs on automatic meshes, between processes.

While XLA's partitioner compiles, it asks jaxconv for the program of one device. A process that
finds the program in the cache does not ask, so the key must contain everything that the answer
depends on.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxconv

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

# Prints for each program whether it was in the cache, and its result.
PROCESS = """
import json, sys
import jax
import jax.numpy as jnp
import numpy as np
import jaxconv
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", sys.argv[2] == "flag")

mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2)

def split(array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))

def whole(n):
    return np.arange(n) % 5 - 2

x = split(whole(8 * 6 * 6 * 64).reshape(8, 6, 6, 64).astype(np.float32), "data")
w = split(whole(9 * 64 * 64).reshape(3, 3, 64, 64).astype(np.float32), None, None, None, "model")
xq, wq = (split(np.asarray(a, np.int8), "data" if i == 0 else None) for i, a in enumerate((x, w)))
prepared = jaxconv.winograd.prepare(np.asarray(w), tile="f2x2")

def leaky(slope, **options):
    return lambda x, w: jaxconv.conv(x, w, activation=("leaky_relu", slope), **options)

PROGRAMS = {
    "plain": (jaxconv.conv, x, w),
    "gradient": (jax.grad(lambda w, x: (jaxconv.conv(x, w) ** 2).sum()), w, x),
    "fused": (leaky(0.25), x, w),
    "int8": (lambda x, w: jaxconv.int8.conv(x, w, scale=jnp.full(64, 0.01)), xq, wq),
    "prepared": (jaxconv.conv, x, prepared),
    "another slope": (leaky(0.5), x, w),
    "another padding": (lambda x, w: jaxconv.conv(x, w, padding=((0, 2), (1, 1))), x, w),
    "another algorithm": (leaky(0.25, algorithm="native"), x, w),
}
found = []
listen = jax.monitoring.register_event_listener
listen(lambda event, **_: found.append(event.endswith("cache_hits")))
answers = {}
for name in sys.argv[3:]:
    found.clear()
    function, *operands = PROGRAMS[name]
    compiled = jax.jit(lambda *operands: function(*operands)).lower(*operands).compile()
    hit = any(found)
    answers[name] = hit, float((np.asarray(compiled(*operands), np.float64) ** 2).sum())
print(json.dumps(answers))
"""

SAME = ("plain", "gradient", "fused", "int8", "prepared")
CHANGED = ("another slope", "another padding", "another algorithm")


def run(cache, *programs: str, flag: bool = False, package=REPOSITORY, **environment: str):
    """The programs that a separate process found in a cache, and their results."""
    path = os.pathsep.join([str(package), str(REPOSITORY), *sys.path])
    variables = {
        **{name: v for name, v in os.environ.items() if not name.startswith("JAXCONV_")},
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": path,
        **environment,
    }
    words = [sys.executable, "-P", "-c", PROCESS, str(cache), "flag" if flag else "", *programs]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache filled by one process, and the results of that process."""
    cache = tmp_path_factory.mktemp("cache")
    answers = run(cache, *SAME)
    assert not any(found for found, _ in answers.values())
    return cache, answers


def another_version(folder: pathlib.Path) -> pathlib.Path:
    """A copy of the package with another version number."""
    shutil.copytree(REPOSITORY / "jaxconv", folder / "jaxconv")
    file = folder / "jaxconv" / "__init__.py"
    text = file.read_text()
    assert f'"{jaxconv.__version__}"' in text
    file.write_text(text.replace(f'"{jaxconv.__version__}"', '"99.0"'))
    return folder


def test_another_process_finds_the_same_programs_and_no_other(filled):
    cache, answers = filled
    again = run(cache, *SAME, *CHANGED)
    assert {name: found for name, (found, _) in again.items()} == {
        **dict.fromkeys(SAME, True),
        **dict.fromkeys(CHANGED, False),
    }
    assert {name: again[name][1] for name in SAME} == {n: r for n, (_, r) in answers.items()}


@pytest.mark.parametrize("name", ["JAXCONV_TARGET", "JAXCONV_ALGORITHM"])
def test_settings_are_part_of_the_key(filled, name):
    value = {"JAXCONV_TARGET": "sm_90a", "JAXCONV_ALGORITHM": "native"}[name]
    answers = run(filled[0], *SAME, **{name: value})
    assert not any(found for found, _ in answers.values())


def test_the_version_is_part_of_the_key(filled, tmp_path):
    answers = run(filled[0], *SAME, package=another_version(tmp_path))
    assert not any(found for found, _ in answers.values())


def test_other_kernels_are_part_of_the_key(filled, tmp_path):
    """A process without compiled kernels lowers each device's part to XLA's operations."""
    (tmp_path / "_jaxconv").mkdir()
    (tmp_path / "_jaxconv" / "__init__.py").touch()
    answers = run(filled[0], *SAME, package=tmp_path)
    assert not any(found for found, _ in answers.values())


def test_without_names_of_callbacks_in_the_key(tmp_path):
    """JAX's flag removes the callback's name from the key; its identity remains."""
    assert not any(found for found, _ in run(tmp_path, *SAME, flag=True).values())
    again = run(tmp_path, *SAME, *CHANGED, flag=True)
    assert [name for name, (found, _) in again.items() if found] == list(SAME)
    other = run(tmp_path, *SAME, flag=True, JAXCONV_TARGET="sm_90a")
    assert not any(found for found, _ in other.values())


# --- in one process -------------------------------------------------------------------------------


def operands():
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices("cpu")[:4])
    x = np.arange(4 * 6 * 6 * 4, dtype=np.float32).reshape(4, 6, 6, 4) % 5
    w = np.arange(9 * 4 * 4, dtype=np.float32).reshape(3, 3, 4, 4) % 3
    return jax.device_put(x, NamedSharding(mesh, P("data"))), w, jaxconv.conv(x, w)


def test_a_program_outlives_others_with_the_same_convolution(native_cpu):
    x, w, expected = operands()
    first = jax.jit(lambda x, w: jaxconv.conv(x, w)).lower(x, w)
    second = jax.jit(lambda x, w: jaxconv.conv(x, w)).lower(x, w)
    np.testing.assert_array_equal(second.compile()(x, w), expected)
    del second
    jax.clear_caches()
    gc.collect()
    np.testing.assert_array_equal(first.compile()(x, w), expected)


def test_settings_that_change_before_compilation(native_cpu, monkeypatch):
    """The program's key contains the settings at lowering."""
    x, w, _ = operands()
    lowered = jax.jit(lambda x, w: jaxconv.conv(x, w)).lower(x, w)
    monkeypatch.setenv("JAXCONV_TARGET", "sm_90a")
    with pytest.raises(Exception, match="JAXCONV_TARGET: expected in compilation"):
        lowered.compile()
