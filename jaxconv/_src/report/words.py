"""Translates the reasons of ``fuse``, which name JAX's primitives, into plain words."""

from __future__ import annotations

import re

from jaxconv._src.call.record import Convolution

_WORDS = {
    "add": "add",
    "add_any": "add",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "neg": "negate",
    "max": "maximum",
    "min": "minimum",
    "clamp": "clip",
    "select_n": "where",
    "logistic": "sigmoid",
    "integer_pow": "power",
    "pow": "power",
    "rsqrt": "1 / sqrt",
    "reduce_sum": "sum",
    "reduce_max": "largest element",
    "reduce_min": "smallest element",
    "argmax": "argmax",
    "dot_general": "matrix product",
    "conv_general_dilated": "convolution",
    "reduce_window_max": "max pooling",
    "reduce_window_sum": "average pooling",
    "select_and_scatter_add": "gradient of max pooling",
    "concatenate": "concatenate",
    "convert_element_type": "conversion",
    "broadcast_in_dim": "broadcast",
    "dynamic_slice": "slice",
    "gather": "indexing",
    "rev": "reversal",
    "psum": "sum over devices",
    "custom_jvp_call": "function with its own derivative",
    "custom_vjp_call": "function with its own derivative",
    "while": "loop",
    "scan": "loop",
    "cond": "branch",
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), "comparison"),
}
_NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")

# The reason of ``fuse_program`` before a batch norm whose statistics the call returns.
_STATISTICS = "what follows takes the statistics of the whole result"

# The text for whole reasons, other than lists of readers.
_SAID = {
    "its result is returned and used": "the function returns it, too",
    "it is computed as dgrad, which has no epilogue": "transposed convolutions have no epilogue",
}
_READERS = re.compile(r"its result has (\d+) uses \((.*)\)")
_PARTS = {
    "that is no vector of channels": "of more than one number a channel",
    "neither a vector of channels nor": "neither one number a channel nor",
}


def in_words(reason: str) -> str:
    """A reason why a chain ends, ``Convolution.chain_end``, without names of primitives."""
    if found := _READERS.fullmatch(reason):
        count = int(found[1])
        number = _NUMBERS[count - 2] if 2 <= count < 2 + len(_NUMBERS) else str(count)
        names = dict.fromkeys(_word(name) for name in found[2].split(", "))
        return f"{number} readers: {', '.join(names)}"
    if reason in _SAID:
        return _SAID[reason]
    for part, words in _PARTS.items():
        reason = reason.replace(part, words)
    name, follows, rest = reason.partition(" ")
    if name in _WORDS or rest == "follows":
        name = _word(name)
    return f"{name}{follows}{rest}"


def _word(name: str) -> str:
    if name.startswith("jaxconv_"):
        return "convolution"
    return _WORDS.get(name, name.replace("_", " "))


def misses(convolution: Convolution) -> bool:
    """Whether an operation after a convolution could be part of its call, but is not."""
    served = convolution.chain_end == _STATISTICS and "statistics" in convolution.epilogue
    return bool(convolution.chain_end) and not served
