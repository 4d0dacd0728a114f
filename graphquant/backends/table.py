"""The capability tables of all backends as rows, for the command line and the docs."""

from graphquant.backends.registry import BACKENDS
from graphquant.config import QuantizationArgs
from graphquant.numerics import STRATEGIES, TensorLayout

FORMATS: dict[str, dict[str, object]] = {
    "int8": {},
    "int4": {"num_bits": 4},
    "uint8": {"type": "uint"},
    "fp8 e4m3": {"type": "float"},
    "fp8 e5m2": {"type": "float", "float_format": "e5m2"},
}
LAYOUTS = (TensorLayout("projection", 2, 8), TensorLayout("states", 2, 8))


def setting(strategy: str, form: str, symmetric: bool = True) -> QuantizationArgs:
    """The arguments of a strategy in a number format."""
    group = {"group_size": 4} if strategy == "group" else {}
    return QuantizationArgs.from_dict({"strategy": strategy, "symmetric": symmetric, **group, **FORMATS[form]})


def capability_rows() -> list[dict[str, str]]:
    """One row a number format, a column a backend: which strategies it takes, or why none."""
    rows = []
    for form in FORMATS:
        row = {"format": form}
        for backend in BACKENDS.values():
            answers = {s: [backend.capability(setting(s, form), layout) for layout in LAYOUTS] for s in STRATEGIES}
            taken = [strategy for strategy, answer in answers.items() if all(one.works for one in answer)]
            reason = next((one.reason for answer in answers.values() for one in answer if not one.works), "")
            row[backend.name] = "all" if len(taken) == len(STRATEGIES) else ", ".join(taken) or f"no: {reason}"
        rows.append(row)
    return rows
