"""``graphquant backends`` and ``graphquant compile``."""

import json
from pathlib import Path

import pytest

from tests.cli.running import Workspace, error_of, run


def test_backends_are_listed() -> None:
    listed = json.loads(run("backends", "--json").stdout)
    assert [row["backend"] for row in listed["backends"]] == [
        "inductor",
        "onnxruntime",
        "openvino",
        "executorch",
        "iree",
    ]
    assert listed["settings"][0] | {"iree": ""} == {
        "format": "int8", "inductor": "all", "onnxruntime": "all", "openvino": "all", "executorch": "all", "iree": ""
    }  # fmt: skip
    assert "refused" in run("backends", "--format", "github").stdout


@pytest.mark.slow
def test_compile_writes_an_artifact_and_says_what_was_lowered(workspace: Workspace, here: Path) -> None:
    arguments = ("compile", workspace.quantized, "--backend", "openvino", "--output", "m.xml")
    printed = json.loads(run(*arguments, "--json").stdout)
    assert {path.name for path in here.iterdir()} == {"m.xml", "m.bin"}
    assert (printed["backend"], printed["pairs"], printed["arithmetic"], printed["checked"]) == ("openvino", 2, 2, True)
    text = run(*arguments, "--no-check").stdout
    assert "nothing here runs in int8" in text
    assert text.splitlines()[-1].startswith("saved m.xml after")


def test_what_compile_refuses(workspace: Workspace, here: Path) -> None:
    assert "unknown backend 'tensorrt'" in error_of("compile", workspace.quantized, "--backend", "tensorrt")
    wrong = error_of("compile", workspace.quantized, "--backend", "openvino", "--output", "m.onnx")
    assert wrong.endswith("expected a name that ends in .xml")
    assert "does not exist" in error_of("compile", "none.pt2", "--backend", "inductor")


@pytest.mark.slow
def test_a_time_out_leaves_nothing(workspace: Workspace, here: Path) -> None:
    late = error_of("compile", workspace.quantized, "--backend", "onnxruntime", "--output", "m.onnx", "--timeout", 1)
    assert late == "the compiler was not done after 1 s: give a longer --timeout, or none"
