"""The capability tables of all backends as rows, for the command line and the docs."""

from graphquant.backends.registry import BACKENDS
from graphquant.config import QuantizationArgs
from graphquant.numerics import STRATEGIES, TensorLayout

FORMATS: dict[str, dict[str, object]] = {
    "int8 sym": {},
    "int8 asym": {"symmetric": False},
    "int4 sym": {"num_bits": 4},
    "int4 asym": {"num_bits": 4, "symmetric": False},
    "uint8 asym": {"type": "uint", "symmetric": False},
    "fp8 e4m3": {"type": "float"},
    "fp8 e5m2": {"type": "float", "float_format": "e5m2"},
}
"""The number formats of the tables: each as what it adds to a setting."""
LAYOUTS = (TensorLayout("projection", 2, 8), TensorLayout("states", 2, 8))


def setting(strategy: str, form: str) -> QuantizationArgs:
    """A strategy in one of FORMATS; groups of 4 channels."""
    group = {"group_size": 4} if strategy == "group" else {}
    return QuantizationArgs.from_dict({"strategy": strategy, **group, **FORMATS[form]})


def capability_rows() -> list[dict[str, str]]:
    """One row a number format, a column a backend: which strategies it takes, and why not the others."""
    return [{"format": form} | {name: _taken(name, form) for name in BACKENDS} for form in FORMATS]


def _taken(name: str, form: str) -> str:
    answers = {s: [BACKENDS[name].capability(setting(s, form), layout) for layout in LAYOUTS] for s in STRATEGIES}
    refused = {s: one.reason for s, answer in answers.items() for one in answer if not one.works}
    reason = next(iter(refused.values()), "")
    if len(refused) == len(STRATEGIES):
        return f"no: {reason}"
    return f"all but {', '.join(refused)}: {reason}" if refused else "all"
