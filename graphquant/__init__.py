"""Quantize the attention and the KV cache of Llama-style models as a torch.export graph pass."""

from graphquant.backends import lower
from graphquant.calibration import Calibration
from graphquant.capture import capture
from graphquant.carrying import carry_caches
from graphquant.config import QuantizationArgs, QuantizationConfig, QuantizationScheme, preset
from graphquant.evaluation import Evaluation, evaluate
from graphquant.graph import find_attention
from graphquant.loops import calibrate, runnable
from graphquant.measuring import Measurement, measure
from graphquant.passes import calibration_of, convert, fold_scales, fuse_decode, pack_gqa, prepare, set_mode, specialize
from graphquant.report import Report, report

__all__ = [
    "Calibration",
    "Evaluation",
    "Measurement",
    "QuantizationArgs",
    "QuantizationConfig",
    "QuantizationScheme",
    "Report",
    "calibrate",
    "calibration_of",
    "capture",
    "carry_caches",
    "convert",
    "evaluate",
    "find_attention",
    "fold_scales",
    "fuse_decode",
    "lower",
    "measure",
    "pack_gqa",
    "prepare",
    "preset",
    "report",
    "runnable",
    "set_mode",
    "specialize",
]
