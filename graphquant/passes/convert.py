"""``convert``: the original program with a quantize/dequantize pair at every planned site, its qparams as constants."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from graphquant.calibration import Calibration
from graphquant.config import QuantizationConfig
from graphquant.errors import ConvertError
from graphquant.graph import AttentionSites, find_attention
from graphquant.passes.dialects import Emit, Names, Qparams, dialect
from graphquant.passes.editor import ProgramEditor
from graphquant.passes.placing import readers, refuse_in_place
from graphquant.passes.prepared import calibration_of, origin_of, require_calibrated
from graphquant.passes.store import NOTHING_STORED, StoragePlan, plan_storage, store
from graphquant.plan import PlannedSite, QuantizationPlan, check_config, make_plan
from graphquant.records import RECORD, SiteRecord, node_name, refuse_converted

STORED = "stored"


def convert(
    source: nn.Module | ExportedProgram,
    calibration: Calibration | None = None,
    config: QuantizationConfig | None = None,
    *,
    dialect: str = "pt2e",
    kv_cache: str | None = None,
) -> ExportedProgram:
    """Quantize a program: ``convert(prepared)``, or ``convert(program, calibration, config)``.

    A prepared module brings its own calibration and config, and its weights as they are now (after QAT, say); either
    can be given instead, so that one calibration serves other widths, symmetries and strategies. Every static site
    gets ``<site>_scale`` (float32) and ``<site>_zero_point`` (int32) in the state dict, of the strategy's shape.

    With ``kv_cache="stored"`` the cache of the program (buffers, or past and present) holds codes of keys and values,
    int8, uint8 or fp8, two to a byte up to 4 bits. They are quantized once, when written, and read as values; their
    pairs are arithmetic in every dialect.

    Raises:
        NotCalibratedError: a planned site has observed nothing.
        CalibrationError: the calibration lacks a site, or cannot answer the config.
        SelectorError, StrategyError: see ``make_plan``.
        ConvertError: the source is neither, the dialect is unknown, or a site cannot be rewritten.
    """
    emit = _dialect(dialect)
    if kv_cache not in (None, STORED):
        raise ConvertError(f"unknown kv_cache {kv_cache!r}; there are {STORED!r} and None")
    _check_types(calibration, config)
    if isinstance(source, ExportedProgram):
        if calibration is None or config is None:
            raise ConvertError("convert(program, calibration, config) needs all three; a prepared module needs neither")
        refuse_converted(source)
        program, state_dict, sites = source, source.state_dict, find_attention(source)
        plan = make_plan(sites, config)
    else:
        source = getattr(source, "_orig_mod", source)  # behind torch.compile
        origin = origin_of(source)
        program, sites = origin.program, origin.sites
        plan = origin.plan if config is None else make_plan(sites, config)
        state_dict = _current_weights(source, program)
        calibration = calibration_of(source) if calibration is None else calibration
    require_calibrated(calibration, list(plan))
    storing = plan_storage(program, sites, plan) if kv_cache == STORED else NOTHING_STORED
    with torch.no_grad():
        return _rewrite(ProgramEditor(program, state_dict), sites, plan, calibration, emit, storing)


_dialect = dialect


def _check_types(calibration: object, config: object) -> None:
    if calibration is not None and not isinstance(calibration, Calibration):
        raise ConvertError(
            f"expected a Calibration, found {type(calibration).__name__}; a saved one is read by Calibration.load(path)"
        )
    if config is not None:
        check_config(config)


def _current_weights(prepared: nn.Module, program: ExportedProgram) -> dict[str, Tensor]:
    """The program's state dict with the prepared module's parameters, on the program's device and in its dtype.

    Buffers are the program's own: a prepared module's cache has been written to.
    """
    current = dict(prepared.named_parameters(remove_duplicate=False))
    first_name = {id(value): name for name, value in program.state_dict.items() if name in current}
    weights: dict[str, Tensor] = {}
    for name, original in program.state_dict.items():
        weights[name] = original
        if isinstance(original, nn.Parameter):
            # Strict exports drop the second name of a tied parameter, and parameters that nothing reads.
            trained = current.get(name, current.get(first_name.get(id(original), "")))
            if trained is None:
                continue
            value = trained.detach().to(original.device, original.dtype)
            if value.data_ptr() != original.data_ptr() or value.shape != original.shape:
                # A copy: training that goes on must not reach into what was converted.
                weights[name] = nn.Parameter(value.clone(), original.requires_grad)
    return weights


def _rewrite(
    editor: ProgramEditor,
    sites: AttentionSites,
    plan: QuantizationPlan,
    calibration: Calibration,
    emit: Emit,
    storing: StoragePlan,
) -> ExportedProgram:
    coverage: dict[str, Any] | None = plan.coverage()
    for planned in plan:
        x = editor.nodes[planned.site.node]
        refuse_in_place(x, planned)
        qparams, amax = _constants(editor, planned, calibration)
        words = None
        if planned.key in storing.caches:
            quantized, dequantized, words = store(editor, planned, storing, sites, qparams)
        else:
            users = readers(x, planned, sites, editor.nodes)
            prefix = node_name(planned.key)
            names = Names(f"{prefix}_quantize", f"{prefix}_dequantize")
            quantized, dequantized = emit(editor.after(x), x, planned, qparams, names)
            for user in users:
                user.replace_input_with(x, dequantized)
        record = SiteRecord.of(planned, amax, coverage, words)
        coverage = None  # once in a program is enough
        quantized.meta["custom"] = {RECORD: {"site": planned.key, "part": "quantize"}}
        dequantized.meta["custom"] = {RECORD: record.to_dict() | {"part": "dequantize"}}
    return editor.finish()


def _constants(
    editor: ProgramEditor, planned: PlannedSite, calibration: Calibration
) -> tuple[Qparams | None, float | None]:
    """The site's qparams as constants of the program (none for a dynamic site), and the amax that was seen."""
    if planned.args.dynamic:
        seen = next((calibration[key] for key in planned.keys if key in calibration), None)
        return None, seen.amax if seen is not None and seen.tokens else None
    statistics = calibration.statistics(planned)
    scale, zero_point = statistics.qparams(planned)
    device = editor.nodes[planned.site.node].meta["val"].device
    nodes: list[Node] = [
        editor.constant(f"{planned.key}_{name}", value.to(device))
        for name, value in (("scale", scale), ("zero_point", zero_point))
    ]
    literal = (float(scale), int(zero_point)) if scale.numel() == 1 else None
    return Qparams(nodes[0], nodes[1], literal), statistics.amax
