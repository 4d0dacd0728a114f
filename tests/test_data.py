import json
import math
import platform
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from graphquant.data import batches, read_text, split_rows, token_rows, topics_text
from graphquant.errors import DataError
from graphquant.models import LoadedModel


def test_topics_text_is_sorted_and_large() -> None:
    text = topics_text()
    assert text.startswith('The "assert" statement')
    assert len(text) > 400_000
    assert text == topics_text()


def test_read_text_takes_a_txt_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffnaïve\r\n\n café \n".encode())
    assert read_text(path) == "naïve\r\n\n café \n"
    assert read_text(str(path)) == read_text(path)


def test_read_text_joins_the_fields_of_a_jsonl_file(tmp_path: Path) -> None:
    path = tmp_path / "a.JSONL"
    path.write_text('{"text": "one\u2028two", "id": 1}\r\n\n{"text": "three", "note": "n"}\n', encoding="utf-8")
    assert read_text(path) == "one\u2028two\n\nthree"
    path.write_text('{"text": "one", "note": "n"}', encoding="utf-8")
    assert read_text(path, field="note") == "n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", None, "{path} cannot be read (No such file or directory): expected a .txt or .jsonl file"),
        ("a.csv", b"x", "{path} ends in '.csv': expected a .txt file, or a .jsonl file with one object a line"),
        ("a", b"x", "{path} ends in '': expected a .txt file, or a .jsonl file with one object a line"),
        ("a.txt", b"", "{path} holds no text: expected some to tokenize"),
        ("a.txt", b" \n", "{path} holds no text: expected some to tokenize"),
        ("a.jsonl", b"\n\n", "{path} holds no text: expected some to tokenize"),
        ("a.jsonl", b'{"text": ""}', "{path} holds no text: expected some to tokenize"),
        ("a.txt", b"one\ntwo \xe9\n", "{path} line 2 is not UTF-8 (byte 0xe9): save it as UTF-8"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text"\n',
            "{path} line 2 is not JSON (Expecting ':' delimiter at column 8): expected one object a line",
        ),
        ("a.jsonl", b"[1]", "{path} line 1 holds a list: expected an object with a 'text' field"),
        (
            "a.jsonl",
            b'\n{"body": "x", "id": 1}',
            "{path} line 2 has no field 'text', only 'body', 'id': name the field",
        ),
        ("a.jsonl", b"{}", "{path} line 1 has no field 'text', only none: name the field"),
        ("a.jsonl", b'{"text": null}', "{path} line 1 has a NoneType in field 'text': expected a string"),
        (
            "a.jsonl",
            b'{"text": "\\ud83d"}',
            "{path} line 1 has half of a surrogate pair in field 'text': expected whole characters",
        ),
    ],
)
def test_read_text_says_what_is_wrong(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_text(path)
    assert str(caught.value) == message.format(path=path)


def test_read_text_refuses_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "folder.txt"
    path.mkdir()
    with pytest.raises(DataError) as caught:
        read_text(path)
    assert str(caught.value) == f"{path} is a folder: expected a .txt or .jsonl file"


def test_read_text_takes_a_whole_surrogate_pair(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "\N{GRINNING FACE}"}))
    assert "\\ud83d" in path.read_text()
    assert read_text(path) == "\N{GRINNING FACE}"


def test_token_rows_cuts_whole_rows(
    tiny_tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = token_rows(tiny_tokenizer, "the quick brown fox jumps over a lazy dog . the", 5)
    assert rows.dtype == torch.int64
    assert rows.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert capsys.readouterr().err == ""  # no word of the model's maximum of 4 tokens


@pytest.mark.parametrize(("text", "count"), [("", 0), ("the quick", 2)])
def test_token_rows_refuses_a_short_text(tiny_tokenizer: PreTrainedTokenizerFast, text: str, count: int) -> None:
    with pytest.raises(DataError) as caught:
        token_rows(tiny_tokenizer, text, 3)
    assert str(caught.value) == f"the text has {count} tokens and one row needs 3: use more text or shorter rows"


def test_token_rows_refuses_an_empty_row(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError) as caught:
        token_rows(tiny_tokenizer, "the quick", 0)
    assert str(caught.value) == "the row length is 0: expected at least 1 token"


@pytest.mark.parametrize(
    ("count", "calibration", "evaluation", "first", "second"),
    [
        (32, 8, 8, [0, 4, 8, 12, 16, 20, 24, 28], [1, 5, 9, 13, 17, 21, 25, 29]),
        (100, 2, 3, [0, 4], [1, 5, 9]),
        (10, 3, 3, [0, 4, 8], [1, 5, 9]),
        (9, 3, 3, [0, 3, 6], [1, 4, 7]),
        (9, 3, 2, [0, 4, 8], [1, 5]),
        (7, 3, 3, [0, 2, 4], [1, 3, 5]),
        (6, 3, 3, [0, 2, 4], [1, 3, 5]),
        (5, 3, 0, [0, 2, 4], []),
        (2, 0, 1, [], [1]),
        (1, 1, 0, [0], []),
        (0, 0, 0, [], []),
    ],
)
def test_split_rows(count: int, calibration: int, evaluation: int, first: list[int], second: list[int]) -> None:
    rows = torch.arange(count)[:, None].expand(count, 3)
    parts = split_rows(rows, calibration, evaluation)
    assert [part[:, 0].tolist() for part in parts] == [first, second]
    assert all(part.shape[1] == 3 for part in parts)


@pytest.mark.parametrize(
    ("count", "calibration", "evaluation", "needed"), [(5, 3, 3, 6), (4, 3, 0, 5), (1, 0, 1, 2), (0, 1, 0, 1)]
)
def test_split_rows_refuses_too_few(count: int, calibration: int, evaluation: int, needed: int) -> None:
    with pytest.raises(DataError) as caught:
        split_rows(torch.zeros(count, 2), calibration, evaluation)
    assert str(caught.value) == (
        f"the text has {count} rows and {calibration} calibration and {evaluation} evaluation rows need {needed}:"
        " use more text, or shorter or fewer rows"
    )


def test_split_rows_refuses_a_negative_count() -> None:
    with pytest.raises(DataError) as caught:
        split_rows(torch.zeros(9, 2), -1, 2)
    assert str(caught.value) == "-1 calibration and 2 evaluation rows are asked for: expected 0 or more of each"


def test_batches() -> None:
    rows = torch.arange(15).view(5, 3)
    parts = batches(rows, 2)
    assert [part["input_ids"].shape[0] for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), rows)
    for part in parts:
        assert set(part) == {"input_ids", "attention_mask"}
        assert part["attention_mask"].dtype == part["input_ids"].dtype == torch.int64
        assert torch.equal(part["attention_mask"], torch.ones_like(part["input_ids"]))
    assert len(batches(rows)) == 5
    assert batches(rows[:0]) == []


def test_batches_refuses_an_empty_batch() -> None:
    with pytest.raises(DataError) as caught:
        batches(torch.zeros(2, 2), 0)
    assert str(caught.value) == "the batch size is 0: expected at least 1 row"


@pytest.mark.slow
def test_smollm2_perplexity_on_the_topics(smollm2: LoadedModel) -> None:
    text = topics_text()
    ids = smollm2.tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    rows = token_rows(smollm2.tokenizer, text, 256)
    assert torch.equal(rows, ids[: len(ids) // 256 * 256].view(-1, 256))
    assert len(ids) > 100_000
    _, evaluation = split_rows(rows, 8, 8)
    losses = []
    with torch.no_grad():
        for batch in batches(evaluation):
            logits = smollm2.model(**batch, use_cache=False).logits
            losses.append(F.cross_entropy(logits[0, :-1], batch["input_ids"][0, 1:]).item())
    perplexity = math.exp(sum(losses) / len(losses))
    assert 15 < perplexity < 25
    if platform.python_version() == "3.11.7":  # the topics, and so the tokens, differ between versions
        assert len(ids) == 113_108
        assert perplexity == pytest.approx(19.691, abs=1e-3)
