import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphquant.cli.quantize as quantize_module
from graphquant.capture import capture
from tests.cli.running import Workspace, error_of, run, usage_error_of
from tests.cli.test_quantize import RECIPE
from tests.tiny import tiny_llama


def with_text(workspace: Workspace, file: Path, *rest: object) -> tuple[object, ...]:
    """A run of quantize on the model's folder, which reads the text before it captures."""
    return ("quantize", workspace.model, "--preset", "int8-kv-tensor", "--output", "out.pt2", "--data", file, *rest)


def edited_copy(folder: Path, target: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    weights = load_file(target / "model.safetensors")
    edit(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a_program_without_attention(workspace: Workspace, here: Path) -> None:
    mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    torch.export.save(torch.export.export(mlp, (torch.ones(2, 4),)), here / "mlp.pt2")
    arguments = ("quantize", "mlp.pt2", "--preset", "int8-kv-tensor", "--output", "out.pt2")
    assert error_of(*arguments).startswith("no attention core")
    assert error_of(*arguments, "--tokenizer", workspace.model, *workspace.data).startswith("no attention core")
    assert error_of("report", "mlp.pt2").startswith("this ExportedProgram was not made by convert")
    assert error_of("evaluate", workspace.model, "mlp.pt2", *workspace.data).startswith("mlp takes input; expected")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("strategy: channel", "strategy: per_head", "qkv.output_activations"),
        ("num_bits", "num_bit", "unknown key 'num_bit'; did you mean 'num_bits'?"),
        ("QuantizationModifier", "QuantizationModifer", "did you mean 'QuantizationModifier'?"),
        ("self_attn$", "self_atn$", "self_atn$"),
        ("quant_stage:", "quant_stage: [", "invalid YAML in line"),
    ],
)
def test_a_recipe_that_means_nothing(workspace: Workspace, here: Path, old: str, new: str, message: str) -> None:
    (here / "recipe.yaml").write_text(RECIPE.replace(old, new, 1 if old != "num_bits" else -1))
    assert message in error_of(*workspace.quantize(config=("--recipe", "recipe.yaml")))


def test_a_recipe_file_that_cannot_be_read(workspace: Workspace, here: Path) -> None:
    (here / "broken.json").write_text("{")
    (here / "typo.json").write_text('{"config_group": {}}')
    (here / "recipe.toml").write_text("")
    for name, message in [
        ("none.yaml", "none.yaml: no such file"),
        ("none.json", "none.json: cannot be read: No such file or directory"),
        ("broken.json", "broken.json: is not JSON"),
        ("typo.json", "typo.json: unknown key 'config_group'; did you mean 'config_groups'?"),
        ("recipe.toml", "recipe.toml: ends in '.toml'; expected a .yaml, .yml or .json file"),
    ]:
        assert error_of(*workspace.quantize(config=("--recipe", name))).startswith(message)


def test_options_that_do_not_go_together(workspace: Workspace) -> None:
    both = workspace.quantize(config=("--preset", "int8-kv-tensor", "--recipe", "recipe.yaml"))
    assert usage_error_of(*both) == "Invalid value for --preset, --recipe: give one of the two"
    assert usage_error_of(*workspace.quantize(config=())) == "Invalid value for --preset, --recipe: give one of the two"
    reused = (*workspace.quantize(), "--calibration", workspace.calibration)
    assert "--data: with --calibration no data is read" in usage_error_of(*reused)
    assert "nothing new to save" in usage_error_of(*reused, "--save-calibration", "new.safetensors")
    assert "--worst-first" in usage_error_of(*workspace.quantize(), "--no-measure", "--worst-first")
    assert "--worst-first" in usage_error_of("report", workspace.quantized, "--worst-first")
    assert "--data" in usage_error_of("report", workspace.quantized, *workspace.data)
    assert "--samples" in usage_error_of(*workspace.quantize(), "--samples", 0)
    assert "'int8' is not one of" in usage_error_of(*workspace.quantize(), "--dtype", "int8")


def test_an_unknown_preset_or_format(workspace: Workspace) -> None:
    message = error_of(*workspace.quantize(config=("--preset", "int8-kv-tensr")))
    assert message.startswith("unknown preset 'int8-kv-tensr'; did you mean 'int8-kv-tensor'?")
    for command in (workspace.quantize(), ("sites", workspace.captured), ("report", workspace.quantized)):
        assert error_of(*command, "--format", "githb").startswith(
            "unknown table format 'githb'; did you mean 'github'?"
        )


def test_text_that_cannot_be_used(workspace: Workspace, here: Path) -> None:
    (here / "empty.txt").write_text(" \n")
    (here / "short.txt").write_text("the quick fox")
    (here / "few.txt").write_text("the quick fox jumps " * 10)
    (here / "text.csv").write_text("the")
    assert error_of(*with_text(workspace, here / "empty.txt")).endswith("holds no text: expected some to tokenize")
    assert error_of(*with_text(workspace, here / "short.txt")).startswith("the text has 3 tokens and one row needs 256")
    assert "8 calibration and 8 evaluation rows" in error_of(*with_text(workspace, here / "few.txt", "--length", 8))
    assert error_of(*with_text(workspace, here / "text.csv")).endswith("one object a line")
    assert "No such file" in error_of(*with_text(workspace, here / "none.txt"))
    assert error_of(*with_text(workspace, here)).endswith("is a folder: expected a .txt or .jsonl file")
    untold = error_of("quantize", workspace.captured, "--preset", "int8-kv-tensor", "--output", "out.pt2")
    assert untold == "captured is a saved program, which has no tokenizer: name its model with --tokenizer"


def test_a_program_of_another_model(workspace: Workspace, here: Path) -> None:
    """Its predictions are other ones, which would read as bad quantization."""
    torch.export.save(capture(tiny_llama(vocab_size=11)), here / "other.pt2")
    arguments = ("--tokenizer", workspace.model, *workspace.data)
    for first, second, name in ((workspace.captured, "other.pt2", "other"), ("other.pt2", workspace.quantized, "int8")):
        message = error_of("evaluate", first, second, *arguments)
        assert message.startswith(f"{name} was made from another model: its model.embed_tokens.weight is not the one")


def test_a_tokenizer_of_another_model(workspace: Workspace, here: Path) -> None:
    torch.export.save(capture(tiny_llama(vocab_size=5, num_hidden_layers=1)), here / "small.pt2")
    arguments = ("--preset", "int8-kv-tensor", "--output", "out.pt2", "--tokenizer", workspace.model, *workspace.data)
    assert "small a vocabulary of 5: the tokenizer is another model's" in error_of("quantize", "small.pt2", *arguments)
    assert error_of("quantize", "small.pt2", *arguments, "--tokenizer", here).startswith("cannot load a tokenizer from")


def test_weights_that_are_not_finite(workspace: Workspace, here: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    folder = edited_copy(workspace.model, here / "broken", lambda weights: weights[name].view(-1)[3:4].fill_(math.nan))
    arguments = ("--preset", "int8-kv-tensor", "--output", "out.pt2", "--tokenizer", workspace.model, *workspace.data)
    assert error_of("quantize", folder, *arguments).startswith(f"parameter {name} (torch.float32) has 1 NaN and 0 Inf")
    program = torch.export.load(workspace.captured)
    program.state_dict[name].data.view(-1)[0] = math.inf
    torch.export.save(program, here / "broken.pt2")
    assert f"{name} (torch.float32) has 0 NaN and 1 Inf" in error_of("quantize", "broken.pt2", *arguments)


@pytest.mark.parametrize("flag", ["--output", "--save-calibration", "--report"])
def test_outputs_that_cannot_be_written(
    workspace: Workspace, here: Path, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untouched(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded before the outputs were checked")

    monkeypatch.setattr(quantize_module.Source, "load", untouched)
    suffix = {"--output": ".pt2", "--save-calibration": ".safetensors", "--report": ".md"}[flag]
    (here / f"folder{suffix}").mkdir()
    (here / "file").write_text("")
    for path, message in [
        (f"none/x{suffix}", "there is no directory none"),
        (f"file/x{suffix}", "no directory file"),
        (f"folder{suffix}", "it is a directory"),
    ]:
        error = error_of(*workspace.quantize(), flag, path)
        assert error.startswith(f"cannot write {path}")
        assert message in error


def test_outputs_that_would_overwrite_something(workspace: Workspace, here: Path) -> None:
    data = here / "x.txt"
    data.write_text("the fox")
    assert "it is an input" in error_of(*workspace.quantize(output=workspace.captured))
    assert "it is an input" in error_of(*with_text(workspace, data), "--report", data)
    assert "another output" in error_of(*workspace.quantize(), "--save-calibration", "./out.pt2")
    assert "a name that ends in .pt2" in error_of(*workspace.quantize(output="out.bin"))
    assert "a name that ends in .md or" in error_of(*workspace.quantize(), "--report", "r.pdf")


@pytest.mark.parametrize("stage", ["calibrate", "save_program"])
def test_an_interruption_leaves_nothing(
    workspace: Workspace, here: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (here / "out.pt2").write_text("old")
    monkeypatch.setattr(quantize_module, stage, interrupt)
    files = ("--save-calibration", "statistics.safetensors", "--report", "r.md")
    assert error_of(*workspace.quantize(), *files, code=130) == "interrupted; nothing was written"


def test_a_failure_of_the_last_file_leaves_none(
    workspace: Workspace, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object, path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantize_module, "write_report", full)
    files = ("--save-calibration", "statistics.safetensors", "--report", "r.md")
    assert error_of(*workspace.quantize(), *files) == "cannot write r.md: No space left on device"


def test_a_calibration_of_another_model(workspace: Workspace, here: Path) -> None:
    arguments = ("--output", "out.pt2", "--calibration", workspace.calibration)
    elsewhere = error_of("quantize", workspace.captured, "--preset", "int8-qkv-proj-channel", *arguments)
    assert elsewhere.startswith("the calibration has no statistics of model.layers.0.self_attn.q_proj.output")
    torch.export.save(capture(tiny_llama(num_key_value_heads=4, num_hidden_layers=1)), here / "other.pt2")
    other = error_of("quantize", "other.pt2", "--preset", "int8-kv-tensor", *arguments)
    assert other.endswith("this calibration belongs to another model")
    (here / "junk.safetensors").write_text("junk")
    for path in ("junk.safetensors", "none.safetensors", workspace.model / "model.safetensors"):
        arguments = ("--output", "out.pt2", "--calibration", path)
        assert str(path) in error_of("quantize", workspace.captured, "--preset", "int8-kv-tensor", *arguments)


def test_saved_programs_that_cannot_be_read(workspace: Workspace, here: Path) -> None:
    whole = workspace.quantized.read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(b"archive/data/weights/weight_1") + 200] ^= 1  # torch.export.load would not notice
    for name, content in [("half", whole[: len(whole) // 2]), ("bit", flipped), ("junk", b"junk"), ("empty", b"")]:
        (here / f"{name}.pt2").write_bytes(content)
        assert error_of("report", f"{name}.pt2").startswith(f"{name}.pt2 is damaged")
    (here / "folder.pt2").mkdir()
    assert error_of("report", "none.pt2") == "none.pt2 does not exist: expected a .pt2 file"
    assert error_of("evaluate", workspace.model, "folder.pt2") == "folder.pt2 is a folder: expected a .pt2 file"
    assert "does not end in .pt2" in error_of("evaluate", workspace.model, workspace.model / "config.json")
    assert "does not exist" in error_of("sites", "./none")
    assert "does not end in .pt2" in error_of("report", workspace.model / "config.json")


def test_a_saved_program_keeps_its_dtype(workspace: Workspace) -> None:
    message = "captured.pt2 is a saved program, whose dtype is fixed: leave out --dtype bfloat16"
    assert error_of(*workspace.quantize(), "--dtype", "bfloat16").endswith(message)


def test_rows_longer_than_the_models_positions(workspace: Workspace) -> None:
    long = ("quantize", workspace.model, "--preset", "int8-kv-tensor", "--output", "out.pt2", "--length", 100_000)
    assert re.search(r"^rows of 100000 tokens .* has \d+ positions: give a --length of at most \d+$", error_of(*long))


def test_a_program_is_not_quantized_twice(workspace: Workspace) -> None:
    arguments = ("--tokenizer", workspace.model, "--preset", "int8-kv-tensor", "--output", "out.pt2", *workspace.data)
    assert error_of("quantize", workspace.quantized, *arguments).startswith("int8 is quantized already")


@pytest.mark.parametrize("place", ["before", "after"])
def test_the_unexpected_is_one_line_and_debug_shows_the_traceback(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("\nfirst line\nsecond line")

    monkeypatch.setattr(quantize_module.Source, "load", fail)
    message = "RuntimeError: first line; run with --debug for the traceback"
    assert error_of(*workspace.quantize()) == message
    command = workspace.quantize()
    shown = run(*(("--debug", *command) if place == "before" else (*command, "--debug")), code=1).stderr
    assert "Traceback (most recent call last)" in shown
    assert re.search(r"^error: RuntimeError: first line", shown, re.MULTILINE)


def test_an_input_folder_without_a_model(here: Path) -> None:
    (here / "empty").mkdir()
    (here / "config").mkdir()
    (here / "config" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "has no config.json" in error_of("sites", "./empty")
    assert "tokenizer" in error_of("sites", "config")
