"""Show nbdev notebooks in the book: turn their ``#|`` directives into what MyST-NB knows.

MyST-NB reads each notebook through `read_nb` (``nb_custom_formats`` in _config.yml); the rest of this file takes the
public address from settings.ini, links the API reference to its source, and mends what the theme and its parts get wrong.
"""
import ast
import configparser
import functools
import hashlib
import importlib
import inspect
import re
from pathlib import Path

import nbformat
import yaml
from docutils import nodes

from plain_notebook import plain_notebook, reference_names, statement_names

ROOT = Path(__file__).resolve().parent.parent
_ini = configparser.ConfigParser()
_ini.read(ROOT / "settings.ini")
SETTINGS = _ini["DEFAULT"]
PACKAGE = SETTINGS["lib_path"]
SKIP = set(SETTINGS["tst_flags"].split())  # cells with these flags are shown, not run
INPUTS = [f"{PACKAGE}/**/*.py", "results/**/*", "constraints.txt"]  # what the pages are computed from
TAGS = {"hide": ["remove-cell"], "hide_input": ["remove-input"], "hide_output": ["remove-output"],
        "default_exp": ["remove-cell"], "export": ["hide-input"], "exports": [], "exporti": ["hide-input"],
        "builds": [], "checks": [], **{flag: [] for flag in SKIP}}
NOT_RUN = "skip-execution"
_statement = re.compile(r"^:::\{prf:(\w+)\}[ ]*([^\n]*)\n:label: ([\w-]+)\n(.*?)(?=^:::[ ]*$)", re.M | re.S)
_line = re.compile(r"^\s*#\s*\|\s*([A-Za-z_][\w-]*)\s*(:?)\s*(.*)$")


def directives(source):
    "Split `source` into its leading directives and the code below them."
    found, lines = {}, source.lstrip("\n").splitlines(keepends=True)
    while lines and (m := _line.match(lines[0].rstrip("\n"))):
        name, colon, rest = m.groups()
        found[name] = yaml.safe_load(rest) if colon else rest.strip()
        lines.pop(0)
    return found, "".join(lines)


def public(code):
    "The public functions and classes that `code` defines, each with the autodoc directive that describes it."
    found = []
    for n in ast.parse(code).body:
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not n.name.startswith("_"):
            found.append((n.name, "autoclass" if isinstance(n, ast.ClassDef) else "autofunction"))
    return found


def api(module, code):
    "The Markdown cells around an exported cell: the mark with the module's name, and the reference of what it defines."
    mark = nbformat.v4.new_markdown_cell(f":::{{div}} exported\n`{module}`\n:::")
    parts = [f"```{{eval-rst}}\n.. {kind}:: {module}.{name}\n" + ("   :members:\n" if kind == "autoclass" else "") + "```\n"
             for name, kind in public(code)]
    return [mark], [nbformat.v4.new_markdown_cell("\n".join(parts))] if parts else []


def without_docstrings(code):
    "The code as the page shows it: the reference below it says what the docstrings say."
    lines, found = code.split("\n"), []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) and len(node.body) > 1:
            doc = node.body[0]
            if lines[doc.lineno - 1].lstrip().startswith(('"', "'")) and node.body[1].lineno > doc.end_lineno:
                found.append((doc.lineno - 1, doc.end_lineno))  # it stands on lines of its own
    for start, end in sorted(found, reverse=True):
        del lines[start:end]
    return "\n".join(lines)


def chapters():
    "The notebooks of the book, in its order, as (page, cells) pairs."
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    for page in [toc["root"], *(chapter["file"] for part in toc["parts"] for chapter in part["chapters"])]:
        if (ROOT / f"{page}.ipynb").exists():
            yield page, nbformat.read(ROOT / f"{page}.ipynb", as_version=4).cells


@functools.cache
def statements():
    """The labelled statements of the book, label -> what is known of each.

    Its code are the exported definitions whose docstring names it, and the page's cells with ``#| builds: label``; its
    checks are the cells with ``#| checks: label``; ``slack`` says which page measures it
    against its bound, and from which side that bounds.
    """
    found, uses = {}, []
    for page, cells in chapters():
        module, chapter = None, next(c.source.split("\n")[0].lstrip("# ") for c in cells if c.source.startswith("# "))
        for cell in cells:
            if cell.cell_type == "markdown":
                for _, title, label, body in _statement.findall(cell.source):
                    status = re.search(r"^\*Status: (.*?)\*\s*$", body, re.M | re.S)
                    found[label] = dict(title=title, page=page, chapter=chapter, status=status[1] if status else "", code=[], checks=[], slack=None)
                continue
            has, code = directives(cell.source)
            module = f"{PACKAGE}.{has['default_exp']}" if "default_exp" in has else module
            if {"export", "exports"} & has.keys():
                uses += [(label, "code", f"{{py:obj}}`~{module}.{name}`") for name, _ in public(code)
                         for label in dict.fromkeys(re.findall(r":prf:ref:`([\w-]+)`", code))]
            uses += [(label, "code", f"{{ref}}`a cell <cell-{cell.id}>`") for label in str(has.get("builds", "")).split()]
            uses += [(label, "checks", (f"cell-{cell.id}", re.sub("^Show the ", "", str(has.get("code-summary", "test")))))
                     for label in str(has.get("checks", "")).split()]
            for call in re.split(r"^\s*(?=slack\()", code, flags=re.M)[1:]:
                if m := re.match(r'slack\(\s*"([\w-]+)"', call):
                    uses.append((m[1], "slack", (page, "at least" if "at_least=True" in call.split("\nslack(")[0] else "at most")))
    for label, where, what in uses:
        if label not in found:
            raise ValueError(f"a cell or docstring names the statement {label!r}, which is not in the book")
        if where == "slack":
            found[label]["slack"] = what
        else:
            found[label][where].append(what)
    return found


def _linked(text):
    "A Markdown cell whose statements name the code that builds them and the cells that check them."
    def add(m):
        one = statements()[m[3]]
        tests = [f"{{ref}}`test {n} <{target}>`" for n, (target, _) in enumerate(one["checks"], 1)]
        links = [f"*{name}:* " + ", ".join(listed) for name, listed in (("Code", one["code"]), ("Checked by", tests)) if listed]
        return m[0] + ("\n" + " · ".join(links) + "\n" if links else "")
    return _statement.sub(add, text)


def digest():
    "A short hash of the files that the pages are computed from."
    h = hashlib.sha256()
    for f in sorted(f for pattern in INPUTS for f in ROOT.glob(pattern) if f.is_file()):
        h.update(str(f.relative_to(ROOT)).encode() + f.read_bytes())
    return h.hexdigest()[:16]


def _tags(cell, found):
    "The tags (and figure options) that the directives `found` stand for; an unknown directive is an error."
    tags = set(cell.metadata.get("tags", []))
    for name, value in found.items():
        if name in TAGS:
            tags.update(TAGS[name])
        elif name == "eval":
            tags |= {NOT_RUN} if value is False else set()
        elif name == "echo":
            tags |= {"remove-input"} if value is False else set()
        elif name == "output":
            tags |= {"remove-output"} if value is False else set()
        elif name == "code-fold":
            tags |= {"hide-input"} if value else set()
        elif name == "code-summary":
            cell.metadata.setdefault("mystnb", {})["code_prompt_show"] = str(value)
        elif name in ("label", "fig-cap"):
            options = cell.metadata.setdefault("mystnb", {}).setdefault("figure", {})
            options["name" if name == "label" else "caption"] = str(value)
        else:
            raise ValueError(f"cell {cell.get('id')}: unknown directive '#| {name}'")
    return tags


def read_nb(text):
    "Read a notebook and translate its directives."
    nb = nbformat.reads(text, as_version=4)
    module, cells = None, []
    for cell in nb.cells:
        if cell.cell_type != "code":
            cell.source = _linked(cell.source)
            cells.append(cell)
            continue
        found, code = directives(cell.source)
        if {"builds", "checks"} & found.keys():
            named = {what: ", ".join(f"{{prf:ref}}`{label}`" for label in str(found[what]).split())
                     for what in ("builds", "checks") if what in found}
            text = "; ".join(f"{what} {labels}" for what, labels in named.items())
            cells.append(nbformat.v4.new_markdown_cell(f"(cell-{cell.id})=\n:::{{div}} statement-link\n{text}\n:::"))
        tags = _tags(cell, found)
        if SKIP & found.keys() or "nbdev_export(" in code:
            tags.add(NOT_RUN)
        if "default_exp" in found:
            module = f"{PACKAGE}.{found['default_exp']}"
        exported = bool({"export", "exports"} & found.keys())
        cell.source = without_docstrings(code) if exported else code
        if exported and not public(code) and re.match("(from|import) ", code):
            cell.metadata.setdefault("mystnb", {}).setdefault("code_prompt_show", "Show the imports")
        if tags:
            cell.metadata["tags"] = sorted(tags)
        before, after = api(module, code) if exported and module else ([], [])
        cells += [*before, cell, *after]
    # Jupyter-cache compares the code alone: name the inputs and the recorded outputs in the code.
    recorded = hashlib.sha256(repr([c.get("outputs") for c in nb.cells]).encode()).hexdigest()[:16]
    stamp = nbformat.v4.new_code_cell(f"# inputs {digest()} recorded {recorded}", metadata={"tags": ["remove-cell"]})
    nb.cells = [*cells[:1], stamp, *cells[1:]]
    return nb


def linkcode_resolve(domain, info):
    "The address of the source of a documented name."
    try:
        target = importlib.import_module(info["module"])
        for part in info["fullname"].split("."):
            target = getattr(target, part)
        lines, start = inspect.getsourcelines(inspect.unwrap(target))
    except (AttributeError, TypeError, OSError):  # a dataclass field or a constant has no source lines
        return None
    path = info["module"].replace(".", "/") + ".py"
    return f"{SETTINGS['git_url']}/blob/{SETTINGS['branch']}/{path}#L{start}-L{start + len(lines) - 1}"


def _configure(app, config):
    "Take the public address from settings.ini, and serve _vendor/ (Jupyter Book links every .js of html_static_path)."
    config.html_static_path.append(str(Path(app.confdir) / "_vendor"))
    config.html_theme_options |= {"repository_url": SETTINGS["git_url"], "repository_branch": SETTINGS["branch"],
                                  "use_repository_button": True, "navbar_persistent": [],  # one search box, not two
                                  "search_bar_text": "Search this book"}
    config.linkcode_resolve = linkcode_resolve


def _api_page(app, docname, source):
    "Fill the page of the API reference: every public name, module by module, in the order of the book."
    if docname != "nbs/api":
        return
    for _, listed in chapters():
        cells = [directives(c.source) for c in listed if c.cell_type == "code"]
        module = next((found["default_exp"] for found, _ in cells if "default_exp" in found), None)
        if module is None:  # a page that exports nothing
            continue
        names = [name for found, code in cells if {"export", "exports"} & found.keys() for name, _ in public(code)]
        source[0] += (f"\n## {module}\n\n```{{eval-rst}}\n.. autosummary::\n\n"
                      + "".join(f"   ~{PACKAGE}.{module}.{name}\n" for name in names) + "```\n")


def _theorem_map(app, docname, source):
    "Fill the page of the theorem map: every statement, with its status, code, checks and measured slack."
    if docname != "nbs/theorem_map":
        return
    page = None
    for label, one in statements().items():
        if one["page"] != page:
            page = one["page"]
            source[0] += f"\n## {{doc}}`{one['chapter']} </{page}>`\n"
        tests = "; ".join(f"{{ref}}`{summary} <{target}>`" for target, summary in one["checks"])
        lines = [f"*Status:* {one['status']}", f"*Code:* {', '.join(one['code'])}", f"*Checked by:* {tests}"]
        if one["slack"]:
            where, side = one["slack"]
            lines.append(f"*Observed / bound ({side}):* {{glue:text}}`/{where}.ipynb::slack-{label}:.3g`")
        source[0] += f"\n:::{{div}} statement\n{{prf:ref}}`{label}` {one['title']}\n:::\n\n" + "\\\n".join(lines) + "\n"


def _outdated(app, env, added, changed, removed):
    "Read every page that runs code again when the library or the results have changed."
    old, env.nbdev_digest = getattr(env, "nbdev_digest", None), digest()
    if old == env.nbdev_digest:
        return []
    return [d for d in env.found_docs if env.doc2path(d).endswith(".ipynb") or d in ("nbs/api", "nbs/theorem_map")]


def _ids(app, doctree, docname):
    "sphinx-proof gives the body of each theorem of a page the same id."
    for section in doctree.findall(nodes.section):
        if section["ids"] == ["proof-content"]:
            section["ids"] = []


def _page(app, pagename, templatename, context, doctree):
    "Leave out Thebe, which Jupyter Book always adds (twice) and which needs a server; mend the HTML of two parts."
    context["script_files"] = [js for js in context["script_files"]
                               if "THEBE_JS_URL" not in (getattr(js, "attributes", {}).get("body") or "")
                               and "sphinx-thebe" not in str(getattr(js, "filename", "") or "")]
    if "body" in context:  # MyST-NB puts paragraphs into the summary of a folded cell, which HTML does not allow
        context["body"] = re.sub(r'<p (class="(?:collapsed|expanded) admonition-title")>(.*?)</p>', r"<span \1>\2</span>",
                                 context["body"])
        # docutils marks references with a role that ARIA 1.3 gives up
        context["body"] = context["body"].replace('role="doc-biblioentry"', 'role="listitem"')


def _plain_sources(app, exception):
    "Offer each notebook for download without directives: any Jupyter reads it."
    if exception or app.builder.format != "html":
        return
    pages = {d: app.env.doc2path(d) for d in app.env.found_docs if app.env.doc2path(d).endswith(".ipynb")}
    sources = {d: nbformat.read(path, as_version=4) for d, path in pages.items()}
    names = statement_names(sources.values()) | reference_names(ROOT / "references.bib")
    install = f'pip install "{SETTINGS["repo"]}[notebooks] @ git+{SETTINGS["git_url"]}"'
    titles = {d: title.astext() for d, title in app.env.titles.items()}
    for docname, nb in sources.items():
        target = Path(app.outdir) / "_sources" / f"{docname}.ipynb"
        if target.exists():
            nbformat.write(plain_notebook(nb, docname, names, titles, directives, install), target)


def setup(app):
    app.connect("config-inited", _configure)
    app.connect("source-read", _api_page)
    app.connect("source-read", _theorem_map)
    app.connect("env-get-outdated", _outdated)
    app.connect("doctree-resolved", _ids)
    app.connect("html-page-context", _page, priority=900)
    app.connect("build-finished", _plain_sources)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
