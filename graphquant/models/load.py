"""One function for every kind of source: the name "smollm2", a local folder, a .gguf file, or a hub id."""

import os
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub import is_offline_mode
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from graphquant.errors import ModelError
from graphquant.models.cache import converted_copy
from graphquant.models.smollm2 import fetch_smollm2
from graphquant.models.weights import failing_as, load_weights, quiet, reason

if TYPE_CHECKING:  # its first use imports torchao, which logs: by then the command line has logs off
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_KINDS = 'the name "smollm2", a local folder in Hugging Face format, a path to a .gguf file, or a hub id'
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "tekken.json")


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model in eval mode, its tokenizer, and a short name for reports."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    name: str


def load_model(
    source: str | PurePath,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    verbose: bool = False,
) -> LoadedModel:
    """Load the model and tokenizer that `source` names, weights cast to `dtype`; `verbose` lets transformers talk.

    Raises:
        ModelError: `source` is none of the four kinds, a file of it is missing or damaged, it has no tokenizer, or a
            weight is missing, misshapen, NaN or Inf.
    """
    options: dict[str, Any] = {"dtype": dtype}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    with quiet(verbose):
        if source == "smollm2":
            return _load_folder(converted_copy(fetch_smollm2(), verbose), "SmolLM2-135M-Instruct", options)
        path = _local_path(source)
        if path is None:
            return _load_hub(str(source), options)
        if path.is_dir():
            return _load_folder(path, path.resolve().name, options)
        if path.suffix.lower() == ".gguf":
            return _load_folder(converted_copy(path, verbose), path.stem, options)
        raise ModelError(f"{path} is a file that does not end in .gguf: expected {_KINDS}")


def load_tokenizer(source: str) -> "PreTrainedTokenizerBase":
    """Load a model's tokenizer, without its weights where they are apart.

    Raises:
        ModelError: there is none.
    """
    if source == "smollm2" or source.lower().endswith(".gguf"):
        return load_model(source).tokenizer
    with failing_as(f"cannot load a tokenizer from {source}"):
        local = Path(source).is_dir()
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, local_files_only=local, trust_remote_code=False)
    return tokenizer


def _local_path(source: str | PurePath) -> Path | None:
    text = os.fspath(source)
    path = Path(text).expanduser()
    if text and path.exists():
        return path
    if isinstance(source, PurePath) or text.startswith(("./", "../", "/", "~")) or text.lower().endswith(".gguf"):
        raise ModelError(f"{text} does not exist: expected {_KINDS}")
    return None


def _load_folder(folder: Path, name: str, options: dict[str, Any]) -> LoadedModel:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: expected a folder as model.save_pretrained writes it")
    # Without this check some tokenizer classes load with an empty vocabulary.
    if not any(any(folder.glob(name)) for name in _VOCABULARIES):
        raise ModelError(f"{folder} has no tokenizer.json or other vocabulary: add one with tokenizer.save_pretrained")
    with failing_as(f"cannot load the tokenizer in {folder}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with failing_as(f"cannot load the model in {folder}"):
        return LoadedModel(load_weights(folder, {**options, "local_files_only": True}), tokenizer, name)


def _load_hub(source: str, options: dict[str, Any]) -> LoadedModel:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        return LoadedModel(load_weights(source, options), tokenizer, source)
    except ModelError:
        raise
    except Exception as error:
        why = reason(error)
        if isinstance(error.__cause__, LocalEntryNotFoundError | OfflineModeIsEnabled):
            network = "HF_HUB_OFFLINE is set" if is_offline_mode() else "the hub cannot be reached"
            why = f"offline: {network} and the model is not in the local hub cache"
        raise ModelError(f"cannot load {source!r} as a hub id ({why}): expected {_KINDS}") from error
