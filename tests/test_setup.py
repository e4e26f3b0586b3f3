"""`dev.py` ends with one line that says what to do when the set-up cannot go on."""
import os
import shutil
import subprocess
import sys

import dev
import pytest
from conftest import ROOT


def dev_py(folder, prelude="", *arguments, **environment):
    "Run the set-up in a folder of its own, after some Python that puts an obstacle in its way."
    for name in ("dev.py", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "sparse_variable_creation", folder / "sparse_variable_creation", dirs_exist_ok=True)
    code = f"import sys, runpy\n{prelude}\nsys.argv = ['dev.py', *{arguments!r}]\nrunpy.run_path('dev.py', run_name='__main__')"
    base = {k: v for k, v in os.environ.items() if not k.startswith("PIP_") and k != "VIRTUAL_ENV"}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, text=True, capture_output=True, timeout=300,
                          env={**base, **environment})


def only_line(result):
    "The one line that the set-up ended with."
    assert result.returncode == 1 and "Traceback" not in result.stderr + result.stdout, result.stderr + result.stdout
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("dev.py: "), result.stderr
    return lines[0]


def test_wrong_python(tmp_path):
    assert "3.11, 3.12 or 3.13 is needed, and this is 3.9" in only_line(dev_py(tmp_path, "sys.version_info = (3, 9, 1, 'final', 0)"))


def test_missing_venv_module(tmp_path):
    assert "apt install python3-venv" in only_line(dev_py(tmp_path, "sys.modules['ensurepip'] = None"))


def test_full_disk(tmp_path):
    prelude = "import shutil, types\nshutil.disk_usage = lambda path: types.SimpleNamespace(free=10**8)"
    assert "0.1 GiB are free" in only_line(dev_py(tmp_path, prelude))


def test_no_network(tmp_path):
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    assert "no network" in only_line(dev_py(tmp_path, "", **nowhere))


def test_a_failing_command_is_not_mistaken():
    assert dev.cause("page says: net::ERR Connection refused", setting_up=False) == ""


def test_a_broken_environment_is_made_anew(tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/nowhere/python3")
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    assert "no network" in only_line(dev_py(tmp_path, "", **nowhere))    # it got as far as the installation
    assert (tmp_path / ".venv" / "bin" / "pip").exists()


def test_unknown_command(tmp_path):
    assert "unknown command biuld" in only_line(dev_py(tmp_path, "", "biuld"))


@pytest.mark.parametrize("output,advice", [
    ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
    ("NewConnectionError('...: Failed to establish a new connection: [Errno -3] Temporary failure in name resolution')", "no network"),
    ("The virtual environment was not created successfully because ensurepip is not available.", "venv module"),
    ("[Errno 30] Read-only file system: '.venv'", "cannot be written"),
    ("error: something else", ""),
])
def test_causes(output, advice):
    assert dev.cause(output).find(advice) >= 0 and bool(dev.cause(output)) == bool(advice)


def test_lock_names_every_package():
    "What is installed is what the lock says."
    cuda = ("nvidia-", "cuda-", "triton")                                # come with PyTorch for CUDA, on Linux only
    lines = (ROOT / "constraints.txt").read_text().split()
    lock = {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}
    frozen = subprocess.run([sys.executable, "-m", "pip", "freeze", "--exclude-editable"], text=True, capture_output=True, check=True)
    for line in frozen.stdout.split("\n"):
        if "==" in line and not line.startswith(cuda):
            name, version = line.split("==")
            assert lock.get(name.lower().replace("_", "-")) == version.split("+")[0], f"{line} is not in constraints.txt"
