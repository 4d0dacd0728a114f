"""The checks of docs/models.md, run for a part of the table: every family, and more forms where they differ."""

from pathlib import Path

import pytest
from families import FAMILIES
from family_table import CACHES, FORMS, HEADERS, WORKS, check

DOCUMENT = (Path(__file__).parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
EVERY_FORM = ("Llama", "Gemma-3n", "DeepSeek-V3", "GPT-NeoX")
CORE = ("Phi-3", "Gemma-3", "Cohere", "GPT-2", "gpt-oss")
CACHED = ("Phi", "SmolLM3")
CHECKS = [
    (name, cache, implementation, decomposed)
    for name in FAMILIES
    for cache in CACHES
    for implementation, decomposed in FORMS
    if (name in EVERY_FORM and (implementation == "sdpa" or not decomposed))
    or (cache is None and not decomposed)
    or (name in CORE and cache is None and implementation == "eager")
    or (name in CACHED and not decomposed and implementation == "sdpa")
]


def documented(name: str) -> dict[str | None, str]:
    """The marks of a family's line in the document, by cache: one for each of FORMS."""
    (line,) = (line for line in DOCUMENT.splitlines() if line.startswith(f"| {name} "))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert len(cells) == len(HEADERS)
    return dict(zip(CACHES, cells[-len(CACHES) :], strict=True))


@pytest.mark.parametrize(
    ("name", "cache", "implementation", "decomposed"),
    CHECKS,
    ids=lambda value: {True: "core", False: "training", None: "no cache"}.get(value, value),
)
def test_a_cell_of_the_table(name: str, cache: str | None, implementation: str, decomposed: bool) -> None:
    reason = check(FAMILIES[name], implementation, decomposed, cache)
    mark = documented(name)[cache][FORMS.index((implementation, decomposed))]
    assert (mark == WORKS) == (reason == "")
    assert reason in DOCUMENT


def test_the_table_has_every_family_and_no_other() -> None:
    lines = [line for line in DOCUMENT.splitlines() if line.startswith("| ") and WORKS in line]
    assert [line.split("|")[1].strip() for line in lines] == list(FAMILIES)
