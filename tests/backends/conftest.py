"""One quantized model for all backends, lowered once to each."""

import pytest
from backend_table import Bench

from graphquant.backends import Lowered


@pytest.fixture(scope="session")
def bench() -> Bench:
    """A 2-layer Llama, captured and calibrated at every site."""
    return Bench()


@pytest.fixture(scope="session")
def lowered(bench: Bench):
    """``lowered(backend, form)``, each compiled once."""
    known: dict[tuple[str, str], Lowered] = {}

    def get(backend: str, form: str) -> Lowered:
        if (backend, form) not in known:
            known[backend, form] = bench.lowered(backend, form)
        return known[backend, form]

    return get
