"""The real SmolLM2 through ExecuTorch, whose lowering of 30 layers takes a quarter of an hour: a file of its own, for
another worker.
"""

import pytest

from graphquant.models import LoadedModel
from tests.backends.needs import needs
from tests.backends.real import runs_the_real_model

pytestmark = pytest.mark.slow


@needs("executorch")
def test_executorch_runs_the_real_model(smollm2: LoadedModel) -> None:
    runs_the_real_model(smollm2, "executorch")
