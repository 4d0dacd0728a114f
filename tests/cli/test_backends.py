"""``graphquant backends`` and ``graphquant compile``."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from graphquant.backends import BACKENDS
from graphquant.cli.compile import _limited
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
    assert strict.startswith("backend 'openvino' computes something else on input_ids int64 [2, 8]")
    assert "of the largest output, where 1e-12 is allowed; " in strict
    text = run(*arguments, "--no-check").stdout
    assert "nothing here runs in int8" in text
    assert text.splitlines()[-1].startswith("saved m.xml after")


def test_what_compile_refuses(workspace: Workspace, here: Path) -> None:
    assert "unknown backend 'tensorrt'" in error_of("compile", workspace.quantized, "--backend", "tensorrt")
    wrong = error_of("compile", workspace.quantized, "--backend", "openvino", "--output", "m.onnx")
    assert wrong.endswith("expected a name that ends in .xml")
    assert "does not exist" in error_of("compile", "none.pt2", "--backend", "inductor")


def test_a_time_out_leaves_nothing(workspace: Workspace, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKENDS["onnxruntime"], "compile", lambda *_: time.sleep(60))
    late = error_of("compile", workspace.quantized, "--backend", "onnxruntime", "--output", "m.onnx", "--timeout", 1)
    assert late == "the compiler was not done after 1 s: give a longer --timeout, or none"


def dropping(more_seconds: float) -> None:
    """A compiler that catches everything, and goes on."""
    try:
        time.sleep(60)
    except BaseException:
        time.sleep(more_seconds)


def translating(_: float) -> None:
    """One that makes another error of it."""
    try:
        time.sleep(60)
    except BaseException as error:
        raise RuntimeError("codegen failed") from error


@pytest.mark.parametrize(("compiler", "more_seconds"), [(dropping, 60), (dropping, 0), (translating, 0)])
def test_a_time_out_that_the_compiler_catches_is_still_one(
    monkeypatch: pytest.MonkeyPatch, compiler: Callable[[float], None], more_seconds: float
) -> None:
    monkeypatch.setattr(sys.modules["graphquant.cli.compile"], "GRACE", 300)
    with pytest.raises(LowerError, match=r"^the compiler was not done after 1 s"), _limited(1):
        compiler(more_seconds)
    before = signal.getsignal(signal.SIGALRM)
    assert before in (signal.SIG_DFL, signal.SIG_IGN)


def test_what_fails_in_time_fails_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError, match="its own"), _limited(60):
        raise KeyError("its own")


def test_a_compiler_that_never_comes_back_to_python_is_ended() -> None:
    """It holds Python's lock all the while."""
    script = (
        "import itertools, sys, graphquant.cli.compile\n"
        "module = sys.modules['graphquant.cli.compile']; module.GRACE = 1\n"
        "with module._limited(1):\n"
        "    sum(itertools.repeat(1, 10**12))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert ended.returncode == -signal.SIGKILL
    last = ended.stderr.splitlines()[-1]
    assert last == "error: the compiler was not done after 1 s: give a longer --timeout, or none"
