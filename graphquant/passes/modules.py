"""The modules that ``prepare`` inserts at a site: one observes, one fake-quantizes. Each does only that."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphquant.calibration import SiteStatistics
from graphquant.errors import CalibrationError, NonFiniteError
from graphquant.numerics import ErrorSums, TensorLayout, dynamic_qparams, expand_qparam, fake_quantize
from graphquant.numerics.affine import clipped
from graphquant.plan import PlannedSite


def kept_rows(x: Tensor, mask: Tensor | None, layout: TensorLayout, where: str) -> Tensor:
    """Rows ``[…, H, D]`` of the tokens that are no padding; ``mask`` is ``[B, T]`` with T ≥ S, its last S count.

    Raises:
        CalibrationError: the mask does not cover the tensor at ``where``.
    """
    if mask is None:
        return layout.rows(x)
    sequence = x.shape[layout.axes[0]]
    keep = mask[:, mask.shape[1] - sequence :].to(torch.bool)
    if keep.shape != (x.shape[0], sequence):
        raise CalibrationError(
            f"{where}: a padding mask {list(mask.shape)} does not cover {sequence} positions of {x.shape[0]} sequences"
        )
    return layout.rows(x) if bool(keep.all()) else layout.rows(x, keep)


class _SiteModule(nn.Module):
    """A module of one planned site. Its buffers keep their dtype under ``.half()`` and the like, and move devices."""

    def __init__(self, planned: PlannedSite) -> None:
        super().__init__()
        self.planned = planned
        self.origin: Any = None  # of the prepared module that this is a part of
        self.enabled = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "_SiteModule":
        for name, buffer in self.named_buffers(recurse=False):
            moved = fn(buffer)
            # A cast there and back would round the statistics, and turn 1e5 into infinity under half().
            self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        return self

    def kept_rows(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Rows ``[…, H, D]`` of the tokens that are no padding."""
        return kept_rows(x, mask, self.planned.layout, self.planned.site.where)


class SiteObserver(_SiteModule):
    """Collects the statistics of one site; returns its input untouched."""

    def __init__(self, planned: PlannedSite) -> None:
        super().__init__(planned)
        self.observer = planned.observer()
        self.seen_batches = 0
        for name, value in self.observer.init(planned.grain).items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Observe ``x`` where enabled.

        Raises:
            NonFiniteError: a NaN or Inf outside the padding, naming site and batch.
        """
        if self.enabled:
            self.observe(x, mask)
        return x

    @torch.no_grad()
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def observe(self, x: Tensor, mask: Tensor | None) -> None:
        """Update the statistics; on an error they stay as they were."""
        state = dict(self.named_buffers())
        updated = self.observer.update(state, self.kept_rows(x, mask), self.planned.grain)
        finite = updated["tokens"] == 0 or (updated["min"].isfinite() & updated["max"].isfinite()).all()
        if not finite:
            raise NonFiniteError(
                f"{self.planned.site.where}: a NaN or Inf was observed in batch {self.seen_batches} (counted from 0); "
                "look for one in the model's weights or its inputs"
            )
        for name, value in updated.items():
            setattr(self, name, value)
        self.seen_batches += 1

    def statistics(self) -> SiteStatistics:
        """A copy of what was seen so far."""
        state = {name: buffer.detach().clone().cpu() for name, buffer in self.named_buffers()}
        return SiteStatistics(keys=self.planned.keys, grain=self.planned.grain, observer=self.observer, state=state)

    def snapshot(self) -> tuple[dict[str, Tensor], int]:
        """The state as ``restore`` takes it; no copy, since an update replaces tensors and writes to none."""
        return dict(self.named_buffers()), self.seen_batches

    def restore(self, snapshot: tuple[dict[str, Tensor], int]) -> None:
        """Go back to a snapshot."""
        buffers, self.seen_batches = snapshot
        for name, value in buffers.items():
            setattr(self, name, value)


class SiteFakeQuant(_SiteModule):
    """Fake-quantizes one site where enabled, and adds up its error where asked to measure."""

    def __init__(self, planned: PlannedSite) -> None:
        super().__init__(planned)
        self.errors: ErrorSums | None = None
        if not planned.args.dynamic:  # NaN until qparams are set: nothing can pass for calibrated by accident
            self.register_buffer("scale", torch.full(planned.grain.shape, torch.nan))
            self.register_buffer("zero_point", torch.zeros(planned.grain.shape, dtype=torch.int32))

    def set_qparams(self, scale: Tensor, zero_point: Tensor) -> None:
        """Take over calibrated qparams of the planned shape."""
        self.get_buffer("scale").copy_(scale)
        self.get_buffer("zero_point").copy_(zero_point)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``x`` itself, or its fake-quantized values in its own dtype."""
        if not self.enabled:
            return x
        scale, zero_point = self._expanded(x)
        values = fake_quantize(x, scale, zero_point, self.planned.args.dtype)
        if self.errors is not None:
            self.measure(x, values, clipped(x, scale, zero_point, self.planned.args.dtype), mask)
        return values

    def _expanded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        args = self.planned.args
        if args.dynamic:
            return dynamic_qparams(x, args.dtype, args.symmetric)
        layout, strategy, group_size = self.planned.layout, args.strategy, args.group_size
        scale, zero_point = (
            expand_qparam(self.get_buffer(name), layout, strategy, group_size) for name in ("scale", "zero_point")
        )
        return scale, zero_point

    @torch.no_grad()
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def measure(self, x: Tensor, values: Tensor, outside: Tensor, mask: Tensor | None) -> None:
        """Add this batch's error to the sums, padding left out."""
        rows: list[Any] = [self.kept_rows(tensor, mask) for tensor in (x, values, outside)]
        assert self.errors is not None
        self.errors += ErrorSums.of(*rows)
