import json
from importlib.metadata import version
from pathlib import Path

import torch

from graphquant.config import PRESETS, QuantizationConfig, preset
from tests.cli.running import Workspace, error_of, run, usage_error_of
from tests.tiny import TinyAttention


def test_sites_lists_every_site(workspace: Workspace) -> None:
    result = run("sites", workspace.model)
    assert "model.layers.0.self_attn.value_states" in result.stdout
    assert "1 attention layers, " in result.stdout
    assert result.stderr.splitlines() == [f"loading {workspace.model} …", "capturing tiny …"]


def test_sites_of_the_decomposed_graph_as_json(workspace: Workspace) -> None:
    data = json.loads(run("sites", workspace.captured, "--json", "--decompose").stdout)
    assert [layer["path"] for layer in data["layers"]] == ["model.layers.0.self_attn"]
    assert {"layer", "site", "module", "node", "dims", "source"} == set(data["sites"][0])
    assert data["near_misses"] == []


def test_sites_shows_near_misses_and_says_where_there_is_nothing(here: Path) -> None:
    example = (torch.randn(2, 4, 8),)
    torch.export.save(torch.export.export(TinyAttention(), example), here / "attention.pt2")
    (miss,) = json.loads(run("sites", "attention.pt2", "--json").stdout)["near_misses"]
    assert miss["reason"] in run("sites", "attention.pt2", "--format", "github").stdout
    torch.export.save(torch.export.export(torch.nn.Linear(8, 8), example), here / "linear.pt2")
    assert run("sites", "linear.pt2").stdout == "0 attention layers, 0 sites, 0 near misses\n"


def test_report_of_a_saved_program(workspace: Workspace) -> None:
    html = run("report", workspace.quantized, "--limit", 1, "--format", "html").stdout
    assert html.startswith("<table>")
    assert "model.layers.0.self_attn.key_states" in html
    assert "1 of 2 rows left out" in html
    assert "<p>quantized tensors: 2" in html
    assert "not measured" in html


def test_report_measures_what_quantize_measured(workspace: Workspace) -> None:
    measured = ("--tokenizer", workspace.model, *workspace.data)
    first = json.loads(run("report", workspace.quantized, *measured, "--json").stdout)
    again = json.loads(run(*workspace.quantize(), "--json").stdout)
    assert first == again


def test_evaluate_compares_programs_with_the_original(workspace: Workspace) -> None:
    files = (workspace.quantized, workspace.captured)
    data = json.loads(run("evaluate", workspace.model, *files, *workspace.data, "--json").stdout)
    assert data["results"]["captured"] == data["results"]["original"]
    assert 0 < data["results"]["int8"]["kl"] < 1e-3
    assert data["tokens"] == 8 * 7


def test_evaluate_names_programs_by_their_paths_where_stems_are_not_unique(workspace: Workspace, here: Path) -> None:
    (here / "int8.pt2").write_bytes(workspace.quantized.read_bytes())
    arguments = ("--tokenizer", workspace.model, *workspace.data)
    table = run("evaluate", workspace.captured, "int8.pt2", workspace.quantized, *arguments).stdout
    assert [line.split()[0] for line in table.splitlines()[2:]] == ["original", "int8.pt2", str(workspace.quantized)]
    assert "given twice" in usage_error_of("evaluate", workspace.captured, "int8.pt2", "int8.pt2")


def test_presets_are_listed_and_printed_as_recipes_that_read_back(here: Path) -> None:
    assert [row["preset"] for row in json.loads(run("presets", "--json").stdout)] == list(PRESETS)
    assert all(entry.description in run("presets").stdout for entry in PRESETS.values())
    for name in PRESETS:
        (here / "recipe.yaml").write_text(run("presets", name).stdout)
        assert QuantizationConfig.from_recipe(here / "recipe.yaml") == preset(name)
        assert QuantizationConfig.from_dict(json.loads(run("presets", name, "--json").stdout)) == preset(name)
    assert error_of("presets", "int8-kv-tensr").startswith("unknown preset 'int8-kv-tensr'; did you mean")


def test_version_and_help() -> None:
    assert run("--version").stdout == f"graphquant {version('graphquant')}\n"
    for command in ("sites", "quantize", "report", "evaluate", "presets"):
        assert command in run("-h").stdout
        assert run(command, "--help").stdout.startswith("Usage: ")
