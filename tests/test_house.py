"""The plan of the house: who may import whom, how long a file is, and that the public parts say what they do."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "tlt_jax"
FILES = sorted(PACKAGE.rglob("*.py"))
# From the top to the bottom. Rooms of one tier do not import each other, but that the entry starts the verbs.
TIERS = [
    ["main", "cli", "serve"],
    ["stages"],
    ["rl", "compress", "evaluate"],
    ["decode"],
    ["train"],
    ["data", "checkpoint", "observe"],
    ["models", "text"],
    ["parallel"],
    ["config"],
]
ALLOWED_WITHIN_A_TIER = {("main", "cli")}
HEIGHT = {room: -depth for depth, rooms in enumerate(TIERS) for room in rooms}
# Without a docstring: what a verb's two functions do is the same for all verbs, and stands in tlt_jax/main.py.
PUBLIC_WITHOUT_DOCSTRING = {
    (f"cli/{verb}.py", name) for verb in ("run", "validate", "report", "export", "launch") for name in ("add", "main")
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


def room(module: str) -> str:
    return module.split(".")[1]


def imports(path: Path) -> set[str]:
    """The modules of ours that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in MODULES else node.module or "")
    return {module for module in found if module.split(".")[0] == "tlt_jax"}


GRAPH = {module_name(path): imports(path) for path in FILES}


def test_every_room_has_its_place():
    assert {room(module) for module in MODULES if module != "tlt_jax"} <= HEIGHT.keys()


def test_imports_go_downwards_only():
    wrong = []
    for module, imported in GRAPH.items():
        if module == "tlt_jax":
            continue
        for other in imported - {"tlt_jax"}:
            pair = room(module), room(other)
            if pair[0] != pair[1] and pair not in ALLOWED_WITHIN_A_TIER and HEIGHT[pair[1]] >= HEIGHT[pair[0]]:
                wrong.append(f"{module} -> {other}")
    assert sorted(wrong) == []


def test_no_imports_go_in_circles():
    finished: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join([*way[way.index(module) :], module])
        if module not in finished:
            for other in sorted(GRAPH.get(module, ())):
                visit(other, (*way, module))
            finished.add(module)

    for module in sorted(GRAPH):
        visit(module, ())


def test_the_package_itself_imports_nothing_heavy():
    assert GRAPH["tlt_jax"] == set()
    heavy = ("jax", "numpy", "flax", "optax", "orbax")
    for path in (PACKAGE / "config").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not [name for name in names if name and name.split(".")[0] in heavy], path


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_is_on_a_few_screens(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_public_functions_classes_and_modules_say_what_they_do():
    silent = []
    for path in FILES:
        name, tree = str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))
        if not ast.get_docstring(tree):
            silent.append(name)
        for node in tree.body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and not ast.get_docstring(node) and (name, node.name) not in PUBLIC_WITHOUT_DOCSTRING:
                silent.append(f"{name}: {node.name}")
    assert silent == []


def test_files_read_are_data():
    """No pickle, no torch.load, no eval or exec, no unsafe YAML, no model code from elsewhere."""
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = str(path.relative_to(PACKAGE))
            if isinstance(node, ast.Import | ast.ImportFrom):
                roots = (
                    {a.name.split(".")[0] for a in node.names}
                    if isinstance(node, ast.Import)
                    else {(node.module or "").split(".")[0]}
                )
                wrong += [
                    f"{name}: import {r}"
                    for r in roots
                    & {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch", "transformers"}
                ]
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("eval", "exec", "compile", "__import__")
            ):
                wrong.append(f"{name}: {node.func.id}")
            elif isinstance(node, ast.Call) and any(
                k.arg in ("trust_remote_code", "allow_pickle") and not _is_false(k.value) for k in node.keywords
            ):
                wrong.append(f"{name}: {ast.unparse(node)}")
    assert wrong == []


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False
