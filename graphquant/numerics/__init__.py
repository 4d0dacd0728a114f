"""Tensors only: number formats, scale shapes, affine arithmetic, error metrics."""

from graphquant.numerics.affine import (
    dequantize,
    dynamic_qparams,
    fake_quantize,
    qparams_from_range,
    quantize,
)
from graphquant.numerics.dtypes import QuantDtype, quant_dtype
from graphquant.numerics.metrics import ErrorSums
from graphquant.numerics.strategies import (
    STRATEGIES,
    TensorLayout,
    check_strategy,
    expand_qparam,
    reduce_stat,
    scale_shape,
)

__all__ = [
    "STRATEGIES",
    "ErrorSums",
    "QuantDtype",
    "TensorLayout",
    "check_strategy",
    "dequantize",
    "dynamic_qparams",
    "expand_qparam",
    "fake_quantize",
    "qparams_from_range",
    "quant_dtype",
    "quantize",
    "reduce_stat",
    "scale_shape",
]
