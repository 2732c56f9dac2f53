"""The arrows between modules point one way, and files stay small."""
from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ridgeline

ROOT = Path(ridgeline.__file__).parent
FILES = {path: ast.parse(path.read_text(), str(path)) for path in sorted(ROOT.rglob("*.py"))}

# Modules or packages of ridgeline -> what they must not import, at any depth of their code. Imports for type checkers
# only are no dependency and do not count.
LIGHT = ("types", "config", "errors", "sampling_params", "noise", "bench.serve.measure", "bench.serve.compare",
         "bench.serve.html", "report.page")
FORBIDDEN = {
    LIGHT: {"torch"},
    ("types", "errors"): {"ridgeline.engine", "ridgeline.runner", "ridgeline.cache", "ridgeline.models"},
    ("decoding", "scheduling", "cache"): {f"ridgeline.{m}" for m in (
        "models", "layers", "ops", "native", "runner", "engine", "text", "server", "cli")},
    ("ops",): {f"ridgeline.{m}" for m in ("layers", "models", "native", "runner", "engine")},
    ("layers",): {f"ridgeline.{m}" for m in ("models", "native", "runner", "engine")},
    ("models",): {f"ridgeline.{m}" for m in ("native", "runner", "engine", "decoding", "scheduling", "text")},
    ("runner",): {f"ridgeline.{m}" for m in ("engine", "scheduling", "text", "server", "cli")},
    ("engine",): {f"ridgeline.{m}" for m in ("text", "server", "cli")},
    ("weights", "quant", "text"): {f"ridgeline.{m}" for m in ("engine", "runner", "server", "cli")},
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Imports(ast.NodeVisitor):
    """Absolute names of all that a module imports; lazy: also inside functions, so not only when it is imported."""

    def __init__(self, package: str, lazy: bool = True):
        self.package, self.lazy, self.found = package, lazy, set[str]()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if self.lazy:
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.dump(node.test):
            self.generic_visit(node)
            return
        for child in node.orelse:
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        self.found.update(name.name for name in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            above = self.package.split(".")[:len(self.package.split(".")) - node.level + 1]
            base = ".".join([*above, base] if base else above)
        self.found.update([base, *(f"{base}.{name.name}" for name in node.names)])


def imports(path: Path, tree: ast.AST, lazy: bool = True) -> set[str]:
    module = module_of(path)
    visitor = Imports(module if path.name == "__init__.py" else module.rpartition(".")[0], lazy)
    visitor.visit(tree)
    return visitor.found


def violations(module: str, found: set[str]) -> list[str]:
    wrong = []
    for owners, targets in FORBIDDEN.items():
        if any(within(module, f"ridgeline.{owner}") for owner in owners):
            wrong += [f"{module} imports {name}" for name in sorted(found)
                      if any(within(name, target) for target in targets)]
    return wrong


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_imports_point_one_way():
    assert [v for path, tree in FILES.items() for v in violations(module_of(path), imports(path, tree))] == []


def test_torch_does_not_come_in_behind_the_light_modules():
    """What they import, and what that imports, is free of torch too."""
    graph = {module_of(path): imports(path, tree, lazy=False) for path, tree in FILES.items()}
    todo = [f"ridgeline.{name}" for name in LIGHT]
    seen: dict[str, str] = dict.fromkeys(todo, "")
    while todo:
        module = todo.pop()
        for name in graph[module]:
            assert not within(name, "torch"), f"{module} imports torch; reached from {seen[module] or 'the rule'}"
            # Importing a.b.c runs a and a.b as well.
            for part in (".".join(name.split(".")[:i]) for i in range(1, name.count(".") + 2)):
                if part in graph and part not in seen:
                    seen[part] = module
                    todo.append(part)


@pytest.mark.parametrize("code, package, expected", [
    ("import torch.nn as nn", "ridgeline", ["ridgeline.noise imports torch.nn"]),
    ("def f():\n    from torch import Tensor", "ridgeline", ["ridgeline.noise imports torch",
                                                             "ridgeline.noise imports torch.Tensor"]),
    ("if TYPE_CHECKING:\n    import torch", "ridgeline", []),
    ("if typing.TYPE_CHECKING:\n    pass\nelse:\n    import torch", "ridgeline", ["ridgeline.noise imports torch"]),
    ("from .. import engine", "ridgeline.cache", ["ridgeline.cache.store imports ridgeline.engine"]),
    ("from ..models.base import Any", "ridgeline.cache", ["ridgeline.cache.store imports ridgeline.models.base",
                                                          "ridgeline.cache.store imports ridgeline.models.base.Any"]),
    ("from ridgeline import runner, types", "ridgeline.cache", ["ridgeline.cache.store imports ridgeline.runner"]),
])
def test_the_walk_finds_every_kind_of_import(code, package, expected):
    visitor = Imports(package)
    visitor.visit(ast.parse(code))
    module = "ridgeline.noise" if package == "ridgeline" else "ridgeline.cache.store"
    assert violations(module, visitor.found) == expected


def limit(path: Path) -> int:
    folder = path.parent.name
    if folder == "models":
        return 250
    if folder == "decoding" and path.name not in ("__init__.py", "base.py", "verify.py"):
        return 120
    return 500


def test_files_are_small():
    lengths = {path: len(path.read_text().splitlines()) for path in FILES}
    assert [f"{path.relative_to(ROOT)}: {n} lines, at most {limit(path)}" for path, n in lengths.items()
            if n > limit(path)] == []
