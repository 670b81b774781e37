"""The house: rooms that hold little, names that say one thing, and imports that run down."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import draftree

PACKAGE = Path(draftree.__file__).parent
FLOORS = [
    ["errors", "installation", "importing", "progress", "artifacts", "tree", "sandbox"],
    ["text"],
    ["sampling"],
    ["config", "scores"],
    ["models", "draws"],
    ["request"],
    ["policies"],
    ["drafters"],
    ["papers"],
    ["verify"],
    ["engine"],
    ["page"],
    ["beams"],
    ["integrations"],
    ["public"],
    ["train"],
    ["bench"],
    ["openai"],
    ["server"],
    ["cli"],
]
"""From the lowest: a room or a module of the root imports from its own floor and from those below."""
ANYWHERE = {"base", "__init__", "__main__"}


def _modules() -> dict[str, ast.Module]:
    paths = {p: ".".join(p.relative_to(PACKAGE).with_suffix("").parts) for p in sorted(PACKAGE.rglob("*.py"))}
    return {name: ast.parse(path.read_text()) for path, name in paths.items()}


MODULES = _modules()


def _imports(name: str) -> set[str]:
    """Modules of the package that a module imports, wherever in its text."""
    found: set[str] = set()
    package = name.split(".")[:-1]

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                inner = ".".join([*base, alias.name])
                found.add(inner if inner in MODULES else ".".join(base))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(MODULES[name])
    return found & MODULES.keys()


def _floor(name: str) -> int:
    of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    parts = name.split(".")
    return next(of[room] for n in range(len(parts), 0, -1) if (room := ".".join(parts[:n])) in of)


def test_a_room_has_at_most_thirteen_modules() -> None:
    rooms = Counter(name.rpartition(".")[0] for name in MODULES if name.split(".")[-1] != "__init__")
    assert not {room: n for room, n in rooms.items() if n > 13}


def test_a_module_has_at_most_450_lines() -> None:
    root = Path(__file__).parents[1]
    paths = [path for folder in (PACKAGE, root / "benchmarks", root / "tests") for path in folder.rglob("*.py")]
    assert not {p.name: n for p in paths if (n := len(p.read_text().splitlines())) > 450}


def test_no_file_name_stands_twice() -> None:
    names = Counter(name.split(".")[-1] for name in MODULES)
    assert not {n for n, times in names.items() if times > 1 and n not in ANYWHERE}


def test_no_class_name_stands_twice() -> None:
    classes = Counter(node.name for tree in MODULES.values() for node in tree.body if isinstance(node, ast.ClassDef))
    assert not {n for n, times in classes.items() if times > 1}


def test_imports_run_down() -> None:
    inner = [name for name in MODULES if name not in ("__init__", "__main__")]
    assert not [(n, found) for n in inner for found in _imports(n) if _floor(found) > _floor(n)]


TORCH = ["models.huggingface.", "models.heads.", "integrations.", "train.", "bench."]
"""Rooms that may import torch as they are loaded; all others work on NumPy arrays and lists."""


def test_torch_is_imported_where_it_computes() -> None:
    for name, tree in MODULES.items():
        if name.startswith(tuple(TORCH)):
            continue
        for node in tree.body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not [n for n in names if n.split(".")[0] in ("torch", "transformers")], name


def test_drafters_know_no_torch() -> None:
    """Not even lazily, or for typing: models give them arrays."""
    for name, tree in MODULES.items():
        if name.startswith("drafters."):
            nodes = list(ast.walk(tree))
            names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
            names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
            assert not [n for n in names if n.split(".")[0] == "torch" or "huggingface" in n], name


def test_the_package_does_not_import_benchmarks() -> None:
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not [n for n in names if n.split(".")[0] == "benchmarks"], name


def _circular(imports: Mapping[str, set[str]]) -> set[str]:
    """Names that import themselves through others, and names that import these."""
    left = dict(imports)
    while free := [name for name, needs in left.items() if not (needs - {name}) & left.keys()]:
        for name in free:
            del left[name]
    return set(left)


def test_modules_make_no_circle() -> None:
    assert not _circular({name: _imports(name) for name in MODULES})


def test_rooms_make_no_circle() -> None:
    """A room is a folder, with the folders in it, or a module of the root."""
    rooms: dict[str, set[str]] = {}
    for name in MODULES:
        rooms.setdefault(name.split(".")[0], set()).update(module.split(".")[0] for module in _imports(name))
    assert not _circular(rooms)
