"""The backends by name."""

from graphquant.backends.base import Backend
from graphquant.backends.executorch import ExecuTorch
from graphquant.backends.inductor import Inductor
from graphquant.backends.iree import Iree
from graphquant.backends.onnx import OnnxRuntime
from graphquant.backends.openvino import OpenVINO
from graphquant.config.reading import did_you_mean
from graphquant.errors import LowerError

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (Inductor(), OnnxRuntime(), OpenVINO(), ExecuTorch(), Iree())
}


def backend(name: str) -> Backend:
    """The backend called ``name``.

    Raises:
        LowerError: there is none.
    """
    if name not in BACKENDS:
        raise LowerError(f"unknown backend {name!r}{did_you_mean(name, BACKENDS)} (known: {', '.join(BACKENDS)})")
    return BACKENDS[name]
