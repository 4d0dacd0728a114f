"""Every Python block of the README and the docs runs, in order, in one namespace a page."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [path for path in sorted(ROOT.glob("docs/**/*.md")) if "```python" in path.read_text(encoding="utf-8")]
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def run(page: Path) -> None:
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks(page)):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(page)


def test_there_are_pages_with_code() -> None:
    assert {"config", "sites", "numerics", "convert"} <= {page.stem for page in PAGES}


@pytest.mark.slow
def test_readme_runs_on_the_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    run(ROOT / "README.md")
    printed = capsys.readouterr().out
    assert "model_layers_29_self_attn_value_states_dequantize" in printed


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    dead = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert dead == []


def test_navigation_lists_every_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    missing = [
        name for path in ROOT.glob("docs/**/*.md") if (name := str(path.relative_to(ROOT / "docs"))) not in navigation
    ]
    assert missing == []


@pytest.mark.parametrize("command", ["demo", "test", "slow", "lint", "bench", "table"])
def test_makefile_has_the_targets_that_are_documented(command: str) -> None:
    shown = subprocess.run(["make", "-n", command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.strip()
