"""torchao's PT2E flow: a quantizer that annotates attention sites, beside those that annotate linears.

    quantizer = ComposableQuantizer([AttentionQuantizer(config), X86InductorQuantizer()…])
    model = convert_pt2e(prepare_pt2e(program.module(), quantizer))

PT2E's own observers calibrate: they are running min and max like ours, but know no padding mask.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphquant.config import QuantizationArgs, QuantizationConfig
from graphquant.errors import BackendMissingError, StrategyError
from graphquant.graph.finder import find_attention_in
from graphquant.graph.writes import fills
from graphquant.numerics import TensorLayout
from graphquant.passes.placing import readers, refuse_in_place
from graphquant.plan import PlannedSite, check_config, make_plan

try:
    from torchao.quantization.pt2e import MinMaxObserver, PerChannelMinMaxObserver
    from torchao.quantization.pt2e.quantizer import (
        QuantizationAnnotation,
        QuantizationSpec,
        Quantizer,
        SharedQuantizationSpec,
    )
except ImportError as error:
    raise BackendMissingError(
        "graphquant.integrations.torchao needs torchao, which is not installed: pip install 'graphquant[torchao]'"
    ) from error

ANNOTATION = "quantization_annotation"


class AttentionQuantizer(Quantizer):  # type: ignore[misc]
    """Annotates the sites that a config selects, where PT2E can say the strategy: one scale, or scales along one dim.

    Raises:
        ConfigError: the config is no QuantizationConfig.
    """

    def __init__(self, config: QuantizationConfig) -> None:
        super().__init__()
        check_config(config)
        self.config = config

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate every planned site where it is read.

        Raises:
            NoAttentionError, SelectorError: see ``make_plan``.
            StrategyError: a setting that PT2E cannot say, naming the site.
        """
        nodes = {node.name: node for node in model.graph.nodes}
        sites = find_attention_in(model)
        for planned in make_plan(sites, self.config):
            spec, node = _spec(planned), nodes[planned.site.node]
            refuse_in_place(node, planned)
            if fills(node):
                raise StrategyError(
                    f"{planned.site.where} is filled in place after its node, and PT2E observes behind the node: use "
                    "gq.prepare and gq.convert"
                )
            first, *others = readers(node, planned, sites, nodes)
            _read(first, node, spec)
            for reader in others:
                _read(reader, node, SharedQuantizationSpec((node, first)))
        return model

    def validate(self, model: GraphModule) -> None:
        """Nothing to check: a setting that cannot be said is refused by ``annotate``."""


def _read(reader: Node, node: Node, spec: Any) -> None:
    """Annotate one reader's input, beside what it has been annotated with.

    The readers and not the node itself: a linear whose output is a site stays free for a quantizer of linears.
    """
    annotation = reader.meta.setdefault(ANNOTATION, QuantizationAnnotation(_annotated=True))
    annotation.input_qspec_map[node] = spec


def _spec(planned: PlannedSite) -> Any:
    """What PT2E is to know of a site: dtype, range, scheme, and the dim along which scales lie."""
    args, axis = planned.args, channel_axis(planned.args, planned.layout)
    if planned.layout.kind == "features":
        raise StrategyError(
            f"{planned.site.where}: the input of a linear is for a quantizer of linears to annotate: leave it out here"
        )
    if axis is None and args.strategy != "tensor":
        raise StrategyError(
            f"{planned.site.where}: PT2E has one scale or scales along one dim, which {args.summary()} at "
            f"{planned.layout.dims} is not: use gq.prepare and gq.convert, or tensor, channel or attn_head at states"
        )
    if args.type != "int":
        raise StrategyError(f"{planned.site.where}: PT2E's observers make int scales, not {args.summary()}: use int")
    if args.observer != "minmax":
        raise StrategyError(f"{planned.site.where}: PT2E brings its own min/max observer, not {args.observer!r}")
    schemes = {
        (True, True): torch.per_tensor_symmetric,
        (True, False): torch.per_tensor_affine,
        (False, True): torch.per_channel_symmetric,
        (False, False): torch.per_channel_affine,
    }
    observer = MinMaxObserver if axis is None else PerChannelMinMaxObserver
    return QuantizationSpec(
        dtype=args.dtype.storage,
        quant_min=int(args.dtype.qmin),
        quant_max=int(args.dtype.qmax),
        qscheme=schemes[axis is None, args.symmetric],
        ch_axis=axis,
        observer_or_fake_quant_ctr=observer,
    )


def channel_axis(args: QuantizationArgs, layout: TensorLayout) -> int | None:
    """The one dim along which a setting has scales, None where it has one scale or scales over two dims."""
    _, heads = layout.axes
    if args.strategy == "channel" or (args.strategy == "attn_head_channel" and heads is None):
        return 2 if heads is None else 3
    return heads if args.strategy == "attn_head" else None
