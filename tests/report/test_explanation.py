"""``Explanation`` as text, and the reasons that ``fuse`` gives."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxconv
from jaxconv._src.library.native import Refusal
from jaxconv._src.report.words import in_words

NHWC = ("NHWC", "HWIO", "NHWC")
X = np.zeros((2, 8, 8, 4), np.float32)
W = np.zeros((3, 3, 4, 4), np.float32)
VECTOR = np.ones(4, np.float32)


def conv(x, w=W):
    w = w.astype(x.dtype)
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)


def explained(function, *args):
    """The explanation of ``fuse(function)``, with kernels."""
    with jaxconv.override():
        return jaxconv.explain(jaxconv.fuse(function), *(args or (X,)))


def row(**fields) -> jaxconv.Convolution:
    """A convolution with typical fields, and with ``fields`` replaced."""
    given = dict(
        op="fprop",
        operands=("bf16[256,112,112,64]", "bf16[3,3,64,64]"),
        result="bf16[256,112,112,64]",
        platform="cuda",
        problem="fprop bf16:bf16:bf16",
        precision="default",
        instance="fprop_igemm_wgmma_bf16_128x256x64_cooperative_split_k_filter_row",
        microseconds=1234.5,
        xla_microseconds=12345.6,
        workspace_bytes=0,
        flops=10**9,
        bytes=10**6,
        refusals=(),
        source="/home/someone/models/resnet.py:123 (Bottleneck.__call__)",
    )
    return jaxconv.Convolution(**{**given, **fields})


# --- the table ---


def test_no_line_is_longer_than_100_columns():
    rows = [
        row(),
        row(epilogue="scale bias residual leaky_relu:0x1.333334p-2 pre statistics", count=999),
        row(operands=("f32[128,128,128,128,1024]", "f32[27,27,27,1024,1024]"), precision="highest"),
        row(module="ResNet50/Stage_3/Block_12/ProjectionShortcut/Conv_0/" * 3),
        row(instance=None, refusals=tuple(Refusal(f"kernel_{i}", "because " * 40) for i in "abcd")),
        row(chain_end="its result has 7 uses (concatenate, conv_general_dilated, group norm, mul)"),
        *(row(source=f"file.py:{i}", chain_end=f"reason {i} " * 30) for i in range(12)),
    ]
    lines = str(jaxconv.Explanation(tuple(rows))).splitlines()
    assert max(map(len, lines)) <= 100
    assert any(
        len(line) > 100 for line in jaxconv.Explanation(tuple(rows)).text(wide=True).splitlines()
    )


def test_rows_that_show_the_same_are_one():
    same = [row(source=f"/a/net.py:{i} (f)", module=f"Block_{i}") for i in range(3)]
    text = str(jaxconv.Explanation((*same, row(count=2), row(op="wgrad"))))
    assert "  1      5  fprop  bf16[256,112,112,64], [3,3,64,64] -> [256,112,112,64]" in text
    assert "  2      1  wgrad" in text and "\n  3 " not in text
    assert "Block_0 net.py:0 (f) and 3 more" in text
    assert "83.3%" in text and "16.7%" in text
    wide = jaxconv.Explanation((*same, row(count=2), row(op="wgrad"))).text(wide=True)
    assert len([line for line in wide.splitlines() if "_filter_row" in line]) == 5


def test_wide_from_explain(native_cpu):
    with jax.default_device(jax.devices("cpu")[0]):
        found = jaxconv.explain(jaxconv.conv, X, W, wide=True)
    header = str(found).splitlines()[2].split("  ")
    assert [c.strip() for c in header if c] == [
        *("row", "count", "op", "operands", "result", "precision", "kernel", "us", "XLA us"),
        *("workspace MB", "GFLOP", "share", "MB", "source"),
    ]
    assert str(dataclasses.replace(found, wide=False)) == found.text() != str(found)


def test_a_reason_is_told_once_with_its_kernels_and_rows():
    kernels = ("few_channels", "igemm_simt", "igemm_wmma", "igemm_wgmma", "depthwise")
    refusals = tuple(Refusal(kernel, "9 spatial axes") for kernel in kernels)
    rows = [row(instance=None, refusals=refusals, result=f"f32[{i}]") for i in range(3)]
    text = str(jaxconv.Explanation((*rows, row(), row(instance=None, refusals=refusals))))
    assert text.splitlines()[-2:] == [
        "left to XLA:",
        "     4  few_channels, igemm_simt and 3 more: 9 spatial axes (rows 1-3, 5)",
    ]
    wide = jaxconv.Explanation(tuple(rows)).text(wide=True)
    assert f"     3  {', '.join(kernels)}: 9 spatial axes (rows 1-3)" in wide


def test_the_reason_of_a_part_of_a_row():
    rows = (row(count=3), row(chain_end="group norm follows", count=2))
    text = str(jaxconv.Explanation(rows))
    assert "  1      5  fprop" in text and "not fused:\n     2  group norm follows (row 1)" in text


# --- the summary ---

CARRIED = "convolutions carry what follows them"


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([row(epilogue="bias")], "1 of 1 convolution carries what follows it"),
        ([row(epilogue="bias", count=52), row()], f"52 of 52 {CARRIED}"),
        (
            [row(epilogue="bias", count=52), row(chain_end="group norm follows")],
            f"52 of 53 {CARRIED}; 1 does not: group norm follows",
        ),
        (
            [
                row(epilogue="bias", chain_end="group norm follows"),
                row(chain_end="its result has 2 uses (mean, select_n)", count=2),
                row(chain_end="elu follows"),
            ],
            f"1 of 4 {CARRIED}, 1 in part; 3 do not: 2 two readers: mean, where, 1 elu follows",
        ),
        ([row(apart=(Refusal("all", "no"),)), row(epilogue="bias")], f"2 of 2 {CARRIED}"),
    ],
)
def test_the_summary_of_what_is_fused(rows, line):
    summary = str(jaxconv.Explanation(tuple(rows))).partition("\n\n")[0]
    assert " ".join(summary.split()).endswith(f"GFLOP {line}")


def test_a_program_that_is_not_fused_has_no_such_summary():
    assert "carr" not in str(jaxconv.Explanation((row(),)))


# --- reasons ---


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("its result has 2 uses (mean, mul)", "two readers: mean, multiply"),
        ("its result has 12 uses (add, gt, lt)", "12 readers: add, comparison"),
        (
            "its result has 3 uses (conv_general_dilated, group norm)",
            "three readers: convolution, group norm",
        ),
        ("group norm follows", "group norm follows"),
        ("select_n follows", "where follows"),
        ("dynamic_update_slice follows", "dynamic update slice follows"),
        ("add follows the activation", "add follows the activation"),
        (
            "mul with an array that is no vector of channels follows",
            "multiply with an array of more than one number a channel follows",
        ),
        ("its result is returned and used", "the function returns it, too"),
        (
            "fprop_onednn_f32 is predicted to take 2.0 us",
            "fprop_onednn_f32 is predicted to take 2.0 us",
        ),
    ],
)
def test_words(reason, words):
    assert in_words(reason) == words


def normalised(y, axes, statistics=lax.rsqrt):
    mean = y.mean(axes, keepdims=True)
    return (y - mean) * statistics(((y - mean) ** 2).mean(axes, keepdims=True) + 1e-5)


def of_squares(y, axes):
    mean, squares = y.mean(axes, keepdims=True), (y * y).mean(axes, keepdims=True)
    return (y - mean) / jnp.sqrt(squares - mean * mean + 1e-5)


def group_norm(y, norm=normalised):
    groups = y.reshape(*y.shape[:-1], 2, y.shape[-1] // 2)
    return norm(groups, (1, 2, 4)).reshape(y.shape)


def squeeze_excite(y):
    return y * jax.nn.sigmoid(y.mean((1, 2)) @ np.ones((4, 4), np.float32))[:, None, None]


READERS = {
    "group norm": (lambda x: group_norm(conv(x)), "group norm follows"),
    "group norm of squares": (lambda x: group_norm(conv(x), of_squares), "group norm follows"),
    "group norm behind a bias": (lambda x: group_norm(conv(x) + VECTOR), "group norm follows"),
    "layer norm": (lambda x: normalised(conv(x), -1), "layer norm follows"),
    "instance norm": (lambda x: of_squares(conv(x), (1, 2)), "instance norm follows"),
    "squeeze and excitation": (
        lambda x: squeeze_excite(conv(x)),
        "squeeze and excitation follows",
    ),
    "a norm and a shortcut": (
        lambda x: (y := conv(x)) + jnp.cos(group_norm(y)),
        "its result has 2 uses (add, group norm)",
    ),
    "a mean and a product": (
        lambda x: (y := conv(x)) * y.mean(),
        "its result has 2 uses (mean, mul)",
    ),
    "another function": (lambda x: jnp.cbrt(conv(x)), "cbrt follows"),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("images", [1, 2])
def test_readers_are_named(name, images, native_cpu):
    function, reason = READERS[name]
    if (name, images) == ("instance norm", 1):
        pytest.skip("it is batch norm")
    (c,) = explained(function, X[:images])
    assert c.chain_end == reason
    assert jaxconv.Explanation((c,)).missed == (c,)


@pytest.mark.parametrize("name", ["group norm", "group norm of squares", "layer norm"])
def test_a_norm_is_one_reader_in_a_training_step_too(name, native_cpu):
    function, reason = READERS[name]
    gradients = jax.grad(lambda w, x: (function(x) * jnp.cos(conv(x, w))).sum())
    assert reason in [c.chain_end for c in explained(gradients, W, X)]


def logits_and_loss(x, w):
    logits = conv(x, w)
    return -jax.nn.log_softmax(logits)[..., 0].mean()


NOTHING_TO_GAIN = {
    "its result is returned": conv,
    "its result is stored in another type": lambda x: conv(x.astype(jnp.bfloat16)).astype(
        jnp.float32
    ),
    "another convolution reads it": lambda x: conv(conv(x)),
    "two convolutions read it": lambda x: [conv(y, W) for y in [conv(x)] * 2],
    "pooling reads it": lambda x: lax.reduce_window(
        conv(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    ),
    "a mean reads it": lambda x: conv(x).mean((1, 2)),
    "a matrix product reads it": lambda x: conv(x) @ np.ones((4, 3), np.float32),
    "the residual of another": lambda x: jax.nn.relu(conv(x) + conv(x, -W)),
    "the logits": lambda x: logits_and_loss(x, W),
    "the logits of a training step": jax.grad(lambda x: logits_and_loss(x, W)),
    "nobody reads it": lambda x: (conv(x), x)[1] + 1,
    "int8": lambda x: conv(x.astype(jnp.int8), W.astype(jnp.int8)),
}


@pytest.mark.parametrize("name", NOTHING_TO_GAIN)
def test_nothing_to_gain_is_no_miss(name, native_cpu):
    found = explained(NOTHING_TO_GAIN[name])
    assert not found.missed, str(found)
    assert "not fused" not in str(found) and "do not" not in str(found)


def test_batch_norm_in_training_is_served(native_cpu):
    def train(x):
        y = conv(x)
        mean = y.mean((0, 1, 2))
        variance = (y * y).mean((0, 1, 2)) - mean * mean
        return jax.nn.relu((y - mean) * lax.rsqrt(variance + 1e-5) * VECTOR)

    found = explained(train)
    assert found[0].epilogue == "statistics" and not found.missed
    assert "1 of 1 convolution carries what follows it" in str(found)
