"""A tiny model folder, text of its words, and what the command line made of them, once for all tests."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from graphquant.capture import capture
from tests.cli.running import Workspace, run
from tests.conftest import WORDS
from tests.tiny import tiny_llama


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a test: empty, and not the repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHQUANT_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Model, text, captured program, int8 program and calibration; tests read and never write here."""
    folder = tmp_path_factory.mktemp("workspace")
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    model = tiny_llama(vocab_size=len(WORDS), num_hidden_layers=1)  # torch.export.load takes a second a layer
    model.save_pretrained(folder / "tiny")
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder / "tiny")
    (folder / "text.txt").write_text(" ".join(random.Random(0).choices(WORDS[1:], k=800)))
    torch.export.save(capture(model), folder / "captured.pt2")
    space = Workspace(folder)
    run(*space.quantize(output=space.quantized), "--save-calibration", space.calibration, "--no-measure")
    return space
