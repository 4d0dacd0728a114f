"""A calibration as a value: site → statistics. It merges, saves, loads, and answers any later conversion."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from graphquant.errors import CalibrationError, NotCalibratedError, OutputError
from graphquant.files import written_whole
from graphquant.numerics import TensorLayout, qparams_from_range
from graphquant.observers import Observer, make_observer
from graphquant.observers.base import Grain
from graphquant.plan import PlannedSite

_FORMAT = "graphquant.calibration.v1"


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteStatistics:
    """What one observer saw at one tensor; ``keys`` are the sites that are this tensor."""

    keys: tuple[str, ...]
    grain: Grain
    observer: Observer
    state: Mapping[str, Tensor]

    @property
    def tokens(self) -> int:
        """How many rows (tokens that are no padding) were seen."""
        return int(self.state["tokens"])

    @property
    def amax(self) -> float:
        """Largest |x| seen."""
        return float(max(-self.state["min"].min(), self.state["max"].max())) if self.tokens else float("nan")

    def qparams(self, planned: PlannedSite) -> tuple[Tensor, Tensor]:
        """Scale (float32) and zero point (int32) of a planned static site, whatever its width and symmetry.

        Raises:
            CalibrationError: the statistics are of another shape, or cannot answer the planned observer or strategy.
            NotCalibratedError: nothing was seen.
        """
        observer, args = planned.observer(), planned.args
        if not self.grain.layout.same_statistics(planned.layout):
            raise CalibrationError(
                f"{planned.key} is {planned.layout.dims} here and was calibrated as {self.grain.layout.dims}: this "
                "calibration belongs to another model"
            )
        if not self.tokens:
            raise NotCalibratedError(f"{planned.key} has observed nothing: run calibrate(prepared, batches) first")
        missing = set(observer.init(planned.grain)) - set(self.state)
        if missing:
            raise CalibrationError(
                f"{planned.key} was calibrated with observer {self.observer.name!r}, whose statistics cannot answer "
                f"{observer.name!r}: calibrate with observer {observer.name!r}"
            )
        if observer.kwargs_in_state and observer != self.observer:
            raise CalibrationError(
                f"{planned.key} was calibrated with {self.observer}, whose statistics cannot answer {observer}: "
                "calibrate with these arguments"
            )
        low, high = observer.range(self.state, planned.grain, args.dtype, args.symmetric)
        scale, zero_point = qparams_from_range(low, high, args.dtype, args.symmetric)
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise CalibrationError(f"{planned.site.where}: a scale is not finite and above 0; its range is not usable")
        return scale, zero_point


class Calibration(Mapping[str, SiteStatistics]):
    """Statistics of every observed tensor, by site key (each of a tensor's keys leads to it)."""

    def __init__(self, entries: Iterable[SiteStatistics]) -> None:
        self.entries = tuple(entries)
        self._by_key = {key: entry for entry in self.entries for key in entry.keys}

    def __getitem__(self, key: str) -> SiteStatistics:
        return self._by_key[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_key)

    def __len__(self) -> int:
        return len(self._by_key)

    def __repr__(self) -> str:
        tokens = self.entries[0].tokens if self.entries else 0
        return f"Calibration({len(self.entries)} tensors, {tokens} tokens)"

    def statistics(self, planned: PlannedSite) -> SiteStatistics:
        """The statistics of a planned site, by any of its keys.

        Raises:
            CalibrationError: the site was not observed in this calibration.
        """
        for key in planned.keys:
            if key in self._by_key:
                return self._by_key[key]
        some = ", ".join(list(self._by_key)[:3])
        raise CalibrationError(
            f"the calibration has no statistics of {planned.site.where}; it has {len(self)} sites ({some}, …): "
            "calibrate with a config that selects this site"
        )

    def merge(self, later: "Calibration") -> "Calibration":
        """The calibration of having seen this one's batches, then ``later``'s.

        Raises:
            CalibrationError: the two observed different sites, or with different observers.
        """
        only = sorted(set(self) ^ set(later))
        if only:
            raise CalibrationError(f"two calibrations of different sites do not merge; not in both: {', '.join(only)}")
        merged = []
        for mine in self.entries:
            theirs = later[mine.keys[0]]
            if mine.observer != theirs.observer or mine.grain != theirs.grain:
                raise CalibrationError(
                    f"{mine.keys[0]} was observed by {mine.observer} over {mine.grain} and by {theirs.observer} over "
                    f"{theirs.grain}: only like statistics merge"
                )
            state = mine.observer.merge(mine.state, theirs.state)
            merged.append(SiteStatistics(keys=mine.keys, grain=mine.grain, observer=mine.observer, state=state))
        return Calibration(merged)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, whole or not at all.

        Raises:
            OutputError: the path cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        heads: list[dict[str, Any]] = []
        for index, entry in enumerate(self.entries):
            tensors |= {f"{index}.{name}": value.detach().cpu().contiguous() for name, value in entry.state.items()}
            heads.append(_head(entry))
        with written_whole(path) as temporary:
            save_file(tensors, temporary, metadata={"format": _FORMAT, "sites": json.dumps(heads)})

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Read what ``save`` wrote.

        Raises:
            OutputError: the file is missing, damaged, or no calibration.
        """
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise OutputError(f"{path} is a safetensors file but no graphquant calibration ({_FORMAT})")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            heads = json.loads(metadata["sites"])
            return cls([_entry(head, index, tensors) for index, head in enumerate(heads)])
        except OutputError:
            raise
        except Exception as error:  # safetensors raises its own type for damaged files, OSError for missing ones
            raise OutputError(f"cannot read the calibration {path}: {type(error).__name__}: {error}") from error


def _head(entry: SiteStatistics) -> dict[str, Any]:
    layout = entry.grain.layout
    return {
        "keys": list(entry.keys),
        "layout": [layout.kind, layout.heads, layout.head_dim],
        "strategy": entry.grain.strategy,
        "group_size": entry.grain.group_size,
        "observer": entry.observer.name,
        "observer_kwargs": vars(entry.observer),
    }


def _entry(head: Mapping[str, Any], index: int, tensors: Mapping[str, Tensor]) -> SiteStatistics:
    grain = Grain(TensorLayout(*head["layout"]), head["strategy"], head["group_size"])
    observer = make_observer(head["observer"], head["observer_kwargs"])
    state = {name: tensors[f"{index}.{name}"] for name in observer.init(grain)}
    return SiteStatistics(keys=tuple(head["keys"]), grain=grain, observer=observer, state=state)
