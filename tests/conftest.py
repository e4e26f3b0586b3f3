"""What the tests share: the project's files, its settings, and the built book."""
import sys
from pathlib import Path

import pytest
import torch
import yaml

ROOT = Path(__file__).resolve().parent.parent
HTML = ROOT / "_build" / "html"
sys.path[:0] = [str(ROOT), str(ROOT / "_ext")]

import dev  # noqa: E402
from nbdev_book import SETTINGS  # noqa: E402, F401

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


def notebooks():
    "Every notebook of the project, as paths from its root."
    return [str(path.relative_to(ROOT)) for path in dev.notebooks()]


def pages():
    "Every page of the book, from _toc.yml, without suffix."
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    return [toc["root"], *(chapter["file"] for part in toc["parts"] for chapter in part["chapters"])]


@pytest.fixture(scope="session")
def html():
    "The folder of the built book."
    assert (HTML / "index.html").exists(), "the book is not built: run python3 dev.py first"
    return HTML
