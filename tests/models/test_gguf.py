import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from graphquant.models import cache as cache_module
from graphquant.models import fetch_smollm2, load_model
from tests.models.helpers import Q_PROJ, error_of, same_weights


def test_a_gguf_file_is_dequantized_once(
    folder: Path, gguf_file: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_model(gguf_file)
    assert capsys.readouterr().err.splitlines() == [
        "graphquant: dequantizing tiny.gguf to float32 (once, half a minute for 135M)"
    ]
    assert loaded.name == "tiny"
    assert not hasattr(loaded.model.config, "quantization_config")
    loaded.model.save_pretrained(folder.with_name("saved"))
    capsys.readouterr()  # that drew a bar
    again = load_model(str(gguf_file), dtype=torch.float16)
    assert capsys.readouterr().err == ""
    assert same_weights(again.model, loaded.model.half())
    assert again.tokenizer("abc")["input_ids"] == loaded.tokenizer("abc")["input_ids"]
    os.utime(gguf_file, ns=(1, 1))
    load_model(gguf_file)
    assert len(list((cache / "converted").iterdir())) == 2


def test_the_copy_of_a_gguf_file_is_the_file(gguf_file: Path) -> None:
    direct = transformers.AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    assert same_weights(load_model(gguf_file).model, direct)


def test_an_interrupted_conversion_leaves_nothing(
    gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Any, folder: Path, **options: Any) -> None:
        assert (folder / "model.safetensors").is_file()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load_model(gguf_file)
    assert list((cache / "converted").iterdir()) == []
    (cache / "converted" / "tmp-killed" / "new").mkdir(parents=True)  # what a killed process leaves is not looked at
    assert load_model(gguf_file).name == "tiny"


def test_a_conversion_that_comes_second_takes_the_first(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, published = cache_module._publish, []

    def come_second(fresh: Path, copy: Path) -> None:
        shutil.copytree(fresh, copy)
        (copy / "first").touch()
        publish(fresh, copy)
        published.append(copy)

    monkeypatch.setattr(cache_module, "_publish", come_second)
    load_model(gguf_file)
    assert (published[0] / "first").is_file()
    assert len(list(published[0].parent.iterdir())) == 1


def test_a_copy_that_lost_a_file_is_written_again(gguf_file: Path, cache: Path) -> None:
    load_model(gguf_file)
    (copy,) = (cache / "converted").iterdir()
    (copy / "model.safetensors").unlink()
    load_model(gguf_file)
    assert list((cache / "converted").iterdir()) == [copy]


def test_a_gguf_file_that_lacks_a_weight(gguf_file: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes().replace(b"blk.1.attn_q.weight", b"blk.1.attn_Q.weight"))
    expected = f"tiny.gguf: missing weights for its config (1, the first {Q_PROJ}): get or save the model again"
    assert error_of(lambda: load_model(gguf_file)) == expected


@pytest.mark.slow
def test_two_processes_convert_at_once(gguf_file: Path, cache: Path) -> None:
    code = f"from graphquant.models import load_model; load_model({str(gguf_file)!r})"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert len(list((cache / "converted").iterdir())) == 1


def test_a_cache_that_cannot_be_written(gguf_file: Path, cache: Path) -> None:
    cache.touch()
    for call, name in ((lambda: load_model(gguf_file), "converted"), (fetch_smollm2, "smollm2")):
        expected = f"cannot write to the cache folder {cache / name} (NotADirectoryError: [Errno 20] Not a directory: "
        message = error_of(call)
        assert message.startswith(expected)
        assert message.endswith("): set GRAPHQUANT_CACHE to a folder with room")


@pytest.mark.parametrize("size", [0, 3, 100, -100])
def test_a_truncated_gguf_file(gguf_file: Path, size: int) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:size])
    expected = f"cannot read {gguf_file} as GGUF: expected a whole file, of an architecture that transformers knows ("
    assert error_of(lambda: load_model(gguf_file)).startswith(expected)


def test_a_gguf_file_without_tokenizer(gguf_file: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"))
    expected = f"{gguf_file} holds no usable tokenizer: load the model from a folder that has one ("
    assert error_of(lambda: load_model(gguf_file)).startswith(expected)
