"""The checks of docs/models.md with a cache in the graph, for the families whose attention differs in it."""

import pytest

from tests.test_families import check_cell

pytestmark = pytest.mark.slow
CACHES = ("static", "inputs")
TRAINING = ("Mistral", "Phi-3", "SmolLM3", "GPT-NeoX", "OPT", "LFM2", "gpt-oss")
CELLS = [
    *((name, cache, "eager" if name == "gpt-oss" else "sdpa", False) for name in TRAINING for cache in CACHES),
    *((name, cache, "sdpa", True) for name in ("Llama", "DeepSeek-V3") for cache in CACHES),
    ("Llama", "inputs", "eager", False),
    ("Gemma-3n", "inputs", "sdpa", False),
]


@pytest.mark.parametrize(("name", "cache", "implementation", "decomposed"), CELLS)
def test_a_cell_with_a_cache(name: str, cache: str, implementation: str, decomposed: bool) -> None:
    check_cell(name, cache, implementation, decomposed)
