"""The sites that plans are made for: a Llama of three layers, and plain modules with odd names."""

import pytest

from graphquant.capture import capture
from graphquant.graph import AttentionSites, find_attention
from tests.graph.modules import Attention, Stack, export, sdpa_enable_gqa
from tests.tiny import tiny_llama


@pytest.fixture(scope="session")
def llama_sites() -> AttentionSites:
    """Three layers of 4 heads and 2 KV heads of 8 channels, in a hidden size of 32."""
    return find_attention(capture(tiny_llama(num_hidden_layers=3)))


@pytest.fixture(scope="session")
def plain_sites() -> AttentionSites:
    """Two layers of 4 heads and 2 KV heads of 8 channels, in a hidden size of 16, by their usual names."""
    return find_attention(export(Stack(*(Attention(sdpa_enable_gqa, kv_heads=2) for _ in range(2)))))


@pytest.fixture(scope="session")
def renamed_sites() -> AttentionSites:
    """The same, with another name for every linear."""
    layers = (Attention(sdpa_enable_gqa, kv_heads=2, names=("a", "b", "c", "d")) for _ in range(2))
    return find_attention(export(Stack(*layers)))
