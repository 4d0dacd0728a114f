"""``graphquant decode``: from a model and saved statistics to a program with a cache."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.export import ExportedProgram

import graphquant as gq
from graphquant.loops import runnable
from graphquant.models import load_model
from tests.cli.running import Workspace, error_of, run, usage_error_of

IDS = torch.arange(1, 7)[None]
STATIC = ("--max-cache-len", 16)
FORMS = [
    ((), {"cache": "static", "max_cache_len": 16}, ""),
    (("--batch", 2, "--attention", "packed"), {"cache": "static", "max_cache_len": 16, "batch": 2}, "ps"),
    (("--sequence", 1, "--attention", "lanes"), {"cache": "static", "max_cache_len": 16}, "1psf"),
]


def arguments(workspace: Workspace, *more: object, preset: str = "int8-kv-attn-head") -> tuple[object, ...]:
    settings = ("--preset", preset, "--calibration", workspace.calibration)
    return ("decode", workspace.model, *settings, "--output", "decode.pt2", *more)


def steps(program: ExportedProgram, rows: int = 1) -> list[torch.Tensor]:
    module = runnable(program)
    ids = IDS.repeat(rows, 1)
    with torch.no_grad():
        return [module(input_ids=ids[:, at : at + 1], cache_position=torch.tensor([at])) for at in range(ids.shape[1])]


@pytest.mark.parametrize(("options", "captured", "passes"), FORMS)
def test_what_is_saved_is_what_the_functions_make(
    workspace: Workspace, here: Path, options: tuple[object, ...], captured: dict[str, object], passes: str
) -> None:
    result = run(*arguments(workspace, *STATIC, *options))
    assert "model.layers.0.self_attn.key_states" in result.stdout
    assert "int8 key_cache_0 [" in " ".join(result.stdout.split())
    saved = torch.export.load(here / "decode.pt2")
    model = load_model(str(workspace.model)).model
    expected = gq.convert(
        gq.capture(model, **captured),
        gq.Calibration.load(workspace.calibration),
        gq.preset("int8-kv-attn-head"),
        kv_cache="stored",
    )
    one = partial(gq.specialize, sequence=1)
    for letter, change in {"1": one, "p": gq.pack_gqa, "s": gq.fold_scales, "f": gq.fuse_decode}.items():
        expected = change(expected) if letter in passes else expected
    rows = int(captured.get("batch", 1))  # type: ignore[call-overload]
    for found, wanted in zip(steps(saved, rows), steps(expected, rows), strict=True):
        torch.testing.assert_close(found, wanted)
    assert saved.constants["key_cache_0"].dtype == torch.int8
    assert saved.constants["key_cache_0"].shape == expected.constants["key_cache_0"].shape
    assert (saved.constants["key_cache_0"].dim() == 6) == ("f" in passes)


def test_a_cache_of_inputs_and_one_of_values(workspace: Workspace, here: Path) -> None:
    asked = arguments(workspace, "--cache", "inputs", "--sequence", 1, "--json", preset="int8-kv-token")
    inputs = json.loads(run(*asked).stdout)
    assert {row["strategy"] for row in inputs["rows"]} == {"token"}
    assert "past_key_values" in torch.export.load(here / "decode.pt2").graph_signature.user_inputs[2]
    run(*arguments(workspace, *STATIC, "--kv-cache", "float", "--attention", "packed"))
    assert torch.export.load(here / "decode.pt2").constants["key_cache_0"].dtype == torch.float32


def test_what_decode_refuses(workspace: Workspace, here: Path) -> None:
    assert "give --max-cache-len" in usage_error_of(*arguments(workspace))
    assert "of any size: leave it out" in usage_error_of(*arguments(workspace, "--cache", "inputs", *STATIC))
    assert "of any size: leave it out" in usage_error_of(*arguments(workspace, "--cache", "inputs", "--batch", 2))
    for wrong in ((), ("--sequence", 2), ("--sequence", 1, "--kv-cache", "float")):
        refused = usage_error_of(*arguments(workspace, *STATIC, "--attention", "lanes", *wrong))
        assert "lanes are of one token a step over a static cache of codes" in refused
    other = ("decode", workspace.captured, *arguments(workspace)[2:], *STATIC)
    assert error_of(*other).endswith("what is to have a cache is captured anew: name its model")
    assert "has no statistics" in error_of(*arguments(workspace, *STATIC, preset="int8-qkv-attn-head"))
    settings = ("--preset", "int8-kv-tensor", "--calibration", "none.pt2", "--output")
    assert "none.pt2" in error_of("decode", workspace.model, *settings, "decode.pt2", *STATIC)
    overwritten = error_of("decode", workspace.model, *settings, "none.pt2", *STATIC)
    assert overwritten == "cannot write none.pt2: it is an input of this command; give another path"


@pytest.mark.slow
def test_compile_checks_the_steps_of_what_decode_saved(workspace: Workspace, here: Path) -> None:
    run(*arguments(workspace, *STATIC, "--sequence", 1, "--attention", "lanes"))
    printed = json.loads(run("compile", "decode.pt2", "--backend", "inductor", "--contract", "--json").stdout)
    assert (printed["pairs"], printed["checked"], printed["file"]) == (2, True, "decode.inductor.pt2")
    assert {path.name for path in here.iterdir()} == {"decode.pt2", "decode.inductor.pt2"}
    refused = error_of("compile", "decode.pt2", "--backend", "executorch", "--contract", "--no-check")
    assert "has no option contract" in refused
