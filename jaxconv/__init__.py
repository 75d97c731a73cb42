"""Convolution for JAX on kernels of its own.

    y = jaxconv.conv(x, w, stride=2, padding="SAME")

Each call is a custom call of a compiled kernel, through XLA's foreign function interface, or XLA's
own convolution where no kernel takes the problem or XLA is predicted to be faster.

Convolutions
    conv                          channels last, one number or one for each axis, groups
    conv_general_dilated          the parameters of ``jax.lax``, here and below
    conv_with_general_padding
    conv_transpose                a data gradient: no zeros are inserted
    conv_general_dilated_patches
    conv_general_dilated_local
    int8                          the module of quantised inference
    winograd                      the module of filters transformed ahead of the calls

A whole program, without a change of its code
    install, uninstall            every convolution of ``jax.lax``, in the process
    override                      in the body of a ``with`` statement, in one thread
    installed                     which of them is in force
    fuse                          a function with batch norm, residual and activation in the calls
    grad, value_and_grad          JAX's, of the fused function

What happens
    explain                       the kernel of each convolution of a function, or why it has none
    Explanation, Convolution      what ``explain`` returns, and its rows
    kernels                       every kernel of this installation, and what it takes
    python -m jaxconv.doctor      what works on this machine
    python -m jaxconv.bench       layers and networks beside lax

With other parts of JAX
    checkpoint_policies           for ``jax.checkpoint``
    export, register              for ``jax.export``
"""

from jaxconv import checkpoint_policies, export, int8, winograd
from jaxconv._src.functions.conv import (
    conv,
    conv_general_dilated,
    conv_transpose,
    conv_with_general_padding,
)
from jaxconv._src.functions.patches import conv_general_dilated_local, conv_general_dilated_patches
from jaxconv._src.fuse.fuse import fuse, grad, value_and_grad
from jaxconv._src.lax.override import install, installed, override, uninstall
from jaxconv._src.report.explain import Convolution, Explanation, explain
from jaxconv._src.report.kernel_table import Kernel, Kernels, kernels
from jaxconv.export import register

__version__ = "0.2.0"

__all__ = [
    "Convolution",
    "Explanation",
    "Kernel",
    "Kernels",
    "checkpoint_policies",
    "conv",
    "conv_general_dilated",
    "conv_general_dilated_local",
    "conv_general_dilated_patches",
    "conv_transpose",
    "conv_with_general_padding",
    "explain",
    "export",
    "fuse",
    "grad",
    "install",
    "installed",
    "int8",
    "kernels",
    "override",
    "register",
    "uninstall",
    "value_and_grad",
    "winograd",
]
