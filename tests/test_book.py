"""The built book, read as files: pages, figures, links, references, downloads, launch buttons."""
import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from conftest import ROOT, SETTINGS, notebooks, pages
from nbdev_book import directives, statements
from sphinx.util.inventory import InventoryFile

LOADS = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("object", "data")}


class Page(HTMLParser):
    "The ids, links and loads of a page, and its text outside scripts."

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loads, self.twice, self.text, self._quiet = set(), [], [], [], [], 0
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        d = dict(attributes)
        self.tags.append((tag, d))
        self._quiet += tag in ("script", "style")
        if d.get("id"):
            (self.twice if d["id"] in self.ids else self.ids.add(d["id"]) or []).append(d["id"])
        for key in ("href", "src", "data"):
            if d.get(key):
                self.links.append(d[key])
                if (tag, key) in LOADS and d.get("rel") != "canonical":
                    self.loads.append(d[key])

    def handle_endtag(self, tag):
        self._quiet -= tag in ("script", "style")

    def handle_data(self, data):
        if not self._quiet:
            self.text.append(data)


@pytest.fixture(scope="session")
def parsed(html):
    "Every HTML page of the book."
    return {p.relative_to(html): Page(p.read_text("utf8")) for p in html.rglob("*.html") if "_static" not in p.parts}


def test_page_list(html, parsed):
    made = {str(p.with_suffix("")) for p in parsed}
    assert set(pages()) <= made
    assert made - set(pages()) == {"genindex", "search", "prf-prf"}, made


def test_links_resolve(html, parsed):
    bad = []
    for path, page in parsed.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (html / path.parent / unquote(parts.path)).resolve() if parts.path else html / path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                bad.append(f"{path}: no file {link}")
            elif parts.fragment and target.suffix == ".html" and "_static" not in target.parts:
                if unquote(parts.fragment) not in parsed[target.relative_to(html)].ids | {"", "top"}:
                    bad.append(f"{path}: no anchor {link}")
    assert not bad, "\n".join(bad)


def test_nothing_comes_from_another_host(parsed):
    bad = [f"{path} loads {load}" for path, page in parsed.items() for load in page.loads
           if urlsplit(load).scheme in ("http", "https") or load.startswith("//")]
    assert not bad, "\n".join(bad)


def test_ids_are_unique(parsed):
    assert not {str(path): page.twice for path, page in parsed.items() if page.twice}


def test_no_directive_is_shown(parsed):
    for path, page in parsed.items():
        text = "".join(page.text)
        assert not re.search(r"#\s*\|", text) and "default_exp" not in text and "{prf:" not in text, path


def test_figures(parsed):
    "Each labelled figure is on its page, numbered, captioned and described."
    for path in notebooks():
        labels = []
        for cell in json.loads((ROOT / path).read_text())["cells"]:
            if cell["cell_type"] == "code":
                found, _ = directives("".join(cell["source"]))
                if "label" in found:
                    assert found.get("fig-cap"), f"{path}: {found['label']} has no caption"
                    labels.append(found["label"])
        page = parsed[(ROOT / path).relative_to(ROOT).with_suffix(".html")]
        assert [d["id"] for tag, d in page.tags if tag == "figure" and d.get("id")] == labels, path
        assert "".join(page.text).count("Fig. ") >= len(labels)
        images = [d for tag, d in page.tags if tag == "img" and "only-" in (d.get("class") or "")]
        assert len(images) >= 2 * len(labels) and all("alt" in d for d in images)
        assert sum(bool(d["alt"]) for d in images) >= 2 * len(labels), f"{path}: a figure without alternative text"


def test_every_public_name_is_in_the_reference(html):
    with open(html / "objects.inv", "rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, uri: uri)
    documented = {name for kind in ("py:function", "py:class") for name in inventory.get(kind, {})}
    for path in (ROOT / SETTINGS["lib_path"]).rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name in re.findall(r"^(?:def|class) ([A-Za-z]\w*)", path.read_text(), re.M):
            assert f"{module}.{name}" in documented, f"{module}.{name}"


def test_theorem_references_resolve(parsed):
    text = parsed[next(p for p in parsed if str(p).endswith("01_attention.html"))]
    assert re.search(r"Theorem 2\.\d", "".join(text.text))
    assert not any("prf:ref" in "".join(page.text) or "[?]" in "".join(page.text) for page in parsed.values())


def test_exported_cells_are_marked(parsed):
    for path in notebooks():
        page = parsed[(ROOT / path).relative_to(ROOT).with_suffix(".html")]
        exported = sum(bool({"export", "exports"} & directives("".join(c["source"]))[0].keys())
                       for c in json.loads((ROOT / path).read_text())["cells"] if c["cell_type"] == "code")
        assert sum("exported" in (d.get("class") or "").split() for _, d in page.tags) == exported, path


@pytest.mark.parametrize("path", notebooks())
def test_download_is_plain(html, path):
    "The notebook offered for download is valid, and free of nbdev's and MyST's directives."
    nb = nbformat.read(html / "_sources" / path, as_version=4)
    nbformat.validate(nb)
    for cell in nb.cells:
        assert not re.search(r"^\s*#\s*\||^:::|\{(prf|py|cite|doc|eq|numref)\b|:(prf:ref|math|class|func):|\$\$ *\(", cell.source, re.M), cell.source
    assert any("pip install" in c.source and SETTINGS["git_url"] in c.source for c in nb.cells)
    assert sum(c.cell_type == "code" for c in nb.cells) >= 1


def test_launch_buttons_lead_to_tracked_files(parsed):
    tracked = set(subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True).stdout.split("\n"))
    owner_and_repo = SETTINGS["git_url"].removeprefix("https://github.com/")
    start = f"https://colab.research.google.com/github/{owner_and_repo}/blob/{SETTINGS['branch']}/"
    for path in notebooks():
        links = [link for link in parsed[(ROOT / path).relative_to(ROOT).with_suffix(".html")].links
                 if link.startswith("https://colab")]
        assert links and all(link.startswith(start) for link in links), (path, links)
        assert {link.removeprefix(start) for link in links} == {path} <= tracked


def test_source_links_lead_to_lines_of_tracked_files(parsed):
    start = f"{SETTINGS['git_url']}/blob/{SETTINGS['branch']}/"
    links = {link for page in parsed.values() for link in page.links if link.startswith(start) and "#L" in link}
    assert len(links) > 20
    for link in links:
        path, line = re.fullmatch(r"(.*)#L(\d+)-L\d+", link.removeprefix(start)).groups()
        assert re.match(r"\s*(@|def|class)", (ROOT / path).read_text().split("\n")[int(line) - 1]), link


def test_every_reference_is_cited_and_listed(parsed):
    keys = set(re.findall(r"^@\w+\{(\S+),", (ROOT / "references.bib").read_text(), re.M))
    sources = "".join((ROOT / p).read_text() for p in notebooks()) + "".join(p.read_text() for p in (ROOT / "nbs").glob("*.md"))
    cited = set(re.findall(r"\{cite:\w+\}`(\w+)`", sources))
    assert keys == cited
    listed = parsed[next(p for p in parsed if p.name == "bibliography.html")]
    assert sum("citation" in (d.get("class") or "").split() for _, d in listed.tags) == len(keys)


def test_theorem_map_is_whole(parsed):
    "Every statement is linked, with its code and checks; every measured ratio is a number; statements link to both."
    page = parsed[Path("nbs/theorem_map.html")]
    text = re.sub(r"\s+", " ", " ".join(page.text))
    for label, one in statements().items():
        assert any(link.endswith(f"{one['page'].rsplit('/', 1)[1]}.html#{label}") for link in page.links), label
        for target, _ in one["checks"]:
            assert any(link.endswith(f"#{target}") for link in page.links), target
            chapter = parsed[Path(f"{one['page']}.html")]
            assert any(link.endswith(f"#{target}") for link in chapter.links), f"{label} does not link its check {target}"
    ratios = re.findall(r"Observed / bound \(at (?:least|most)\): ([\d.e+-]+)", text)
    assert len(ratios) == sum(1 for one in statements().values() if one["slack"]), ratios
    assert all(float(r) > 0 for r in ratios)
