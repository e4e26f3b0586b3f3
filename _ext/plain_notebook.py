"""Plain copies of the notebooks: no nbdev directives, no MyST, so that any Jupyter shows them well."""
import copy
import posixpath
import re

_open = re.compile(r"^(:{3,}|`{3,})\{([\w:-]+)\}[ ]*(.*)$")
_option = re.compile(r"^:([\w-]+):[ ]*(.*)$")
_role = re.compile(r"\{([\w:+-]+)\}`([^`]+)`")
_titled = re.compile(r"^(.*?)\s*<([^>]+)>$", re.S)


def statement_names(notebooks):
    "What to call each labelled statement, figure and equation of `notebooks`: label -> text."
    names = {}
    for nb in notebooks:
        for cell in nb.cells:
            for kind, title, label in re.findall(r"^:{3,}\{prf:(\w+)\}[ ]*(.*)\n:label:[ ]*(\S+)", cell.source, re.M):
                names[label] = f"{kind.capitalize()} ({title})" if title else kind.capitalize()
            figure = re.search(r"^#\| *label: *(\S+)", cell.source, re.M)
            if figure:
                caption = re.search(r'^#\| *fig-cap: *"?(.*?)[.:"]', cell.source, re.M)
                names[figure[1]] = f"the figure “{caption[1]}”" if caption else "the figure"
            for label in re.findall(r"\$\$ *\(([\w-]+)\)$", cell.source, re.M):
                names[label] = f"({label})"
    return names


def _text(kind, body, docname, names, titles):
    "The plain text of the role `kind` with content `body`."
    titled = _titled.match(body)
    if titled:
        return titled[1]
    if kind == "doc":
        target = posixpath.normpath(posixpath.join(posixpath.dirname(docname), body))
        return f"*{titles.get(target, body)}*"
    if kind in ("prf:ref", "numref", "eq", "ref"):
        return names.get(body, body)
    if kind.startswith("cite"):
        return f"[{names.get(body, body)}]"
    return f"`{body.rsplit('.', 1)[-1] if body.startswith('~') else body}`"


def plain_markdown(text, docname, names, titles):
    "MyST Markdown without directives and roles."
    out, fences, options = [], [], False
    for line in text.split("\n"):
        if (m := _open.match(line)):
            fence, kind, title = m.groups()
            fences.append(fence)
            options = True
            if kind.startswith("prf:"):
                name = kind[4:].capitalize()
                out.append(f"**{name}{f' ({title})' if title else ''}.**")
            elif title:
                out.append(f"**{title}**")
        elif fences and line.strip() == fences[-1]:
            fences.pop()
            out.append("")
        elif options and (m := _option.match(line)):
            continue
        else:
            options = options and not line.strip()
            out.append(re.sub(r"\$\$ *\([\w-]+\)$", "$$", line))
    return _role.sub(lambda m: _text(m[1], m[2], docname, names, titles), "\n".join(out))


def reference_names(path):
    "How to cite each entry of a BibTeX file in plain text: key -> authors, year, address."
    names = {}
    for key, entry in re.findall(r"^@\w+\{(\S+),\n(.*?)^\}", path.read_text(), re.M | re.S):
        field = {name: value.strip("{}") for name, value in re.findall(r"^ *(\w+) *= *\{(.*)\},$", entry, re.M)}
        people = [author.split(",")[0] for author in field.get("author", key).split(" and ")]
        who = people[0] if len(people) == 1 else f"{people[0]} et al." if len(people) > 2 else " and ".join(people)
        where = re.sub(r"\\", "", field.get("note") or field.get("howpublished", ""))
        names[key] = ", ".join(part for part in (who, field.get("year"), where.rstrip(".")) if part)
    return names


def plain_notebook(nb, docname, names, titles, directives, install):
    "A copy of `nb` without directives; cells that only serve nbdev are left out, and `install` is named."
    nb = copy.deepcopy(nb)
    cells = []
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = plain_markdown(cell.source, docname, names, titles)
        else:
            found, cell.source = directives(cell.source)
            if "default_exp" in found or "nbdev_export(" in cell.source:
                continue
            if cell.source.startswith("![ -e /content ]"):
                cell.source = f"# This notebook needs the library. If it is not there, remove the # below:\n# %{install}"
            cell.source = re.sub(r":prf:ref:`([\w-]+)`", lambda m: names.get(m[1], m[1]), cell.source)
            cell.source = re.sub(r":(?:math|class|func):`~?([^`]+)`", r"``\1``", cell.source)
        cells.append(cell)
        if cell.cell_type == "code" and "fig-cap" in found:
            caption = plain_markdown(found["fig-cap"], docname, names, titles)
            cells.append(type(cell)(cell_type="markdown", id=f"{cell.id}-caption"[:64], metadata={}, source=f"*{caption}*"))
    nb.cells = cells
    return nb
