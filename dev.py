#!/usr/bin/env python3
"""Everything from a clone, with nothing but git and Python 3.11 to 3.13.

python3 dev.py           make .venv, install the locked packages, build the book, say where to open it
python3 dev.py test      the same set-up, then everything that CI checks
python3 dev.py export    after editing a notebook: export the modules, clean the notebooks, spell out the address
python3 dev.py setup     only the set-up
"""
import collections
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
ENV = dict(os.environ, PATH=str(BIN) + os.pathsep + os.environ.get("PATH", ""), VIRTUAL_ENV=str(VENV), OMP_NUM_THREADS="1",
           PYTHONUNBUFFERED="1", JUPYTER_PREFER_ENV_PATH="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
PAGE = ROOT / "_build" / "html" / "index.html"
KEEPS_OUTPUT = re.compile(r"(#\|.*\n)*#\| *(cuda|notest|eval: *false)")  # cells that the book does not run
NEEDED_GIB = 3  # the installed packages take about 1.5 GiB with PyTorch for the CPU, and pip unpacks before it installs
CAUSES = [  # what a failed step of the set-up printed, and what to do about it; the first one can meet any step
    (r"No space left on device|Errno 28|Disk quota exceeded",
     "the disk is full, in this folder or in the temporary one: free some space (the set-up takes about {gib} GiB, with "
     "PyTorch for CUDA 8 GiB) and run this again"),
    (r"Temporary failure in name resolution|Name or service not known|getaddrinfo failed|nodename nor servname|"
     r"NewConnectionError|Connection refused|Network is unreachable|ConnectTimeout|Read timed out|ProxyError|"
     r"Max retries exceeded|No route to host|from versions: none",
     "no network: the set-up downloads packages once; connect (or set pip's proxy or index) and run this again"),
    (r"ensurepip|No module named '?venv", "Python's venv module is missing: install it (Debian, Ubuntu: apt install python3-venv) "
     "and run this again"),
    (r"Permission denied|Read-only file system", "this folder cannot be written: {root}"),
]


def fail(message):
    sys.exit("dev.py: " + message)


def cause(output, setting_up=True):
    "One line that says what to do about a step that failed with `output`, or an empty string."
    for pattern, advice in CAUSES if setting_up else CAUSES[:1]:
        if re.search(pattern, output):
            return advice.format(gib=NEEDED_GIB, root=ROOT)
    return ""


NOISE = "Kernel is running over TCP without encryption"  # on this machine only, and once for each notebook


def run(*args, show=True, hint="see above"):
    "Run a command, pass on what it prints (not during the set-up), and return it; end with one line where it fails."
    args = [str(a) for a in args]
    print("+", " ".join([Path(args[0]).name] + args[1:]), flush=True)
    lines = collections.deque(maxlen=4000)
    with subprocess.Popen(args, cwd=str(ROOT), env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace") as process:
        for line in process.stdout:
            lines.append(line)
            if show and NOISE not in line:
                print(line, end="", flush=True)
    output = "".join(lines)
    if process.returncode:
        advice = cause(output, setting_up=not show)
        if not show and not advice:
            print("\n".join(line for line in output[-6000:].split("\n")[1:] if "WARNING: Location" not in line))
        fail("`%s` failed: %s" % (" ".join([Path(args[0]).name] + args[1:3]), advice or hint))
    return output


def tool(name):
    return BIN / (name + (".exe" if os.name == "nt" else ""))


def setup():
    "Make the environment and install the locked packages, unless they are there."
    stamp = VENV / "installed"
    want = "\n".join([str(VENV)] + [(ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt")])
    sound = tool("python").exists() and subprocess.call([str(tool("python")), "-c", "import pip"]) == 0
    if sound and stamp.exists() and stamp.read_text() == want:
        return
    sound = sound and (not stamp.exists() or stamp.read_text().startswith(str(VENV) + "\n"))  # it was not moved
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        fail("Python 3.11, 3.12 or 3.13 is needed, and this is %d.%d: run for example `python3.12 dev.py`" % sys.version_info[:2])
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        fail(cause("ensurepip"))
    free = shutil.disk_usage(str(ROOT)).free / 2**30
    if free < NEEDED_GIB and not stamp.exists():
        fail("%.1f GiB are free in %s: the set-up takes about %d, with PyTorch for CUDA 8; free some space and run this again"
             % (free, ROOT, NEEDED_GIB))
    if not sound:
        run(sys.executable, "-m", "venv", "--clear", VENV, show=False)
    print("Installing the locked packages: a few minutes the first time", flush=True)
    run(tool("python"), "-m", "pip", "install", "-q", "-c", "constraints.txt", "-e", ".[dev]", show=False,
        hint="see above, and run this again: it goes on where it stopped")
    stamp.write_text(want)


def book(*options):
    "Build the book; warnings are errors."
    unfinished = ROOT / "_build" / "unfinished"
    if unfinished.exists():  # after a failed build only a clean one tells the truth
        options = ("--all",)
    unfinished.parent.mkdir(exist_ok=True)
    unfinished.touch()
    run(tool("jupyter-book"), "build", ".", "-W", "--keep-going", "-n", *options,
        hint="see above; if a cell failed, `.venv/bin/nbdev_test` says which in a few lines")
    unfinished.unlink()
    in_step = [str(tool("python")), "-m", "pytest", "-q", "tests/test_notebooks.py", "-k", "modules_are_exported"]
    if subprocess.call(in_step, cwd=str(ROOT), env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        print("Warning: the modules differ from the notebooks; run python3 dev.py export and build again")
    print("Open", PAGE.as_uri())


def notebooks():
    "Every notebook of the project."
    found = [p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts]
    return sorted(found) + [ROOT / "index.ipynb"]


def test_notebooks():
    "Run nbdev_test, and check that it ran every notebook."
    output = "".join(run(tool("nbdev_test"), *where, "--do_print", "--timing")
                     for where in (["--n_workers", "2"], ["--path", "index.ipynb"]))
    tested = {Path(p).resolve() for p in re.findall(r"- Completed (.*?\.ipynb)", output)}
    missed = [str(p.relative_to(ROOT)) for p in notebooks() if p not in tested]
    if missed:
        fail("nbdev_test passed over %s: rename or mend it so that it runs" % ", ".join(missed))
    print("nbdev_test: %d of %d notebooks tested" % (len(tested), len(notebooks())))


def export():
    "Clean the notebooks, export the modules, and spell out the address of settings.ini where a file must."
    for path in notebooks():
        notebook = json.loads(path.read_text(encoding="utf8"))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code" and not KEEPS_OUTPUT.match("".join(cell["source"])):
                cell["outputs"] = []
        path.write_text(json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf8")
    for where in ([], ["--fname", "index.ipynb"]):
        run(tool("nbdev_clean"), *where)
    run(tool("nbdev_export"))  # after the cleaning, which gives ids to cells that have none
    new = re.search(r"^git_url *= *(\S+)", (ROOT / "settings.ini").read_text(), re.M).group(1)
    citation = ROOT / "CITATION.cff"
    old = re.search(r"^repository-code: *(\S+)", citation.read_text(), re.M).group(1)
    if new != old:
        names = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "pyproject.toml")
        for path in [ROOT / name for name in names] + notebooks() + [citation]:
            path.write_text(path.read_text().replace(old, new))


def test():
    "Everything that CI checks."
    run(tool("python"), "-m", "pytest", "-q", "tests/test_notebooks.py")
    test_notebooks()
    book("--all")
    run(tool("python"), "-m", "pytest", "-q", "-rs", "--ignore", "tests/test_notebooks.py")


if __name__ == "__main__":
    COMMANDS = {"book": book, "test": test, "export": export, "setup": lambda: None}
    if {"-h", "--help", "help"} & set(sys.argv[1:]):
        print(__doc__.strip())
        sys.exit()
    unknown = [name for name in sys.argv[1:] if name not in COMMANDS]
    if unknown:
        fail("unknown command %s; there are: %s" % (unknown[0], ", ".join(COMMANDS)))
    try:
        setup()
        for command in sys.argv[1:] or ["book"]:
            COMMANDS[command]()
    except KeyboardInterrupt:
        fail("stopped; run the same command again to go on")
    except OSError as error:
        fail(cause(str(error)) or str(error))
