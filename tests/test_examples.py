"""The examples and the benchmark run as a reader would run them: in a process of their own, in another directory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import graphquant as gq

ROOT = Path(__file__).parents[1]


def run(script: str, *arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    printed = run("examples/demo.py", "--samples", "1", "--length", "64", "--new-tokens", "2", cwd=tmp_path)
    assert "model_layers_29_self_attn_value_states_dequantize" in printed
    assert "Python is a programming language that" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]
    program = torch.export.load(tmp_path / "model.pt2")
    assert len(gq.report(program).rows) == 180


def test_own_model(tmp_path: Path) -> None:
    printed = run("examples/own_model.py", cwd=tmp_path)
    lines = [line.split()[:2] for line in printed.splitlines()[2:]]
    assert [name for name, _ in lines[::2]] == ["sdpa", "einsum", "flex_attention", "nn.MultiheadAttention"]
    assert len(lines) == 8


def test_demo_refuses_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/demo.py"), "--output", str(tmp_path / "none" / "model.pt2")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "there is no directory" in done.stderr


@pytest.mark.slow
def test_overhead_benchmark(tmp_path: Path) -> None:
    figures = json.loads(run("benchmarks/overhead.py", "--repeats", "1", "--layers", "2", "--json", cwd=tmp_path))
    assert all(value > 0 for value in figures.values())
    assert len(figures) == 7


def test_recipe_of_the_demo_loads_and_selects_six_tensors_a_layer() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    recipe = gq.QuantizationConfig.from_recipe(ROOT / "examples/recipes/attention-int8.yaml")
    prepared = gq.prepare(LlamaForCausalLM(config).eval(), recipe)
    assert len(gq.calibration_of(prepared).entries) == 12
