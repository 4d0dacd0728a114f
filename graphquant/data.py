"""Text for calibration and evaluation: read it, tokenize it into rows of one length, split the rows, batch them.

Dims: N rows of S tokens, B rows a batch. A text is tokenized once and cut into rows, with no padding and the rest
dropped, so a row is the same tokens whatever the batch size and however many rows are used. Calibration and evaluation
rows alternate through the text (0, 4, 8, … and 1, 5, 9, …) and never overlap.
"""

import json
import os
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch

from graphquant.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STRIDE = 4  # SmolLM2's reference perplexity, 19.691, is that of rows 1, 5, …, 29 of 256 tokens of topics_text()


def topics_text() -> str:
    """Return the help topics of the running CPython, sorted by name: half a megabyte of English on every machine."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def read_text(path: str | os.PathLike[str], *, field: str = "text") -> str:
    """Return the text of a .txt file, or that of the `field`s of a .jsonl file's objects, joined by blank lines.

    Raises:
        DataError: the file is missing, empty, not UTF-8, of another kind, or a line of it has no such text.
    """
    path = Path(path)
    if path.is_dir():
        raise DataError(f"{path} is a folder: expected a .txt or .jsonl file")
    if path.suffix.lower() not in (".txt", ".jsonl"):
        raise DataError(
            f"{path} ends in {path.suffix!r}: expected a .txt file, or a .jsonl file with one object a line"
        )
    text = _decode(path)
    if path.suffix.lower() == ".jsonl":
        # Not splitlines(): U+2028 and its like may stand unescaped in a JSON string.
        lines = enumerate(text.split("\n"), start=1)
        text = "\n\n".join(_field_text(line, field, f"{path} line {number}") for number, line in lines if line.strip())
    if not text.strip():
        raise DataError(f"{path} holds no text: expected some to tokenize")
    return text


def token_rows(tokenizer: "PreTrainedTokenizerBase", text: str, length: int) -> torch.Tensor:
    """Tokenize `text` once and return its whole rows of `length` tokens: int64 [N, S].

    Raises:
        DataError: `length` is less than 1, or the text has fewer tokens than one row.
    """
    if length < 1:
        raise DataError(f"the row length is {length}: expected at least 1 token")
    # verbose=False: a whole text is longer than the model's maximum on purpose, and only its rows reach the model.
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
    count = ids.numel() // length
    if count == 0:
        raise DataError(f"the text has {ids.numel()} tokens and one row needs {length}: use more text or shorter rows")
    return ids[: count * length].view(count, length)


def split_rows(rows: torch.Tensor, calibration: int, evaluation: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return that many calibration rows (0, 4, 8, …) and evaluation rows (1, 5, 9, …) of [N, S], which never overlap.

    Where N is too small for steps of 4 the largest step that fits is taken, 3 or 2.

    Raises:
        DataError: a count is negative, or N is too small for steps of 2.
    """
    asked = f"{calibration} calibration and {evaluation} evaluation rows"
    if calibration < 0 or evaluation < 0:
        raise DataError(f"{asked} are asked for: expected 0 or more of each")
    for stride in range(_STRIDE, 1, -1):
        needed = max(stride * (calibration - 1) + 1, stride * (evaluation - 1) + 2, 0)
        if needed <= len(rows):
            return rows[::stride][:calibration], rows[1::stride][:evaluation]
    raise DataError(f"the text has {len(rows)} rows and {asked} need {needed}: use more text, or shorter or fewer rows")


def batches(rows: torch.Tensor, batch_size: int = 1) -> list[dict[str, torch.Tensor]]:
    """Return rows [N, S] as model inputs: `input_ids` and `attention_mask` (ones), int64 [B, S], fewer in the last.

    Raises:
        DataError: `batch_size` is less than 1.
    """
    if batch_size < 1:
        raise DataError(f"the batch size is {batch_size}: expected at least 1 row")
    parts = [rows[start : start + batch_size].to(torch.int64) for start in range(0, len(rows), batch_size)]
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in parts]


def _decode(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(f"{path} cannot be read ({reason}): expected a .txt or .jsonl file") from error
    try:
        return data.decode("utf-8-sig")  # a byte order mark is no text
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path} line {line} is not UTF-8 (byte 0x{data[error.start]:02x}): save it as UTF-8"
        ) from error


def _field_text(line: str, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not JSON ({error.msg} at column {error.colno}): expected one object a line"
        ) from error
    if not isinstance(record, dict):
        raise DataError(f"{where} holds a {type(record).__name__}: expected an object with a {field!r} field")
    if field not in record:
        raise DataError(
            f"{where} has no field {field!r}, only {', '.join(map(repr, record)) or 'none'}: name the field"
        )
    value = record[field]
    if not isinstance(value, str):
        raise DataError(f"{where} has a {type(value).__name__} in field {field!r}: expected a string")
    if any("\ud800" <= char <= "\udfff" for char in value):  # JSON's \ud83d alone: no tokenizer takes it
        raise DataError(f"{where} has half of a surrogate pair in field {field!r}: expected whole characters")
    return value
