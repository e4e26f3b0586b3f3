"""What the tests share: the project's files, its settings, and the built book."""
import configparser
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
HTML = ROOT / "_build" / "html"
sys.path[:0] = [str(ROOT), str(ROOT / "_ext")]

_ini = configparser.ConfigParser()
_ini.read(ROOT / "settings.ini")
SETTINGS = _ini["DEFAULT"]


def notebooks():
    "Every notebook of the project, as paths from its root."
    found = [p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts]
    return [str(p.relative_to(ROOT)) for p in sorted(found)] + ["index.ipynb"]


def pages():
    "Every page of the book, from _toc.yml, without suffix."
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    return [toc["root"], *(chapter["file"] for part in toc["parts"] for chapter in part["chapters"])]


@pytest.fixture(scope="session")
def html():
    "The folder of the built book."
    assert (HTML / "index.html").exists(), "the book is not built: run python3 dev.py first"
    return HTML
