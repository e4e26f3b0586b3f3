"""The command `svc`: exit codes, one line for what is wrong, the numbers of the library."""
import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file
from sparse_variable_creation.capacity.bounds import head_capacity
from sparse_variable_creation.capacity.generalization import generalization_gap
from sparse_variable_creation.capacity.weights import capacity_of
from sparse_variable_creation.compiler.heads import AndHead
from sparse_variable_creation.face.command_line import main
from sparse_variable_creation.laboratory.models import Transformer

NORMS = "--B-V 1 --B-V21 1 --B-QK21 1"


@pytest.fixture
def svc(capsys):
    "Run svc in this process: exit code, output, errors."
    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            main([str(a) for a in arguments])
        return end.value.code, *capsys.readouterr()
    return run


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    net = Transformer(T=12, d=16, heads=2, mlp_width=8)
    save_file(AndHead([1, 4], T=12).state_dict(), folder / "head")
    save_file(net.state_dict(), folder / "net", metadata={"heads": "2"})
    save_file(net.state_dict(), folder / "headless")
    save_file({"W_Q": torch.ones(3, 1), "W_V": torch.ones(3, 1)}, folder / "lacking")
    save_file({"W_Q": torch.ones(3, 1), "W_K": torch.ones(2, 1), "W_V": torch.ones(3, 1)}, folder / "unfit")
    save_file({name: torch.full((3, 1), torch.nan) for name in ("W_Q", "W_K", "W_V")}, folder / "nan")
    (folder / "text").write_text("these are not weights")
    (folder / "empty").write_bytes(b"")
    (folder / "cut").write_bytes((folder / "net").read_bytes()[:-100])
    (folder / "folder").mkdir()
    return folder


@pytest.mark.parametrize("m,vacuous", [(100, True), (1e13, False)])
def test_numbers_are_those_of_the_library(svc, m, vacuous):
    code, out, err = svc("bound", *NORMS.split(), "--T", 50, "--m", m, "--delta", 0.1, "--json")
    assert (code, err) == (0, "")
    got, capacity = json.loads(out), head_capacity(B_V=1, B_V21=1, B_QK21=1, T=50, m=m)
    gap = generalization_gap(capacity, m, 0.1)
    assert got["gap"] == gap.gap and got["vacuous"] is vacuous and got["log_covering"] == capacity.log_covering(0.1)
    assert got["terms"] == capacity.terms and got["split"] == capacity.split


@pytest.mark.parametrize("m,word", [(100, "(vacuous"), (1e13, "(not vacuous)")])
def test_text_says_whether_it_is_vacuous(svc, m, word):
    code, out, _ = svc("bound", *NORMS.split(), "--T", 50, "--m", m)
    assert code == 0 and word in out and all(part in out for part in ("values", "scores", "share", "cut-off", "integral", "confidence"))


def test_weights_from_a_file(svc, files):
    code, out, _ = svc("bound", "--weights", files / "head", "--T", 12, "--m", 50, "--json")
    assert code == 0 and json.loads(out)["terms"] == capacity_of(AndHead([1, 4], T=12), T=12, m=50).terms
    for options in (["net"], ["headless", "--heads", 2]):
        code, out, _ = svc("bound", "--weights", files / options[0], *options[1:], "--T", 12, "--m", 50, "--json")
        net = Transformer(T=12, d=16, heads=2, mlp_width=8)
        assert code == 0 and json.loads(out)["coefficient"] == pytest.approx(capacity_of(net, 12, 50).coefficient, rel=1e-9)
    code, out, _ = svc("bound", "--weights", files / "net", "--layer-norm", "projection", "--T", 12, "--m", 50)
    assert code == 0 and "not this network" in out


@pytest.mark.parametrize("arguments,code,text", [
    (f"{NORMS} --m 5", 2, "--T"),
    (f"{NORMS} --T 5", 2, "--m"),
    (f"{NORMS} --T five --m 5", 2, "--T"),
    (f"{NORMS} --T 0 --m 5", 2, "T is 0"),
    (f"{NORMS} --T 5 --m -5", 2, "m is -5"),
    (f"{NORMS} --T 5 --m nan", 2, "m is nan"),
    *[(f"{NORMS} --T 5 --m 5 --delta {delta}", 2, f"delta is {float(delta)}") for delta in ("0", "1", "-0.5", "nan")],
    ("--B-V -1 --B-V21 1 --B-QK21 1 --T 5 --m 5", 2, "B_V is -1"),
    ("--B-V inf --B-V21 1 --B-QK21 1 --T 5 --m 5", 2, "B_V is inf"),
    (f"{NORMS} --T 5 --m 5 --eps 0", 2, "eps is 0"),
    (f"{NORMS} --T 5 --m 5 --loss-bound 0", 2, "loss_bound is 0"),
    (f"{NORMS} --T 5 --m 5 --depth 3", 2, "--depth"),
    ("--B-V 1 --B-V21 1 --T 5 --m 5", 2, "--B-QK21"),
    (f"{NORMS} --B-QKF 1 --T 5 --m 5", 2, "--B-QKF"),
    ("--T 5 --m 5", 2, "--weights"),
    (f"{NORMS} --weights FILES/head --T 5 --m 5", 2, "both given"),
    ("--weights FILES/nowhere --T 5 --m 5", 1, "nowhere"),
    ("--weights FILES/text --T 5 --m 5", 1, "safetensors"),
    ("--weights FILES/empty --T 5 --m 5", 1, "safetensors"),
    ("--weights FILES/cut --T 12 --m 5", 1, "safetensors"),
    ("--weights FILES/folder --T 5 --m 5", 1, "folder"),
    ("--weights FILES/lacking --T 5 --m 5", 2, "W_K"),
    ("--weights FILES/unfit --T 5 --m 5", 2, "W_K has shape [2, 1]"),
    ("--weights FILES/nan --T 5 --m 5", 2, "not finite"),
    ("--weights FILES/headless --T 12 --m 5", 2, "heads is missing"),
    ("--weights FILES/net --heads 3 --T 12 --m 5", 2, "heads is 3"),
    ("--weights FILES/net --T 13 --m 5", 2, "T is 13"),
    ("--weights FILES/net --layer-norm batch --T 12 --m 5", 2, "layer_norm is 'batch'"),
])
def test_bad_input_is_one_line(svc, files, arguments, code, text):
    got, out, err = svc("bound", *arguments.replace("FILES", str(files)).split(), "--json")
    assert got == code and text in err and not out, (got, out, err)
    assert len(err.splitlines()) == 1 and err.startswith("svc: ") and "Traceback" not in err


def test_unknown_command(svc):
    assert svc("bond")[0] == 2


def test_help_is_quick_and_needs_no_torch():
    code = ("import sys; from sparse_variable_creation.face.command_line import main\n"
            "try: main(['bound', '--help'])\n"
            "except SystemExit as end: assert end.code == 0 and 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--B-QK21" in done.stdout, done.stderr
