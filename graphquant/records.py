"""What a converted program says about itself: one record on each dequantize node's ``meta["custom"]``.

torch.export saves that field with the program, so a report needs nothing but the program, also after loading.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from graphquant.config import QuantizationArgs
from graphquant.errors import ConvertError
from graphquant.numerics import TensorLayout
from graphquant.numerics.strategies import LayoutKind
from graphquant.plan import PlannedSite

RECORD = "graphquant"


@dataclass(frozen=True, kw_only=True)
class SiteRecord:
    """One quantized tensor of a converted program; ``node`` is the tensor that was quantized.

    ``stored`` is the cache that holds its codes, in words, where one does.
    """

    site: str
    also: tuple[str, ...]
    layer: int
    module: str
    node: str
    dims: str
    layout: tuple[str, int, int]
    args: Mapping[str, Any]
    scale_shape: str
    amax: float | None
    coverage: Mapping[str, int] | None
    stored: str | None = None

    @classmethod
    def of(
        cls,
        planned: PlannedSite,
        amax: float | None,
        coverage: Mapping[str, int] | None,
        stored: str | None = None,
    ) -> "SiteRecord":
        """The record of a planned site, with the amax that calibration saw."""
        layout = planned.layout
        return cls(
            site=planned.key,
            also=planned.keys[1:],
            layer=planned.site.layer,
            module=planned.site.module,
            node=planned.site.node,
            dims=layout.dims,
            layout=(layout.kind, layout.heads, layout.head_dim),
            args=planned.args.to_dict(),
            scale_shape=planned.scale_shape,
            amax=amax,
            coverage=coverage,
            stored=stored,
        )

    @property
    def quantization_args(self) -> QuantizationArgs:
        """The arguments as a value."""
        return QuantizationArgs.from_dict(dict(self.args))

    @property
    def tensor_layout(self) -> TensorLayout:
        """The layout as a value."""
        kind, heads, head_dim = self.layout
        return TensorLayout(cast(LayoutKind, kind), heads, head_dim)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "SiteRecord":
        """Read ``to_dict``'s form, extra keys left out."""
        fields = {name: data[name] for name in cls.__dataclass_fields__ if name in data or name != "stored"}
        return cls(**fields | {"also": tuple(data["also"]), "layout": tuple(data["layout"])})


def cache_in_words(target: str, cache: Tensor) -> str:
    """What ``SiteRecord.stored`` says of a cache: ``int8 key_cache_0 [1, 2, 32, 8]``."""
    shape = ", ".join(map(str, cache.shape))
    return f"{str(cache.dtype).removeprefix('torch.')} {target} [{shape}]"


def node_name(key: str) -> str:
    """A site's key as the start of a node's name: fx takes letters, digits and underscores, no digit first."""
    name = re.sub(r"\W", "_", key.replace("#", "_call"))
    return f"_{name}" if name[0].isdigit() else name


def refuse_converted(program: ExportedProgram) -> None:
    """Refuse a program that was converted already: its sites are quantized, and its report would be half true.

    Raises:
        ConvertError: naming a site.
    """
    for _, record in records(program):
        raise ConvertError(
            f"the program was converted before ({record.site} is quantized): give the original program, and one config "
            "with all that is to be quantized"
        )


def records(program: ExportedProgram) -> Iterator[tuple[Node, SiteRecord]]:
    """The dequantize nodes of a converted program with their records, in program order."""
    for node in program.graph.nodes:
        record = record_of(node)
        if record is not None:
            yield node, record


def record_of(node: Node) -> SiteRecord | None:
    """The record of a dequantize node; None of any other."""
    return SiteRecord.from_dict(told_by(node)) if told_by(node).get("part") == "dequantize" else None


def told_by(node: Node) -> Mapping[str, Any]:
    """What ``convert`` noted on a node of a pair; nothing on any other."""
    noted: Mapping[str, Any] = (node.meta.get("custom") or {}).get(RECORD) or {}
    return noted
