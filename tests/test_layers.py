"""The house, checked: who may import what, who may edit graphs, how large a room may be."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import graphquant as gq

PACKAGE = Path(gq.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
EDITS = {"create_node", "erase_node", "replace_input_with", "replace_all_uses_with", "call_function", "get_attr"}
HOMES = {"transformers": {"capture", "models"}, "huggingface_hub": {"models"}, "typer": {"cli"}}
"""The parts of the package that import a library when they run."""


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """Modules that a file imports, and whether it does so at the top."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from ((name, id(node) in top) for name in names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_numerics_observers_and_config_know_no_graph(path: Path) -> None:
    names = {name for name, _ in imported(path)}
    if part(path) in ("numerics", "observers", "config"):
        assert not {name for name in names if name.startswith(("torch.fx", "torch.export"))}
    if part(path) != "models":  # elsewhere within a function, or for type checkers only
        assert not {name for name, top in imported(path) if top and name.split(".")[0] == "transformers"}


class _Runtime(ast.NodeTransformer):
    """Leaves out what only type checkers read."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return None
        return self.generic_visit(node)


@pytest.mark.parametrize("library", HOMES)
def test_a_library_has_a_home(library: str) -> None:
    users = set()
    for path in FILES:
        for node in ast.walk(_Runtime().visit(ast.parse(path.read_text(encoding="utf-8")))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            users |= {part(path) for name in names if name.split(".")[0] == library}
    assert users == HOMES[library]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_passes_edits_graphs(path: Path) -> None:
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    if part(path) != "passes" and path.name != "onnx_graph.py":  # which edits ONNX's graphs, not torch's
        assert not called & EDITS


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_are_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 260
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 50, f"{node.name} is long"


def test_importing_graphquant_imports_no_model_library() -> None:
    code = "import sys, graphquant; print([m for m in ('transformers', 'gguf', 'typer') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", gq.__all__)
def test_public_names_are_documented(name: str) -> None:
    thing = getattr(gq, name)
    assert inspect.getdoc(thing)
    if inspect.isfunction(thing) and "raise " in inspect.getsource(thing):
        assert "Raises:" in (inspect.getdoc(thing) or "")
