import json
from pathlib import Path

import pytest
import torch

from graphquant.calibration import Calibration
from graphquant.evaluation import evaluate
from graphquant.records import records
from tests.cli.running import Workspace, run
from tests.tiny import tiny_batch

RECIPE = """
quant_stage:
  quant_modifiers:
    QuantizationModifier:
      config_groups:
        attention:
          targets: ["re:.*self_attn$"]
          input_activations: {num_bits: 8, type: int, symmetric: true, strategy: attn_head}
        qkv:
          targets: ["re:.*(q|k|v)_proj$"]
          output_activations: {num_bits: 8, type: int, symmetric: true, strategy: channel}
"""


def test_a_preset_on_a_model_folder_gives_a_program_and_a_table(workspace: Workspace, here: Path) -> None:
    result = run("quantize", workspace.model, "--preset", "int8-kv-attn-head", "--output", "out.pt2", *workspace.data)
    program = torch.export.load(here / "out.pt2")
    keys = [f"model.layers.0.self_attn.{role}_states" for role in ("key", "value")]
    assert sorted(record.site for _, record in records(program)) == keys
    assert program.state_dict[f"{keys[0]}_scale"].shape == (2, 1, 1)
    assert all(key in result.stdout for key in keys)
    assert "coverage: 2 of " in result.stdout
    assert "64 tokens measured" in result.stdout
    assert [line.split()[0] for line in result.stderr.splitlines()] == [
        *("loading", "capturing", "planned", "calibrating", "converting", "measuring", "saving")
    ]
    assert sorted(path.name for path in here.iterdir()) == ["out.pt2"]


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json"])
def test_a_recipe_names_sites_and_strategies(workspace: Workspace, here: Path, suffix: str) -> None:
    recipe = here / f"recipe{suffix}"
    if suffix == ".json":
        recipe.write_text(run("presets", "int8-qkv-attn-head", "--json").stdout)
    else:
        recipe.write_text(RECIPE)
    result = run(*workspace.quantize(config=("--recipe", recipe)), "--no-measure", "--json")
    strategies = {(row["site"].rsplit(".", 1)[-1], row["strategy"]) for row in json.loads(result.stdout)["rows"]}
    states = {(f"{role}_states", "attn_head") for role in ("query", "key", "value")}
    assert strategies == states | (set() if suffix == ".json" else {("output", "channel")})


def test_json_is_all_of_stdout_and_quiet_leaves_stderr_empty(workspace: Workspace) -> None:
    result = run(*workspace.quantize(), "--evaluate", "--json", "--quiet")
    data = json.loads(result.stdout)
    assert result.stderr == ""
    assert data["totals"]["tokens_measured"] == 64
    assert set(data["evaluation"]["results"]) == {"original", "quantized"}


def test_a_saved_calibration_serves_another_width_without_a_pass_over_data(workspace: Workspace, here: Path) -> None:
    arguments = ("--preset", "int4-kv-channel", "--output", "out.pt2", "--calibration", workspace.calibration)
    result = run("quantize", workspace.captured, *arguments)  # no tokenizer: no text is read
    assert "not measured" in result.stdout
    assert "calibrating" not in result.stderr
    first = (here / "out.pt2").read_bytes()
    measured = run("quantize", workspace.captured, *arguments, "--measure", "--tokenizer", workspace.model)
    assert "2048 tokens measured" in measured.stdout  # 8 rows of 256: the default text is this Python's own
    assert (here / "out.pt2").read_bytes() == first


def test_what_is_saved_works_and_does_not_depend_on_the_batch_size_or_on_evaluation(
    workspace: Workspace, here: Path
) -> None:
    run(*workspace.quantize(), "--batch-size", 3, "--evaluate")
    program, original = (torch.export.load(path) for path in (here / "out.pt2", workspace.captured))
    saved, reference = program.state_dict, torch.export.load(workspace.quantized).state_dict
    assert saved.keys() == reference.keys()
    assert all(torch.allclose(saved[name], reference[name], rtol=1e-5) for name in saved)
    ids = torch.arange(8)[None] + 1
    result = evaluate(
        {"original": original, "saved": program},
        [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}],
        progress=False,
    )
    assert 0 < result.results["saved"].kl < 1e-3


@pytest.mark.parametrize("dialect", ["pt2e", "aten"])
def test_dialects_and_narrow_weights(workspace: Workspace, here: Path, dialect: str) -> None:
    arguments = ("--preset", "int8-kv-tensor", "--output", "out.pt2", "--dtype", "bfloat16", "--dialect", dialect)
    run("quantize", workspace.model, *arguments, *workspace.data, "--quiet")
    program = torch.export.load(here / "out.pt2")
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any(name.startswith("quantized_decomposed") for name in names) == (dialect == "pt2e")
    assert (
        program.module()(**tiny_batch(2, 5, seed=3) | {"input_ids": torch.ones(2, 5, dtype=torch.long)})
        .isfinite()
        .all()
    )


@pytest.mark.parametrize(
    ("name", "start"), [("r.md", "|"), ("r.json", "{"), ("r.txt", "  layer"), ("r.html", "<!doctype html>")]
)
def test_the_report_file_has_the_form_that_its_name_says(
    workspace: Workspace, here: Path, name: str, start: str
) -> None:
    result = run(*workspace.quantize(), "--report", name, "--worst-first")
    text = (here / name).read_text(encoding="utf-8")
    assert text.startswith(start)
    assert "model.layers.0.self_attn.key_states" in text
    if name == "r.json":
        assert json.loads(text)["totals"]["tokens_measured"] == 64
    figures = [float(line.split()[-2]) for line in result.stdout.splitlines() if "_states" in line and "minmax" in line]
    assert len(figures) == 2
    assert figures == sorted(figures)


def test_the_calibration_is_saved_beside_the_program(workspace: Workspace) -> None:
    saved = Calibration.load(workspace.calibration)
    assert {statistics.tokens for statistics in saved.values()} == {64}


def test_an_old_file_is_replaced(workspace: Workspace, here: Path) -> None:
    (here / "out.pt2").write_text("old")
    run(*workspace.quantize(), "--no-measure", "--quiet")
    assert (here / "out.pt2").read_bytes() == workspace.quantized.read_bytes()


def test_jsonl_is_read_too(workspace: Workspace, here: Path) -> None:
    words = (workspace.folder / "text.txt").read_text()
    (here / "text.jsonl").write_text(json.dumps({"text": words}))
    run(*workspace.quantize()[:-4], "--data", "text.jsonl", "--length", 8, "--no-measure", "--quiet")
    assert (here / "out.pt2").read_bytes() == workspace.quantized.read_bytes()
