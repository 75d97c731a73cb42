"""jaxconv: convolution for JAX on kernels of its own.

    y = jaxconv.conv(x, w, stride=2, padding="SAME")

``conv`` and ``conv_general_dilated`` lower to compiled kernels through XLA's foreign function
interface, and to XLA's own convolution where no kernel takes the problem.
"""

from jaxconv.conv import conv as conv
from jaxconv.conv import conv_general_dilated as conv_general_dilated

__version__ = "0.1.0"
