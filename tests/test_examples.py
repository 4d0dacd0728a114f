"""The examples and the benchmark run as a reader would run them: in a process of their own, in another directory."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import generate
import pytest
import torch
from transformers import BatchEncoding

import graphquant as gq
from tests.tiny import VOCABULARY, tiny_llama

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


class Letters:
    """A tokenizer of one token a letter."""

    def __call__(self, text: str, **options: Any) -> BatchEncoding:
        return BatchEncoding({"input_ids": [ord(letter) % VOCABULARY for letter in text]})

    def decode(self, ids: torch.Tensor) -> str:
        return "".join(chr(64 + int(token)) for token in ids)


SHORT = ("--samples", "1", "--length", "64", "--new-tokens", "4", "--max-cache-len", "16")


def generated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What the example prints of a tiny model, as JSON."""
    tiny = SimpleNamespace(model=tiny_llama(), tokenizer=Letters())
    monkeypatch.setattr(generate, "load_model", lambda name: tiny)
    monkeypatch.setattr(sys, "argv", ["generate.py", *SHORT, "--json", *arguments])
    generate.main()
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


@pytest.mark.parametrize(
    ("preset", "bytes_a_code", "beside"),
    [("int8-kv-attn-head", 1, 0), ("int8-kv-token", 1, 4), ("int4-kproj-v", 0.5, 0)],
)
def test_generate_on_a_tiny_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], preset: str, bytes_a_code: float, beside: int
) -> None:
    options = ("--preset", preset, "--dtype", "float64", "--prompt", "one two", "--prompt", "and six")
    facts = generated(monkeypatch, capsys, *options)
    assert [text[:7] for text in facts["texts"]] == [Letters().decode(Letters()(t).input_ids) for t in options[5::2]]
    assert [len(text) for text in facts["texts"]] == [11, 11]
    assert facts["compared tokens"] == 8
    assert facts["top-1 agreement"] == 1
    assert 0 < facts["largest difference"] < 1e-12
    heads = 2 * 2 * 2 * 2 * 16  # of keys and of values, 2 layers, 2 rows, 2 heads, 16 tokens
    assert facts["cache bytes"] == heads * (8 * bytes_a_code + beside)
    assert facts["cache bytes in fp32"] == 2 * facts["cache bytes in bf16"] == heads * 8 * 4


def test_generate_keeps_the_first_layers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    facts = generated(monkeypatch, capsys, "--layers", "1", "--prompt-tokens", "10")
    assert facts["prompt tokens"] == 10
    assert facts["cache bytes"] == 2 * 2 * 16 * 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--prompt-tokens", "14"),
            "14 tokens of prompt and 4 new ones need a cache of 17 tokens, and --max-cache-len",
        ),
        (("--prompt-tokens", "65"), "--prompt-tokens 65 is beyond the 64 tokens of --length"),
        (("--prompt", "one", "--prompt", "three"), "the prompts have 3, 5 tokens"),
        (("--prompt", ""), "the prompts have 0 tokens"),
        (("--prompt", "one", "--prompt", "two", "--batch", "2"), "--batch 2 repeats one prompt, and there are 2"),
    ],
    ids=["too long", "no text", "of two lengths", "empty", "batch of two"],
)
def test_generate_refuses_before_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(gq, "capture", None)
    with pytest.raises(SystemExit) as raised:
        generated(monkeypatch, capsys, *arguments)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["--compile", "--lanes"])
def test_generate(tmp_path: Path, compiled: str) -> None:
    options = ("--layers", "2", "--samples", "1", "--length", "64", "--new-tokens", "4", "--max-cache-len", "32")
    printed = run("examples/generate.py", *options, "--batch", "2", compiled, cwd=tmp_path)
    assert printed.count("Python is a programming language that") == 2
    figures = dict(line.rsplit(maxsplit=1) for line in printed.splitlines()[-7:])
    assert float(figures["top-1 agreement"]) == 1
    assert float(figures["largest difference"]) < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == []
