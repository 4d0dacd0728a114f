"""The real SmolLM2 through the compilers that take minutes for it."""

import pytest

from graphquant.models import LoadedModel
from tests.backends.needs import needs
from tests.backends.real import runs_the_real_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(name)) for name in ("inductor", "onnxruntime", "openvino", "iree")]
)
def test_a_compiler_runs_the_real_model(smollm2: LoadedModel, name: str) -> None:
    runs_the_real_model(smollm2, name)
