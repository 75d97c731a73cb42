"""jaxconv: convolution for JAX on kernels of its own.

    y = jaxconv.conv(x, w, stride=2, padding="SAME")

``conv`` and ``conv_general_dilated`` lower to compiled kernels through XLA's foreign function
interface, and to XLA's own convolution where no kernel takes the problem.
"""

from jaxconv import checkpoint_policies as checkpoint_policies
from jaxconv import export as export
from jaxconv import int8 as int8
from jaxconv._src.conv import conv as conv
from jaxconv._src.conv import conv_general_dilated as conv_general_dilated
from jaxconv._src.conv import conv_transpose as conv_transpose
from jaxconv._src.conv import conv_with_general_padding as conv_with_general_padding
from jaxconv._src.explain import Explanation as Explanation
from jaxconv._src.explain import explain as explain
from jaxconv._src.override import install as install
from jaxconv._src.override import override as override
from jaxconv._src.override import uninstall as uninstall
from jaxconv._src.patches import conv_general_dilated_local as conv_general_dilated_local
from jaxconv._src.patches import conv_general_dilated_patches as conv_general_dilated_patches
from jaxconv.export import register as register

__version__ = "0.1.0"
