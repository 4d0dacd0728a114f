"""``graphquant backends`` and ``graphquant compile``."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from graphquant.cli.compile import _limited, _TimeIsOver
from graphquant.errors import LowerError
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
    assert {listed["settings"][0][name] for name in ("inductor", "onnxruntime", "openvino", "executorch")} == {"all"}
    assert listed["settings"][0]["format"] == "int8 sym"
    assert "refused" in run("backends", "--format", "github").stdout


@pytest.mark.slow
def test_compile_writes_an_artifact_and_says_what_was_lowered(workspace: Workspace, here: Path) -> None:
    arguments = ("compile", workspace.quantized, "--backend", "openvino", "--output", "m.xml")
    printed = json.loads(run(*arguments, "--json").stdout)
    assert {path.name for path in here.iterdir()} == {"m.xml", "m.bin"}
    assert (printed["backend"], printed["pairs"], printed["arithmetic"], printed["checked"]) == ("openvino", 2, 2, True)
    strict = error_of(*arguments, "--tolerance", "1e-12")
    assert strict.startswith("backend 'openvino' computes something else: ")
    assert "of the largest output, where 1e-12 is allowed, on input_ids int64" in strict
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


def dropping(more_seconds: float) -> None:
    """A compiler that catches everything, and goes on."""
    try:
        time.sleep(60)
    except _TimeIsOver:
        time.sleep(more_seconds)


@pytest.mark.parametrize("more_seconds", [60, 0])
def test_a_time_out_that_the_compiler_drops_is_still_one(more_seconds: float) -> None:
    with pytest.raises(LowerError, match=r"^the compiler was not done after 1 s"), _limited(1):
        dropping(more_seconds)


def test_a_compiler_that_never_comes_back_to_python_is_ended() -> None:
    script = (
        "import ctypes, signal\n"
        "import graphquant.cli.compile, sys\n"
        "module = sys.modules['graphquant.cli.compile']; module.GRACE = 1\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n"
        "with module._limited(1):\n"
        "    ctypes.CDLL(None).sleep(60)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last == "error: the compiler was not done after 1 s: give a longer --timeout, or none"
