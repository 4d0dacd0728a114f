"""A converted program in another dialect: the same pairs at the same sites, said in other ops.

The records of a program tell where each pair is and how it quantizes, and its qparams are constants, so neither the
calibration nor the config is needed, and a program from a file will do.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from graphquant.config import QuantizationArgs
from graphquant.errors import ConvertError
from graphquant.numerics import TensorLayout
from graphquant.passes.dialects import Emit, Names, Qparams
from graphquant.passes.editor import ProgramEditor
from graphquant.records import SiteRecord, node_name, records, told_by


@dataclass(frozen=True)
class SiteSetting:
    """How a site of a converted program is quantized."""

    args: QuantizationArgs
    layout: TensorLayout

    @classmethod
    def of(cls, record: SiteRecord) -> "SiteSetting":
        """The setting that a record tells of."""
        return cls(record.quantization_args, record.tensor_layout)


def redialect(program: ExportedProgram, emit: Emit) -> ExportedProgram:
    """The program with every pair said by ``emit``.

    Raises:
        ConvertError: the program was rewritten after ``convert``, and a pair is not where its record says.
    """
    # What is stored in a cache is arithmetic for every backend.
    found = [(node.name, record) for node, record in records(program) if record.stored is None]
    stripped, pairs = _without_pairs(program, found)
    places = {str(spec.target): spec.arg.name for spec in program.graph_signature.input_specs if spec.target}
    with torch.no_grad():
        editor = ProgramEditor(stripped, stripped.state_dict)
        for _, record in found:
            setting, prefix = SiteSetting.of(record), node_name(record.site)
            qparams = None if setting.args.dynamic else _qparams(editor, places, record.site)
            x, pair = editor.nodes[record.node], pairs[record.site]
            names = Names(f"{prefix}_quantize", f"{prefix}_dequantize")
            quantized, dequantized = emit(editor.after(x), x, setting, qparams, names)
            for user in pair.users:
                editor.nodes[user].replace_input_with(x, dequantized)
            quantized.meta["custom"], dequantized.meta["custom"] = pair.quantize, pair.dequantize
        return editor.finish()


@dataclass(frozen=True)
class _Pair:
    """What is to stay of a pair that was taken out: who read it, and what its two nodes told of themselves."""

    users: list[str]
    quantize: dict[str, Any]
    dequantize: dict[str, Any]


def _without_pairs(
    program: ExportedProgram, found: list[tuple[str, SiteRecord]]
) -> tuple[ExportedProgram, dict[str, _Pair]]:
    """The program before its pairs were put in, but for their constants, and the pairs by site."""
    editor = ProgramEditor(program, program.state_dict)
    pairs = {}
    for name, record in found:
        x, old = editor.nodes.get(record.node), editor.nodes[name]
        nodes = {} if x is None else _between(x, old)
        users = list(old.users)
        lost = x is None or x not in {source for node in nodes for source in node.all_input_nodes}
        if x is None or lost or any(x in user.all_input_nodes for user in users):
            raise ConvertError(
                f"the program was rewritten after convert, and {record.site} is not where it was: give the program "
                "that convert returned"
            )
        parts = {part: node.meta["custom"] for node in nodes if (part := _part(node))}
        pairs[record.site] = _Pair([user.name for user in users], parts["quantize"], parts["dequantize"])
        for user in users:
            user.replace_input_with(old, x)
        for node in sorted(nodes, reverse=True):
            editor.graph.erase_node(node)
    return editor.finish(), pairs


def _part(node: Node) -> str:
    return str(told_by(node).get("part", ""))


def _between(x: Node, dequantize: Node) -> dict[Node, None]:
    """All nodes between a site's tensor and its dequantized values."""
    found, stack = {dequantize: None}, [dequantize]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source is not x and source.op != "placeholder" and source not in found:
                found[source] = None
                stack.append(source)
    return found


def _qparams(editor: ProgramEditor, places: dict[str, str], site: str) -> Qparams:
    targets = [f"{site}_{name}" for name in ("scale", "zero_point")]
    scale, zero_point = (editor.state_dict[target] for target in targets)
    literal = (float(scale), int(zero_point)) if scale.numel() == 1 else None
    scale_node, zero_point_node = (editor.nodes[places[target]] for target in targets)
    return Qparams(scale_node, zero_point_node, literal)
