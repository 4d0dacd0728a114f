"""Dialects: how one quantize/dequantize pair is said in a graph.

``aten`` says everything in plain arithmetic, which every consumer of an ExportedProgram takes and which loads without
any op library. ``pt2e`` says in ``quantized_decomposed`` ops what those say exactly, and the rest in arithmetic:

====================================  ==========================================================
int, one scale                        ``quantize_per_tensor``, scale and zero point as literals
int, scales along one dim             ``quantize_per_channel``
int, scales of a group of channels    ``quantize_per_channel``, the scales spread over channels
int, scales over [H, D]; token; fp8   arithmetic (one axis only; its own formula; rounds to integers)
any, of a float64 or float16 tensor   arithmetic (not taken; Inductor's lowering takes no float16)
====================================  ==========================================================

Both compute what ``numerics.affine`` computes, operation for operation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.ao.quantization.fx._decomposed
from torch.fx import Node

from graphquant.config import QuantizationArgs
from graphquant.errors import ConvertError
from graphquant.numerics import TensorLayout
from graphquant.numerics.affine import DEAD_STEP, SMALLEST_STEP
from graphquant.passes.editor import CallBuilder

aten = torch.ops.aten
decomposed = torch.ops.quantized_decomposed


class Setting(Protocol):
    """How a tensor is quantized, and where its heads and channels lie; a planned site is one."""

    @property
    def args(self) -> QuantizationArgs:
        """Number format and strategy."""

    @property
    def layout(self) -> TensorLayout:
        """Where heads and channels lie."""


class Qparams(NamedTuple):
    """Nodes of a site's scale and zero point, and the values themselves for ops that take literals."""

    scale: Node
    zero_point: Node
    literal: tuple[float, int] | None = None


class Names(NamedTuple):
    """Names of the two nodes that form the pair."""

    quantize: str
    dequantize: str


Emit = Callable[[CallBuilder, Node, Setting, Qparams | None, Names], tuple[Node, Node]]


def emit_aten(call: CallBuilder, x: Node, planned: Setting, qparams: Qparams | None, names: Names) -> tuple[Node, Node]:
    """The pair in plain arithmetic; without qparams they are computed per token in the graph."""
    spread = spread_qparams(call, x, planned, qparams)
    codes = emit_codes(call, x, planned, spread)
    quantized = call(aten._to_copy.default, codes, dtype=planned.args.dtype.storage, name=names.quantize)
    values = call(aten._to_copy.default, quantized, dtype=torch.float32)
    return quantized, emit_values(call, values, spread, x.meta["val"].dtype, names.dequantize)


class Spread(NamedTuple):
    """Scale and zero point in float32 as they broadcast against the tensor; no zero point where adding it is idle."""

    scale: Node
    zero_point: Node | None


def spread_qparams(call: CallBuilder, x: Node, planned: Setting, qparams: Qparams | None) -> Spread:
    """The qparams of ``x``, spread; without constants they are computed per token in the graph."""
    args = planned.args
    # A symmetric zero point of 0 is left out: adding it changes no code.
    shifted = not args.dtype.is_float and not (args.symmetric and args.dtype.symmetric_zero_point == 0)
    if qparams is None:
        return Spread(*_token_qparams(call, _to(call, x, torch.float32), planned, shifted))
    return Spread(
        _expand(call, qparams.scale, planned), _expand(call, qparams.zero_point, planned) if shifted else None
    )


def emit_codes(call: CallBuilder, x: Node, planned: Setting, spread: Spread) -> Node:
    """The codes of ``x``, as float32."""
    dtype = planned.args.dtype
    codes = call(aten.mul.Tensor, _to(call, x, torch.float32), call(aten.reciprocal.default, spread.scale))
    if not dtype.is_float:
        codes = call(aten.round.default, codes)
    if spread.zero_point is not None:
        codes = call(aten.add.Tensor, codes, spread.zero_point)
    return call(aten.clamp.default, codes, dtype.qmin, dtype.qmax)


def emit_values(call: CallBuilder, codes: Node, spread: Spread, dtype: torch.dtype, name: str) -> Node:
    """The real values of float32 ``codes``, in ``dtype``."""
    if spread.zero_point is not None:
        codes = call(aten.sub.Tensor, codes, spread.zero_point)
    if dtype == torch.float32:
        return call(aten.mul.Tensor, codes, spread.scale, name=name)
    return call(aten._to_copy.default, call(aten.mul.Tensor, codes, spread.scale), dtype=dtype, name=name)


@dataclass(frozen=True)
class Decomposed:
    """The pair as quantized_decomposed ops where those are exact, else as ``emit_aten``.

    For compilers that take less: ``per_tensor`` is whether the ops of one scale may be used, ``axes`` are the dims
    along which scales may lie, ``inputs`` the dtypes of what is quantized; ``scale_dtype`` and ``zero_point_dtype``
    are what the ops of several scales are given.
    """

    per_tensor: bool = True
    axes: tuple[int, ...] = (1, 2, 3)
    inputs: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    scale_dtype: torch.dtype = torch.float32
    zero_point_dtype: torch.dtype = torch.int32

    def __call__(
        self, call: CallBuilder, x: Node, planned: Setting, qparams: Qparams | None, names: Names
    ) -> tuple[Node, Node]:
        """Emit the pair."""
        dtype, strategy = planned.args.dtype, planned.args.strategy
        value = x.meta["val"]
        if qparams is None or dtype.is_float or value.dtype not in self.inputs:
            return emit_aten(call, x, planned, qparams, names)
        limits = (int(dtype.qmin), int(dtype.qmax), dtype.storage)
        out = {} if value.dtype == torch.float32 else {"out_dtype": value.dtype}
        if qparams.literal is not None:
            given: tuple[Any, ...] = (*qparams.literal, *limits)
            quantize, dequantize = decomposed.quantize_per_tensor.default, decomposed.dequantize_per_tensor.default
            if not self.per_tensor:
                return emit_aten(call, x, planned, qparams, names)
        else:
            axis = _axis(planned)
            if axis is None or axis not in self.axes:
                return emit_aten(call, x, planned, qparams, names)
            scale, zero_point = (_one_dim(call, _expand(call, node, planned), strategy) for node in qparams[:2])
            scale, zero_point = _to(call, scale, self.scale_dtype), _to(call, zero_point, self.zero_point_dtype)
            given = (scale, zero_point, axis, *limits)
            quantize, dequantize = decomposed.quantize_per_channel.default, decomposed.dequantize_per_channel.default
        quantized = call(quantize, x, *given, name=names.quantize)
        return quantized, call(dequantize, quantized, *given, name=names.dequantize, **out)


emit_pt2e = Decomposed()
DIALECTS: dict[str, Emit] = {"pt2e": emit_pt2e, "aten": emit_aten}


def dialect(name: str) -> Emit:
    """The emitter of a dialect.

    Raises:
        ConvertError: there is no such dialect.
    """
    if name not in DIALECTS:
        raise ConvertError(f"unknown dialect {name!r}; there are {', '.join(DIALECTS)}")
    return DIALECTS[name]


def _axis(planned: Setting) -> int | None:
    """The one dim along which a site's expanded scales vary, or None where they vary along two."""
    _, heads = planned.layout.axes
    if heads is None:
        return 2
    return {"channel": 3, "attn_head": heads}.get(planned.args.strategy)


def _one_dim(call: CallBuilder, param: Node, strategy: str) -> Node:
    """A qparam as the 1-D tensor that per-channel ops take; [H, 1, 1] is kept that way in the state dict."""
    shape = param.meta["val"].shape
    return param if len(shape) == 1 else call(aten.view.default, param, [shape.numel()])


def _expand(call: CallBuilder, param: Node, planned: Setting) -> Node:
    """``expand_qparam`` as view, expand and view of a constant, which any compiler folds."""
    layout, strategy = planned.layout, planned.args.strategy
    if strategy == "group":
        copies = planned.args.group_size or 1
    elif strategy == "attn_head" and layout.kind == "projection":
        copies = layout.head_dim
    else:
        copies = 1
    shape = [int(dim) for dim in param.meta["val"].shape]
    if layout.kind == "states_bshd" and len(shape) == 3:
        shape.pop(1)
        param = call(aten.view.default, param, shape)
    if copies == 1:
        return param
    split = call(aten.view.default, param, [*shape, 1])
    spread = call(aten.expand.default, split, [*shape, copies])
    whole = call(aten.clone.default, spread, memory_format=torch.contiguous_format)
    return call(aten.view.default, whole, [*shape[:-1], shape[-1] * copies])


def _to(call: CallBuilder, x: Node, dtype: torch.dtype) -> Node:
    return x if x.meta["val"].dtype == dtype else call(aten._to_copy.default, x, dtype=dtype)


def _token_qparams(call: CallBuilder, x: Node, planned: Setting, shifted: bool) -> tuple[Node, Node | None]:
    """``numerics.dynamic_qparams`` node for node, the zero point where codes are ``shifted`` by it."""
    dtype, symmetric = planned.args.dtype, planned.args.symmetric
    low = call(aten.clamp.default, call(aten.amin.default, x, [-1], True), None, 0.0)
    high = call(aten.clamp.default, call(aten.amax.default, x, [-1], True), 0.0, None)
    if symmetric:
        extent = call(aten.maximum.default, call(aten.neg.default, low), high)
        raw = call(aten.div.Tensor, extent, dtype.symmetric_bound)
    else:
        half_span = call(aten.sub.Tensor, call(aten.div.Tensor, high, 2.0), call(aten.div.Tensor, low, 2.0))
        raw = call(aten.div.Tensor, half_span, (dtype.qmax - dtype.qmin) / 2)
        extent = call(aten.sub.Tensor, high, low)
    floor = call(aten.clamp.default, raw, SMALLEST_STEP, None)
    dead = call(aten.full_like.default, raw, DEAD_STEP)
    empty = call(aten.eq.Scalar, extent, 0.0)
    scale = call(aten.where.self, empty, dead, floor)
    if symmetric:
        return scale, call(aten.full_like.default, scale, float(dtype.symmetric_zero_point)) if shifted else None
    steps = call(aten.round.default, call(aten.div.Tensor, low, scale))
    code = call(aten.add.Tensor, call(aten.neg.default, steps), dtype.qmin)
    zero_point = call(aten.clamp.default, code, dtype.qmin, dtype.qmax)
    return scale, call(aten.where.self, empty, call(aten.full_like.default, zero_point, 0.0), zero_point)
