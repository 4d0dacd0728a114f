"""The checks of docs/models.md, run for a part of the table: every family, and more forms where they differ."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from family_table import CACHES, FORMS, HEADERS, WORKS, check

DOCUMENT = (Path(__file__).parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
FAST = ("Llama", "Gemma-3", "DeepSeek-V3", "GPT-2")
"""Those that the fast tests check, each in its first form."""
CORE = ("Llama", "Phi-3", "Gemma-3", "DeepSeek-V3", "GPT-2", "gpt-oss")
"""Those whose attention is checked in the other implementation and in core ATen too."""


def _forms(name: str) -> list[tuple[str, bool]]:
    first = "eager" if FAMILIES[name].fused else "sdpa"
    others = [("eager", False), (first, True)] if name in CORE else []
    return list(dict.fromkeys([(first, False), *others]))


FORMS_OF = {name: _forms(name) for name in FAMILIES}


def documented(name: str) -> dict[str | None, str]:
    """The marks of a family's line in the document, by cache: one for each of FORMS."""
    (line,) = (line for line in DOCUMENT.splitlines() if line.startswith(f"| {name} "))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert len(cells) == len(HEADERS)
    return dict(zip(CACHES, cells[-len(CACHES) :], strict=True))


def check_cell(name: str, cache: str | None, implementation: str, decomposed: bool) -> None:
    reason = check(FAMILIES[name], implementation, decomposed, cache)
    mark = documented(name)[cache][FORMS.index((implementation, decomposed))]
    assert (mark == WORKS) == (reason == "")
    assert reason in DOCUMENT


def _cells() -> Iterator[Any]:
    for name in FAMILIES:
        for index, form in enumerate(FORMS_OF[name]):
            yield pytest.param(name, *form, marks=[] if name in FAST and index == 0 else pytest.mark.slow)


@pytest.mark.parametrize(("name", "implementation", "decomposed"), _cells())
def test_a_cell_without_a_cache(name: str, implementation: str, decomposed: bool) -> None:
    check_cell(name, None, implementation, decomposed)


def test_the_table_has_every_family_and_no_other() -> None:
    lines = [line for line in DOCUMENT.splitlines() if line.startswith("| ") and WORKS in line]
    assert [line.split("|")[1].strip() for line in lines] == list(FAMILIES)
