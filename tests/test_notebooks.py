"""The notebooks are the source: clean, in step with the modules that they export, and in the house's form."""
import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SETTINGS, notebooks, pages
from nbdev_book import SKIP, directives, public, statements

PACKAGE = SETTINGS["lib_path"]
FLOORS = [{"figures"}, {"foundations"}, {"capacity"}, {"compiler"}, {"laboratory"}, {"experiments"}, {"face"}]


def cells(path, kind=None):
    "The cells of a notebook as (directives, text) pairs."
    for cell in json.loads((ROOT / path).read_text())["cells"]:
        if kind is None or cell["cell_type"] == kind:
            yield directives("".join(cell["source"])) if cell["cell_type"] == "code" else ({}, "".join(cell["source"]))


def module_of(path):
    "The file that a notebook exports, from the package's folder, or None."
    for found, _ in cells(path, "code"):
        if "default_exp" in found:
            return found["default_exp"].replace(".", "/") + ".py"
    return None


SOURCES = {module_of(path): path for path in notebooks() if module_of(path)}


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    "A copy of the project, exported and cleaned anew, so that the check touches nothing."
    copy = tmp_path_factory.mktemp("fresh")
    for name in ("nbs", PACKAGE):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    for name in ("settings.ini", "index.ipynb"):
        shutil.copy(ROOT / name, copy)
    for tool in (["nbdev_export"], ["nbdev_clean"], ["nbdev_clean", "--fname", "index.ipynb"]):
        subprocess.run([Path(sys.executable).parent / tool[0], *tool[1:]], cwd=copy, check=True, capture_output=True)
    return copy


def test_modules_are_exported(fresh):
    wrong = []
    for path in sorted((fresh / PACKAGE).rglob("*.py")):
        name = str(path.relative_to(fresh / PACKAGE))
        here = ROOT / PACKAGE / name
        if not here.exists() or here.read_text() != path.read_text():
            source = SOURCES.get(name, "nbs/ or settings.ini")
            wrong.append(f"{PACKAGE}/{name} differs from its notebook: edit {source}, then run python3 dev.py export")
    assert not wrong, "\n".join(wrong)


def test_packages_hold_no_code():
    for path in (ROOT / PACKAGE).rglob("__init__.py"):
        allowed = f'__version__ = "{SETTINGS["version"]}"\n' if path.parent.name == PACKAGE else ""
        assert path.read_text() == allowed, f"{path.relative_to(ROOT)} is made by nbdev_export: leave it alone"


def test_every_module_has_a_notebook():
    here = {str(p.relative_to(ROOT / PACKAGE)) for p in (ROOT / PACKAGE).rglob("*.py")}
    made = {n for n in here if Path(n).name not in ("__init__.py", "_modidx.py")}
    assert not made - set(SOURCES), f"no notebook exports {made - set(SOURCES)}: move the code into one, or delete the file"
    assert not set(SOURCES) - made, f"not exported: {[SOURCES[n] for n in set(SOURCES) - made]}: run python3 dev.py export"


@pytest.mark.parametrize("path", notebooks())
def test_notebook_is_clean(fresh, path):
    assert (ROOT / path).read_text() == (fresh / path).read_text(), f"{path} is not clean: run python3 dev.py export"
    for cell in json.loads((ROOT / path).read_text())["cells"]:
        if cell["cell_type"] == "code" and cell["outputs"]:
            found, _ = directives("".join(cell["source"]))
            assert SKIP & found.keys() or found.get("eval") is False, f"{path}: cell {cell['id']} has an output: run python3 dev.py export"


@pytest.mark.parametrize("path", notebooks())
def test_widgets_need_no_kernel(path):
    "`interact` and `Output` are dead in a page, and hang the book's build now and then (nbclient issue 312)."
    for _, code in cells(path, "code"):
        assert not re.search(r"\b(interact|interactive|interactive_output|Output)\(", code), f"{path}: {code[:80]}"


@pytest.mark.parametrize("path", sorted(SOURCES.values()))
def test_form_of_a_chapter(path):
    "One exported definition a cell, shown or tested in the next one; a module at the path of its notebook."
    stem = re.sub(r"(^|/)\d+_", r"\1", path.removeprefix("nbs/").removesuffix(".ipynb"))
    assert SOURCES[f"{stem}.py"] == path, f"{path} must export {stem.replace('/', '.')}"
    listed = list(cells(path, "code"))
    for (found, code), (following, shown) in zip(listed, listed[1:]):
        if {"export", "exports"} & found.keys() and public(code):
            assert len(public(code)) == 1, f"{path}: one exported definition a cell, not {public(code)}"
            assert not {"hide", "export", "exports", "exporti"} & following.keys(), f"{path}: show or test {public(code)[0][0]} in the next cell"
            assert public(code)[0][0] in shown, f"{path}: the cell after {public(code)[0][0]} does not name it"


def test_modules_import_from_their_floor_or_below():
    floor = {name: n for n, names in enumerate(FLOORS) for name in names}
    for module in SOURCES:
        for node in ast.walk(ast.parse((ROOT / PACKAGE / module).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith(PACKAGE)):
                base = [PACKAGE, *Path(module).parts[:-1]]
                target = ".".join([*base[: len(base) - node.level + 1], node.module]) if node.level else node.module
                part = target.split(".")[1]
                assert floor[part] <= floor[Path(module).parts[0].removesuffix(".py")], f"{module} imports {target}"


def test_docstrings():
    "Every public name says what it does, and its parameters, result and errors where it has them."
    for module in SOURCES:
        for node in ast.parse((ROOT / PACKAGE / module).read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                doc, where = ast.get_docstring(node) or "", f"{module}: {node.name}"
                assert doc.split("\n")[0].endswith("."), f"{where} needs a summary of one line"
                if isinstance(node, ast.FunctionDef):
                    assert not node.args.args or "Parameters\n" in doc, f"{where} does not document its parameters"
                    returns = not (isinstance(node.returns, ast.Constant) and node.returns.value is None)
                    assert not returns or "Returns\n" in doc, f"{where} does not document its result"
                    raises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
                    assert not raises or "Raises\n" in doc, f"{where} does not document its errors"


def test_statements_say_where_they_come_from():
    for path in notebooks():
        for _, text in cells(path, "markdown"):
            for body in re.findall(r"^:::\{prf:\w+\}.*?^:::", text, re.M | re.S):
                status = re.search(r"^\*Status: (.*?)\*\s*$", body, re.M | re.S)
                assert status, f"{path}: a statement has no status:\n{body[:120]}"
                assert re.search("quoted in substance|recalled|in the form of|well known|derived here|ours", status[1]), f"{path}: the page on notation knows no such status: {status[1]}"


def test_every_notebook_is_a_page():
    listed = {f"{page}.ipynb" for page in pages() if (ROOT / f"{page}.ipynb").exists()}
    assert listed == set(notebooks()), f"not in _toc.yml: {sorted(set(notebooks()) - listed)}"


def test_one_address():
    "What must spell out the repository's address says what settings.ini says."
    address = SETTINGS["git_url"]
    install = f'![ -e /content ] && pip install -q "sparse-variable-creation[notebooks] @ git+{address}"  # on Colab only'
    for path in notebooks():
        assert any(code.strip() == install for _, code in cells(path, "code")), f"{path}: no cell that installs on Colab"
    for name in ("README.md", "pyproject.toml", "CITATION.cff"):
        assert address in (ROOT / name).read_text(), f"{name} does not name {address}: run python3 dev.py export"


def test_every_statement_has_code_and_a_check():
    "The theorem map has no gap: each statement is built by an exported definition or a cell, and some cell tests it."
    found = statements()
    labels = {label for path in notebooks() for _, text in cells(path, "markdown") for label in re.findall(r"^:label: (\S+)", text, re.M)}
    assert labels == set(found), f"not read by the map, because the chapter is not in _toc.yml or the statement is not closed: {labels ^ set(found)}"
    for label, one in found.items():
        assert one["code"], f"{one['page']}: name {label} in the docstring of what implements it, or mark a cell '#| builds: {label}'"
        assert one["checks"], f"{one['page']}: mark the cell that tests {label} with '#| checks: {label}'"


def test_no_module_is_longer_than_a_chapter():
    "At most 400 lines, docstrings included; the index that nbdev writes is no module of ours."
    modules = [path for path in (ROOT / "sparse_variable_creation").rglob("*.py") if path.name != "_modidx.py"]
    assert modules
    assert {path.name: n for path in modules if (n := len(path.read_text().splitlines())) > 400} == {}
