import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from graphquant.models import check_finite_weights, load, load_model
from tests.models.helpers import Q_PROJ, error_of, same_weights

KINDS = 'the name "smollm2", a local folder in Hugging Face format, a path to a .gguf file, or a hub id'


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_is_loaded_in_eval_mode_and_in_silence(
    folder: Path, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_model(str(folder), dtype=dtype, attn_implementation="eager")
    assert capsys.readouterr() == ("", "")
    assert same_weights(loaded.model, LlamaForCausalLM.from_pretrained(folder).to(dtype))
    assert not loaded.model.training
    assert (loaded.model.dtype, loaded.model.config._attn_implementation) == (dtype, "eager")
    assert loaded.tokenizer("the fox")["input_ids"] == [1, 4]
    assert loaded.name == "tiny"
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.name = "other"  # type: ignore[misc]


def test_verbose_lets_transformers_talk_and_quiet_is_undone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    level = transformers.utils.logging.get_verbosity()
    load_model(folder)
    assert transformers.utils.logging.get_verbosity() == level
    load_model(folder, verbose=True)
    assert "Loading weights" in capsys.readouterr().err


def test_a_relative_folder_and_a_path_object(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert load_model(".").name == "tiny"
    monkeypatch.setenv("HOME", str(folder.parent))
    assert load_model("~/tiny").name == load_model(folder).name == "tiny"


@pytest.mark.parametrize("source", ["./no", "../no", "/no/such", "~/no", "no.gguf", "no/such.GGUF", Path("no")])
def test_a_path_that_is_not_there(source: str | Path) -> None:
    assert error_of(lambda: load_model(source)) == f"{source} does not exist: expected {KINDS}"


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.touch()
    assert error_of(lambda: load_model(path)) == f"{path} is a file that does not end in .gguf: expected {KINDS}"


def test_a_folder_without_config(tmp_path: Path) -> None:
    expected = f"{tmp_path} has no config.json: expected a folder as model.save_pretrained writes it"
    assert error_of(lambda: load_model(tmp_path)) == expected


def test_a_folder_without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    expected = f"{folder} has no tokenizer.json or other vocabulary: add one with tokenizer.save_pretrained"
    assert error_of(lambda: load_model(folder)) == expected


def test_a_damaged_folder(folder: Path) -> None:
    expected = (
        f'cannot load the model in {folder} (ValueError: Specified `attn_implementation="nope"` is not supported.'
    )
    assert error_of(lambda: load_model(folder, attn_implementation="nope")).startswith(expected)
    (folder / "model.safetensors").unlink()
    expected = f"cannot load the model in {folder} (OSError: Error no file named model.safetensors"
    assert error_of(lambda: load_model(folder)).startswith(expected)
    (folder / "tokenizer.json").write_text("{")
    assert error_of(lambda: load_model(folder)).startswith(f"cannot load the tokenizer in {folder} (")


def test_a_missing_or_misshapen_weight_is_not_made_up(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.pop(Q_PROJ))
    expected = f"{folder}: missing weights for its config (1, the first {Q_PROJ}): get or save the model again"
    assert error_of(lambda: load_model(folder)) == expected
    edit_weights(folder, lambda weights: weights.update({Q_PROJ: torch.zeros(3, 3)}))
    message = error_of(lambda: load_model(folder))
    assert message.startswith(f"{folder}: mismatched weights for its config (1, the first ")
    assert Q_PROJ in message


def test_nan_and_inf_weights_are_named(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights[Q_PROJ].view(-1)[:3].copy_(torch.tensor([torch.nan, -torch.inf, 1])))
    reason = "the file is damaged, or the dtype too narrow for its values (try float32)"
    expected = f"parameter {Q_PROJ} (torch.float32) has 1 NaN and 1 Inf among its 256 values, expected none: {reason}"
    assert error_of(lambda: load_model(folder)) == expected
    edit_weights(folder, lambda weights: weights[Q_PROJ].fill_(1e6))
    load_model(folder)
    expected = f"parameter {Q_PROJ} (torch.float16) has 0 NaN and 256 Inf among its 256 values, expected none: {reason}"
    assert error_of(lambda: load_model(folder, dtype=torch.float16)) == expected


def test_check_finite_weights_takes_every_kind_of_parameter() -> None:
    module = torch.nn.Module()
    module.empty = torch.nn.Parameter(torch.empty(0))
    module.codes = torch.nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    module.fp8 = torch.nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn))
    check_finite_weights(module)
    module.fp8.data = torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn)
    assert error_of(lambda: check_finite_weights(module)).startswith(
        "parameter fp8 (torch.float8_e4m3fn) has 1 NaN and 0"
    )


@pytest.mark.parametrize("source", ["nobody/nothing", "nothing"])
def test_a_hub_id_offline(source: str) -> None:
    reason = "offline: HF_HUB_OFFLINE is set and the model is not in the local hub cache"
    assert error_of(lambda: load_model(source)) == f"cannot load {source!r} as a hub id ({reason}): expected {KINDS}"


@pytest.mark.parametrize("source", ["", "two words"])
def test_a_hub_id_that_cannot_be_one(source: str) -> None:
    message = error_of(lambda: load_model(source))
    assert message.startswith(f"cannot load {source!r} as a hub id (")
    assert message.endswith(f": expected {KINDS}")


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("We couldn't connect") from LocalEntryNotFoundError("no")

    monkeypatch.setattr(load, "is_offline_mode", lambda: False)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    assert "(offline: the hub cannot be reached and the model is not in the" in error_of(lambda: load_model("a/b"))


def test_a_hub_id_in_the_hub_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "hub" / "models--a--b"
    shutil.copytree(folder, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert load_model("a/b").name == "a/b"
