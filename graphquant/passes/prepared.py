"""What a prepared GraphModule carries beside its graph, and how to reach its site modules.

The original program, the sites and the plan ride along in one immutable object. It survives ``deepcopy`` (shared, not
copied) and ``pickle`` (the program is written without its weights, which the module itself carries).
"""

import io
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from graphquant.calibration import Calibration
from graphquant.errors import ConvertError, NotCalibratedError
from graphquant.graph import AttentionSites
from graphquant.passes.editor import rebuild
from graphquant.passes.modules import SiteFakeQuant, SiteObserver
from graphquant.plan import QuantizationPlan

Mode = Literal["observe", "fake_quant", "off"]
MODES = ("observe", "fake_quant", "off")


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a prepared module came from."""

    program: ExportedProgram
    sites: AttentionSites
    plan: QuantizationPlan

    def __deepcopy__(self, memo: dict[int, Any]) -> "Origin":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        buffer = io.BytesIO()
        torch.export.save(rebuild(self.program, state_dict=_without_storage(self.program)), buffer)
        return _restore, (buffer.getvalue(), self.sites, self.plan)


def _without_storage(program: ExportedProgram) -> dict[str, Any]:
    """A state dict of empty parameters: the prepared module's own take their place in ``convert``."""
    return {
        name: nn.Parameter(value.new_empty(0), value.requires_grad) if isinstance(value, nn.Parameter) else value
        for name, value in program.state_dict.items()
    }


def _restore(program: bytes, sites: AttentionSites, plan: QuantizationPlan) -> Origin:
    return Origin(torch.export.load(io.BytesIO(program)), sites, plan)


def attach(prepared: GraphModule, origin: Origin) -> None:
    """Give a prepared module its origin, by way of its observers: what else it had, deepcopy or pickle would drop."""
    for observer in observers(prepared):
        observer.origin = origin


def origin_of(prepared: nn.Module) -> Origin:
    """The origin of a prepared module.

    Raises:
        ConvertError: the module was not made by ``prepare``.
    """
    module = getattr(prepared, "_orig_mod", prepared)  # behind torch.compile
    origin = (
        next((observer.origin for observer in observers(module)), None) if isinstance(module, GraphModule) else None
    )
    if not isinstance(origin, Origin):
        raise ConvertError(
            f"expected a module made by prepare(model, config), found {type(prepared).__name__} without its plan"
        )
    return origin


def is_prepared(module: nn.Module) -> bool:
    """Whether a module was made by ``prepare``, or is a compiled one that was."""
    return bool(observers(getattr(module, "_orig_mod", module)))


def observers(prepared: nn.Module) -> list[SiteObserver]:
    """The observers of a prepared module, in plan order."""
    return [module for module in prepared.modules() if isinstance(module, SiteObserver)]


def fake_quants(prepared: nn.Module) -> list[SiteFakeQuant]:
    """The fake-quant modules of a prepared module, in plan order."""
    return [module for module in prepared.modules() if isinstance(module, SiteFakeQuant)]


def calibration_of(prepared: nn.Module) -> Calibration:
    """All that the observers of a prepared module have seen so far, as a value."""
    order = {planned.key: index for index, planned in enumerate(origin_of(prepared).plan)}
    seen = sorted(observers(prepared), key=lambda observer: order[observer.planned.key])
    return Calibration([observer.statistics() for observer in seen])


def set_mode(prepared: nn.Module, mode: Mode) -> None:
    """Switch every site to observing, to fake-quant (with the qparams of what was observed), or off.

    Raises:
        NotCalibratedError: fake-quant is asked for and a static site has observed nothing.
        ConvertError: the module was not made by ``prepare``, or there is no such mode.
    """
    if mode not in MODES:
        raise ConvertError(f"unknown mode {mode!r}; there are {', '.join(MODES)}")
    origin_of(prepared)
    if mode == "fake_quant":
        load_qparams(prepared, calibration_of(prepared))
    for observer in observers(prepared):
        observer.enabled = mode == "observe"
    for fake_quant in fake_quants(prepared):
        fake_quant.enabled = mode == "fake_quant"


def load_qparams(prepared: nn.Module, calibration: Calibration) -> None:
    """Compute the qparams of every static site from a calibration and give them to the fake-quant modules."""
    static = [module for module in fake_quants(prepared) if not module.planned.args.dynamic]
    require_calibrated(calibration, [module.planned for module in static])
    for module in static:
        module.set_qparams(*calibration.statistics(module.planned).qparams(module.planned))


def require_calibrated(calibration: Calibration, planned: list[Any]) -> None:
    """Refuse a calibration in which some static site has seen nothing, naming the sites.

    Raises:
        NotCalibratedError: listing them.
    """
    blank = [p.key for p in planned if not p.args.dynamic and not calibration.statistics(p).tokens]
    if blank:
        some = ", ".join(blank[:3]) + (f" and {len(blank) - 3} more" if len(blank) > 3 else "")
        raise NotCalibratedError(
            f"{len(blank)} sites have observed nothing ({some}): run calibrate(prepared, batches) before this"
        )
