"""Quantised inference: int8 convolution with its requantisation in one kernel.

    w1 = int8.pack_filter(w1_q)                      # once
    y = int8.pack(images_q)                          # once
    y = int8.conv(y, w1, scale1, bias1, activation="relu")
    y = int8.conv(y, w2, scale2, bias2, residual=z, residual_scale=s, activation="relu")
    logits = int8.conv(y, w3, scale3, bias3, out_dtype=jnp.float32, data_format="NHWC")

A ``Packed`` array keeps the layout NCHW32 from layer to layer.
"""

from jaxconv._src.functions.int8_conv import conv as conv
from jaxconv._src.functions.quantize import QuantizedConv as QuantizedConv
from jaxconv._src.functions.quantize import calibrate as calibrate
from jaxconv._src.functions.quantize import dequantize as dequantize
from jaxconv._src.functions.quantize import fake_quant_conv as fake_quant_conv
from jaxconv._src.functions.quantize import fake_quantize as fake_quantize
from jaxconv._src.functions.quantize import fold_batch_norm as fold_batch_norm
from jaxconv._src.functions.quantize import max_scale as max_scale
from jaxconv._src.functions.quantize import quantize as quantize
from jaxconv._src.functions.quantize import quantize_conv as quantize_conv
from jaxconv._src.functions.quantize import quantize_weight as quantize_weight
from jaxconv._src.int8.int8_layout import Packed as Packed
from jaxconv._src.int8.int8_layout import PackedFilter as PackedFilter
from jaxconv._src.int8.int8_layout import pack as pack
from jaxconv._src.int8.int8_layout import pack_filter as pack_filter
from jaxconv._src.int8.int8_layout import unpack as unpack
