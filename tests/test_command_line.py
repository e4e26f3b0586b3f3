"""The command `svc`: exit codes, one line for what is wrong, the numbers of the library."""
import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file
from sparse_variable_creation.capacity.bounds import head_capacity
from sparse_variable_creation.capacity.depth import depth_capacity
from sparse_variable_creation.capacity.generalization import generalization_gap
from sparse_variable_creation.capacity.weights import capacity_of
from sparse_variable_creation.compiler.heads import AndHead
from sparse_variable_creation.face.command_line import main
from sparse_variable_creation.laboratory.models import Transformer

NORMS = "--B-V 1 --B-V21 1 --B-QK21 1"
DEEP = "--C-V 1 --C-V21 2 --C-QK 1 --C-QK21 2 --C-C 1 --C-C21 2 --B-w 1"


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
    save_file({"W_Q": torch.tensor(1.0)} | {name: torch.ones(3, 1) for name in ("W_K", "W_V")}, folder / "scalar")
    save_file({"W_Q": torch.ones(3, 1, dtype=torch.complex64)} | {name: torch.ones(3, 1) for name in ("W_K", "W_V")}, folder / "complex")
    save_file({name: torch.full((3, 1), 1e200, dtype=torch.float64) for name in ("W_Q", "W_K", "W_V")}, folder / "huge")
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


@pytest.mark.parametrize("m,word", [(100, "(vacuous:"), (1e13, "(not vacuous)")])
def test_text_says_whether_it_is_vacuous(svc, m, word):
    code, out, _ = svc("bound", *NORMS.split(), "--T", 50, "--m", m)
    assert code == 0 and word in out and all(part in out for part in ("values", "scores", "of error", "cut-off", "integral", "confidence"))


def test_deep_network_from_norms(svc):
    code, out, _ = svc("bound", *DEEP.split(), *"--layers 2 --heads 3 --residual --k 5 --d 7 --B-P 0.5 --P-21 2 --T 50 --m 100 --json".split())
    norms = dict(C_V=1, C_V21=2, C_QK=1, C_QK21=2, C_C=1, C_C21=2, B_w=1)
    want = depth_capacity(**norms, layers=2, heads=3, residual=True, k=5, d=7, B_P=0.5, P_21=2, T=50, m=100)
    got = json.loads(out)
    assert code == 0 and got["terms"] == want.terms and got["log_covering"] == want.log_covering(0.1)
    assert any("Lipschitz" in note for note in got["notes"]) and any("fixed in advance" in note for note in got["notes"])


def test_silent_coverings_are_vacuous(svc, tmp_path):
    "Tiny weights: the gap is below 1 only because the outputs are small."
    net = Transformer(T=6, d=8, heads=2, mlp_width=4)
    save_file(net.state_dict(), tmp_path / "fresh", metadata={"heads": "2"})
    code, out, _ = svc("bound", "--weights", tmp_path / "fresh", "--T", 6, "--m", 100, "--json")
    got = json.loads(out)
    assert code == 0 and got["vacuous"] and got["gap"] < 1 and got["entropy_integral"] >= got["output_bound"]
    assert "covering numbers say nothing" in svc("bound", "--weights", tmp_path / "fresh", "--T", 6, "--m", 100)[1]


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
    (f"{NORMS} --T 0 --m 5", 2, "--T is 0"),
    (f"{NORMS} --T 5 --m -5", 2, "--m is -5"),
    (f"{NORMS} --T 5 --m nan", 2, "--m is nan"),
    *[(f"{NORMS} --T 5 --m 5 --delta {delta}", 2, f"--delta is {float(delta)}") for delta in ("0", "1", "-0.5", "nan")],
    ("--B-V -1 --B-V21 1 --B-QK21 1 --T 5 --m 5", 2, "--B-V is -1"),
    ("--B-V inf --B-V21 1 --B-QK21 1 --T 5 --m 5", 2, "--B-V is inf"),
    (f"{NORMS} --T 5 --m 5 --eps 0", 2, "--eps is 0"),
    (f"{NORMS} --T 5 --m 5 --loss-bound 0", 2, "--loss-bound is 0"),
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
    ("--weights FILES/headless --T 12 --m 5", 2, "--heads is missing"),
    ("--weights FILES/net --heads 3 --T 12 --m 5", 2, "--heads is 3"),
    ("--weights FILES/net --T 13 --m 5", 2, "--T is 13"),
    *[(f"--weights FILES/{name} --T {T} --m 5", 2, f"--T is {T}") for name in ("net", "head") for T in (0, -1)],
    ("--weights FILES/net --T 12.5 --m 5", 2, "--T"),
    ("--weights FILES/net --B-X -3 --T 12 --m 5", 2, "--B-X is -3"),
    ("--weights FILES/net --L-sigma 2 --T 12 --m 5", 2, "--L-sigma is 2"),
    ("--weights FILES/net --d 16 --T 12 --m 5", 2, "--d is 16"),
    ("--weights FILES/net --residual --T 12 --m 5", 2, "--residual is True"),
    ("--weights FILES/head --heads 2 --T 12 --m 5", 2, "--heads is 2"),
    ("--weights FILES/head --layer-norm exact --T 12 --m 5", 2, "--layer-norm is exact"),
    ("--weights FILES/head --B-X -3 --T 12 --m 5", 2, "--B-X is -3"),
    ("--weights FILES/scalar --T 12 --m 5", 2, "W_Q has shape []"),
    ("--weights FILES/complex --T 12 --m 5", 2, "W_Q is complex"),
    ("--weights FILES/huge --T 12 --m 5", 2, "is empty or has entries above"),
    (f"{NORMS} --heads 2 --T 5 --m 5", 2, "--heads is 2"),
    (f"{NORMS} --layer-norm rubbish --T 5 --m 5", 2, "--layer-norm is rubbish"),
    (f"{NORMS} --layers 2 --T 5 --m 5", 2, "--layers is 2"),
    (f"{NORMS} --P-21 1 --T 5 --m 5", 2, "--B-P is missing"),
    (f"{NORMS} --C-V 1 --T 5 --m 5", 2, "does not apply"),
    ("--C-V 1 --T 5 --m 5", 2, "--C-V21 is missing"),
    (f"{DEEP} --layers 0 --T 5 --m 5", 2, "--layers is 0"),
    (f"{DEEP} --layers 1.5 --T 5 --m 5", 2, "--layers"),
    *[(f"{NORMS.replace('--B-V 1', '--B-V ' + big)} --T 5 --m 5", 2, "--B-V is") for big in ("1e100", "1e200")],
    (f"{NORMS} --T 5 --m 5 --loss-bound 1e300", 2, "--loss-bound is"),
    (f"{NORMS} --T 5 --m 5 --eps 1e-200", 2, "--eps is"),
    ("--weights FILES/net --layer-norm batch --T 12 --m 5", 2, "--layer-norm is 'batch'"),
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


def test_a_compiled_file_knows_its_length(svc, tmp_path):
    file = tmp_path / "and.safetensors"
    assert svc("compile", "x0 & x5", "--length", 30, "--out", file)[0] == 0
    assert svc("bound", "--weights", file, "--T", 30, "--m", 100)[0] == 0
    code, out, err = svc("bound", "--weights", file, "--T", 31, "--m", 100)
    assert (code, out) == (2, "") and "--T is 31" in err and "T = 30" in err
