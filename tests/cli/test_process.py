"""The command as people run it: another process, another working directory, no network."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import Workspace

COMMAND = (str(Path(sys.executable).with_name("graphquant")),)
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def start(*args: object, command: tuple[str, ...] = COMMAND) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, *map(str, args)], text=True, env=ENVIRONMENT, **pipes)  # type: ignore[call-overload,no-any-return]


def run(*args: object, command: tuple[str, ...] = COMMAND) -> tuple[int, str, str]:
    process = start(*args, command=command)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.mark.slow
def test_json_is_all_that_a_process_writes_to_stdout(workspace: Workspace, here: Path) -> None:
    arguments = ("--preset", "int8-kv-tensor", "--output", "out.pt2", "--evaluate", "--json", *workspace.data)
    code, out, err = run("quantize", workspace.model, *arguments)
    assert code == 0, err
    assert json.loads(out)["coverage"]["tensors"] == 2
    assert [line.split()[0] for line in err.splitlines()][:2] == ["loading", "capturing"]
    assert [path.name for path in here.iterdir()] == ["out.pt2"]


def test_an_unknown_model_without_a_network(here: Path) -> None:
    code, out, err = run("sites", "nobody/nothing", "--quiet", command=(sys.executable, "-m", "graphquant"))
    assert (code, out) == (1, "")
    assert err.startswith("error: cannot load 'nobody/nothing' as a hub id (offline: HF_HUB_OFFLINE is set")
    assert err.count("\n") == 1


def test_a_damaged_program_leaves_no_log_of_torch(workspace: Workspace, here: Path) -> None:
    whole = workspace.quantized.read_bytes()
    (here / "half.pt2").write_bytes(whole[: len(whole) // 2])
    code, out, err = run("report", "half.pt2", "--quiet")
    assert (code, out) == (1, "")
    assert err.startswith("error: half.pt2 is damaged")
    assert err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(workspace: Workspace, here: Path, number: signal.Signals) -> None:
    process = start(*workspace.quantize()[:-4], "--samples", 400, "--length", 64)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("calibrating"):
            break
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "error: interrupted; nothing was written"
    assert list(here.iterdir()) == []


@pytest.mark.slow
def test_a_reader_that_stops_early_sees_no_traceback(workspace: Workspace) -> None:
    with start("sites", workspace.captured, "--json", "--quiet") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(workspace: Workspace, here: Path) -> None:
    # torch's C++ writer calls std::terminate if an error passes through it.
    script = here / "limited.py"
    script.write_text(
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "import torch; torch.set_num_threads(1)\n"
        "from graphquant.cli import app; app()\n"
    )
    done = run(*workspace.quantize(), "--no-measure", "--quiet", command=(sys.executable, str(script)))
    assert done == (1, "", "error: cannot write out.pt2: File too large\n")
    assert [path.name for path in here.iterdir()] == ["limited.py"]


@pytest.mark.slow
def test_smollm2_offline(here: Path) -> None:
    arguments = (
        "--preset",
        "int4-kproj-v",
        "--output",
        "out.pt2",
        "--samples",
        1,
        "--length",
        64,
        "--evaluate",
        "--json",
    )
    code, out, err = run("quantize", "smollm2", *arguments)
    assert code == 0, err
    data = json.loads(out)
    assert data["coverage"]["tensors"] == 60
    assert data["evaluation"]["results"]["quantized"]["kl"] < 0.5
    code, out, err = run("report", "out.pt2", "--limit", 3)
    assert code == 0, err
    assert "57 of 60 rows left out" in out
