"""Sweeps survive kills, full disks, damaged files and each other; the exported table has the same bytes."""
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from sparse_variable_creation.face.command_line import main
from sparse_variable_creation.laboratory import blocks
from sparse_variable_creation.laboratory.blocks import code_hash
from sparse_variable_creation.laboratory.cluster import RayWorkers
from sparse_variable_creation.laboratory.store import Store, StoreError
from sparse_variable_creation.laboratory.sweeps import NAMED, Sweep, named_sweep, run
from sparse_variable_creation.laboratory.tables import audit, export, read_table

TINY = dict(s=2, d=8, heads=2, mlp_width=8, steps=12, batch=8, tests=40, replicates=2, block=1)
DRIVER = Path(__file__).with_name("sweep_driver.py")
POSIX = pytest.mark.skipif(os.name != "posix", reason="needs fork and signals")


def tiny(**more):
    return Sweep(**({"name": "tiny", "T": [4, 6], "m": [8, 16]} | TINY | more))


def table(store, name="tiny"):
    "The bytes of the exported table."
    export(store, name, out := Path(f"{store}.csv"))
    return out.read_bytes()


@pytest.fixture
def svc(capsys):
    "Run svc in this process: exit code, output, errors."
    def call(*arguments):
        with pytest.raises(SystemExit) as end:
            main([str(a) for a in arguments])
        return end.value.code, *capsys.readouterr()
    return call


def drive(*arguments):
    "Run tests/sweep_driver.py: what it prints."
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, DRIVER, *map(str, arguments)], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@POSIX
def test_twenty_kills(tmp_path):
    "Killed at 20 random moments: the same bytes, at most 1.5 times the work."
    said = drive("kills", tmp_path, 20)
    assert said["kills"] == 20
    assert table(tmp_path / "killed.sqlite") == table(tmp_path / "whole.sqlite")
    assert said["work"] <= 1.5 * said["blocks"], said


@POSIX
def test_two_processes_on_one_store(tmp_path):
    "Each block once in the table, hardly any twice in the work, and all whole."
    said = drive("two", tmp_path)
    assert said["codes"] == [0, 0]
    assert table(tmp_path / "shared.sqlite") == table(tmp_path / "whole.sqlite")
    assert said["work"] <= 1.25 * said["blocks"], said


@POSIX
def test_a_killed_driver_leaves_no_worker_behind(tmp_path, svc):
    psutil = pytest.importorskip("psutil")
    store, config = tmp_path / "a.sqlite", tmp_path / "sweep.json"
    sweep = tiny(T=list(range(4, 14)), steps=60)
    config.write_text(json.dumps(sweep.config()))
    code = "from sparse_variable_creation.face.command_line import main; main()"
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    driver = subprocess.Popen([sys.executable, "-c", code, "run", config, "--store", store, "--workers", "2"], env=env, stderr=subprocess.DEVNULL)
    recorded, end = 0, time.monotonic() + 120
    while not recorded and time.monotonic() < end and driver.poll() is None:
        time.sleep(0.2)
        with contextlib.suppress(StoreError), Store(store) as base:
            recorded = len(base.blocks())
    children = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.wait()
    assert 0 < recorded < 40 and len(children) >= 2
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    assert svc("resume", "--store", store, "--workers", "0")[0] == 0
    run(sweep, tmp_path / "whole.sqlite")
    assert table(store) == table(tmp_path / "whole.sqlite")


def test_resuming_a_search(tmp_path):
    "A search that is cut short and resumed, and one in a pool of processes, go the same way."
    sweep = tiny(name="tiny", m=dict(low=4, high=32, rate=0.5, accuracy=0.7), steps=30, T=[4, 6])
    run(sweep, tmp_path / "whole.sqlite")
    run(sweep, tmp_path / "pool.sqlite", workers=2)
    for i in (1, 2):
        run(sweep, tmp_path / "shards.sqlite", shard=(i, 2))
    assert table(tmp_path / "pool.sqlite") == table(tmp_path / "whole.sqlite") == table(tmp_path / "shards.sqlite")


@pytest.mark.parametrize("more", [dict(T=[4, 5, 6]), dict(m=[8, 12, 16]), dict(replicates=3), dict(s=[1, 2]), dict(lr=[1e-3, 1e-2])])
def test_more_rows_change_no_other(tmp_path, more):
    run(tiny(), tmp_path / "a.sqlite")
    run(tiny(**more), tmp_path / "b.sqlite")
    few, many = table(tmp_path / "a.sqlite").splitlines(), table(tmp_path / "b.sqlite").splitlines()
    assert len(many) > len(few) and set(few) <= set(many)


def test_stale_rows_are_named_and_not_mixed(tmp_path, svc, monkeypatch):
    store, csv = tmp_path / "a.sqlite", tmp_path / "a.csv"
    run(tiny(), store)
    old, before = code_hash(), table(store)
    for module in ("sweeps", "tables", "blocks"):
        monkeypatch.setattr(f"sparse_variable_creation.laboratory.{module}.code_hash", lambda *_: "changed")
    _, out, _ = svc("status", "--store", store)
    assert f"stale: 8 blocks by code {old}" in out and "0 blocks recorded, 8 lacking" in out
    code, _, err = svc("export", "--store", store, "--out", csv)
    assert code == 1 and old in err and not csv.exists()
    report = run(tiny(T=4), store)
    assert (report.computed, report.stale) == (4, 4)
    code, out, _ = svc("export", "tiny", "--store", store, "--out", csv)
    assert code == 0 and {row["code"] for row in read_table(csv).rows} == {"changed"}
    run(tiny(), store)
    code, _, _ = svc("export", "tiny", "--store", store, "--out", csv, "--code", old)
    assert code == 0 and csv.read_bytes() == before


BAD_SWEEPS = ["m=0", "m=[]", "m=[8,8]", "T=1", "replicates=0", "replicates=3", "widht=3", "task=nor", "lr=0", "heads=3", "T=x", "seed=-1"]


@pytest.mark.parametrize("arguments", [*(["--set", one] for one in BAD_SWEEPS), ["--set", "T"], ["--device", "cuda:99"], ["--device", "abacus"],
                                       ["--profile", "huge"], ["--shard", "0/2"], ["--shard", "x"], ["--workers", "-1"]])
def test_bad_arguments_leave_the_store_alone(tmp_path, svc, arguments):
    store, config = tmp_path / "a.sqlite", tmp_path / "tiny.json"
    config.write_text(json.dumps(tiny(block=2).config()))
    for there in (False, True):
        if there:
            run(tiny(), store)
        before = store.read_bytes() if there else None
        name = "and" if "--profile" in arguments else config
        code, out, err = svc("run", name, "--store", store, *arguments)
        assert code == 2 and not out and len(err.splitlines()) == 1, err
        assert (store.read_bytes() if there else None) == before and store.exists() == there


def damaged(path, kind):
    "A file that is not a sound store."
    store = path / "good.sqlite"
    run(tiny(), store)
    good, bad = store.read_bytes(), path / "bad.sqlite"
    middle = len(good) // 2 // 4096 * 4096
    bad.write_bytes({"empty": b"", "text": b"notes " * 99, "truncated": good[:-4096], "cut": good[:50],
                     "newer": good[:60] + (2).to_bytes(4, "big") + good[64:],
                     "scratched": good[:middle] + b"\xff" * 4096 + good[middle + 4096:],
                     "flipped": good.replace(b'"loss":0.', b'"loss":1.', 1)}.get(kind, b""))
    if kind == "foreign":
        bad.unlink()
        with contextlib.closing(sqlite3.connect(bad)) as base:
            base.execute("CREATE TABLE mine (x)")
    return bad


@pytest.mark.parametrize("kind", ["empty", "text", "truncated", "cut", "newer", "scratched", "flipped", "foreign"])
def test_what_is_no_sound_store_is_refused(tmp_path, svc, kind):
    store = damaged(tmp_path, kind)
    before = store.read_bytes()
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps(tiny().config()))
    for command in (["run", config], ["resume"], ["status"], ["export", "tiny", "--out", tmp_path / "x.csv"], ["merge", tmp_path / "new.sqlite", store]):
        code, out, err = svc(*command, *([] if command[0] == "merge" else ["--store", store]))
        assert code == 1 and not out and len(err.splitlines()) == 1, (command, code, out, err)
        assert store.read_bytes() == before and not (tmp_path / "x.csv").exists() and not (tmp_path / "new.sqlite").exists()
    if kind in ("truncated", "scratched", "flipped"):
        code, out, _ = svc("export", "--salvage", "--store", store, "--out", tmp_path / "good.csv", "--json")
        rows, good = read_table(tmp_path / "good.csv").rows, read_table_of(tmp_path / "good.sqlite")
        assert code == 0 and rows and all(row in good for row in rows)
        assert len(rows) == 7 or kind != "flipped"
        assert store.read_bytes() == before


def read_table_of(store):
    table(store)
    return read_table(Path(f"{store}.csv")).rows


@contextlib.contextmanager
def mounted(folder, options):
    "A tiny file system in memory, where this process may mount one."
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_full_disk(tmp_path, svc):
    "The run ends with a clear error; what was recorded stays; with space again it goes on to the same bytes."
    sweep = tiny(T=list(range(4, 24)))
    run(sweep, tmp_path / "whole.sqlite")
    with mounted(tmp_path / "small", "size=64k") as folder:
        with pytest.raises(StoreError, match="full|No space"):
            run(sweep, folder / "a.sqlite")
        with Store(folder / "a.sqlite") as base:
            kept = base.blocks()
        assert 0 < len(kept) < 80
        with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as filler:
            while filler.write(b"x" * 512):
                pass
        with pytest.raises(OSError, match="cannot be written: No space"):
            export(folder / "a.sqlite", "tiny", folder / "a.csv", partial=True)
        assert not (folder / "a.csv").exists()
        shutil.copy(folder / "a.sqlite", tmp_path / "a.sqlite")
    report = run(sweep, tmp_path / "a.sqlite")
    assert report.found == len(kept) and table(tmp_path / "a.sqlite") == table(tmp_path / "whole.sqlite")


def test_full_disk_without_a_mount(tmp_path, monkeypatch):
    "The same from SQLite's own limit, which every machine has."
    declare = Store.declare

    def limited(self, *arguments):
        declare(self, *arguments)
        self.base.execute("PRAGMA max_page_count=8")
    sweep = tiny(T=list(range(4, 14)))
    with monkeypatch.context() as patch:
        patch.setattr(Store, "declare", limited)
        with pytest.raises(StoreError, match="full"):
            run(sweep, tmp_path / "a.sqlite")
    run(sweep, tmp_path / "whole.sqlite")
    assert 0 < run(sweep, tmp_path / "a.sqlite").found < 40
    assert table(tmp_path / "a.sqlite") == table(tmp_path / "whole.sqlite")


@POSIX
def test_read_only_folder(tmp_path):
    "Nothing can be begun in it, and nothing that is there is lost; it can still be read and exported elsewhere."
    folder = tmp_path / "fixed"
    folder.mkdir()
    run(tiny(), folder / "a.sqlite")
    before = (folder / "a.sqlite").read_bytes()
    if os.geteuid():
        folder.chmod(0o555)
        (folder / "a.sqlite").chmod(0o444)
        guard = contextlib.nullcontext()
    else:  # the superuser may write everywhere but on a file system that is read-only
        guard = read_only(folder)
    with guard:
        for store in ("a.sqlite", "new.sqlite"):
            with pytest.raises(StoreError, match="readonly|read-only|Read-only|Permission|unable to open"):
                run(tiny(T=[4, 5]), folder / store)
        assert (folder / "a.sqlite").read_bytes() == before and not (folder / "new.sqlite").exists()
        export(folder / "a.sqlite", "tiny", tmp_path / "a.csv")
        with pytest.raises(OSError, match="cannot be written"):
            export(folder / "a.sqlite", "tiny", folder / "a.csv")
    folder.chmod(0o755)
    assert len(read_table(tmp_path / "a.csv").rows) == 8


@contextlib.contextmanager
def read_only(folder):
    steps = [["mount", "--bind", folder, folder], ["mount", "-o", "remount,bind,ro", folder]]
    for n, step in enumerate(steps):
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            if n:
                subprocess.run(["umount", folder])
            pytest.skip(f"cannot make a folder read-only here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_commands(tmp_path, svc):
    "Each command has help and JSON, and says what it did by its exit code."
    for command in ("run", "status", "resume", "merge", "export", "doctor"):
        code, out, _ = svc(command, "--help")
        assert code == 0 and "--json" in out
    config, store = tmp_path / "tiny.json", tmp_path / "a.sqlite"
    config.write_text(json.dumps(tiny().config()))
    for i in (1, 2, 3):
        code, out, _ = svc("run", config, "--store", tmp_path / f"{i}", "--shard", f"{i}/3", "--workers", "0", "--json")
        assert code == 0 and json.loads(out)[0]["complete"]
    code, out, _ = svc("merge", store, *(tmp_path / f"{i}" for i in (1, 2, 3)), "--json")
    assert code == 0 and len(json.loads(out)["new"]) == 8
    assert json.loads(svc("status", "--store", store, "--json")[1])[0]["complete"]
    run(tiny(), tmp_path / "whole.sqlite")
    assert table(store) == table(tmp_path / "whole.sqlite")
    code, out, _ = svc("export", "--store", store, "--out", tmp_path / "t.csv", "--json")
    facts = json.loads(out)
    assert code == 0 and {"sweep", "code", "seeds", "conditions", "modules", "sha256", "wall seconds", "command"} <= facts.keys()
    assert {"computed on", "threads", "git", "package", "system"} <= facts["conditions"][0].keys()
    assert svc("export", "nothing", "--store", store)[0] == 2
    assert svc("resume", "nothing", "--store", store)[0] == 2
    assert svc("run", tmp_path / "t.provenance.json", "--store", store, "--workers", "0")[0] == 0
    assert svc("status", "--store", tmp_path / "nowhere")[0] == 1


def test_parquet(tmp_path):
    if not importlib.util.find_spec("pyarrow"):
        pytest.skip("PyArrow is not installed: the extra [parquet]")
    run(tiny(), tmp_path / "a.sqlite")
    export(tmp_path / "a.sqlite", "tiny", tmp_path / "a.csv")
    rows = read_table(tmp_path / "a.csv").rows
    export(tmp_path / "a.sqlite", "tiny", tmp_path / "a.parquet")
    first = (tmp_path / "a.parquet").read_bytes()
    assert read_table(tmp_path / "a.parquet").rows == rows
    export(tmp_path / "a.sqlite", "tiny", tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == first


def test_replicates_need_no_block():
    assert [Sweep(task="and", T=[20], m=[32], replicates=r).block for r in (1, 4, 20, 48)] == [1, 4, 4, 16]
    assert named_sweep("and", "quick", {"replicates": 4}).block == 4
    for twice in (dict(T=[4, 4.0]), dict(lr=[1, 1.0])):
        with pytest.raises(ValueError, match="twice"):
            Sweep(**{"T": 20, "m": 32} | twice)


def test_named_sweeps_can_be_declared():
    for name, profiles in NAMED.items():
        for profile in profiles:
            assert named_sweep(name, profile).cells


def test_the_store_takes_little_time(tmp_path):
    "Under 2 % of a quick sweep."
    report = run(named_sweep("and", "quick"), tmp_path / "a.sqlite")
    assert report.store_seconds < 0.02 * report.seconds, report


RECORDED = [p.parent / (p.name.replace(".provenance.json", e)) for p in (ROOT / "results").glob("*.provenance.json") for e in (".csv", ".parquet")]


@pytest.mark.parametrize("path", [pytest.param(p, id=p.name) for p in RECORDED if p.exists()])
def test_recorded_sweeps_are_reproducible(path):
    "One block of each recorded sweep, computed anew: the same data, the same first losses."
    assert audit(path)["block"]


def test_ray_cluster_loses_a_node(tmp_path):
    "Two nodes, one killed in mid-run: the table of the local run."
    ray = pytest.importorskip("ray", reason="Ray is not installed: the extra [cluster]")
    from ray.cluster_utils import Cluster

    sweep = tiny(T=list(range(4, 16)), steps=100)
    run(sweep, tmp_path / "whole.sqlite")
    os.environ["PYTHONPATH"], before = str(ROOT), os.environ.get("PYTHONPATH")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        lost = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()

        class Watched(RayWorkers):
            "Kills the second node when a quarter is done."
            done = 0

            def collect(self):
                found = super().collect()
                self.done += len(found)
                if self.done >= 12 and lost in cluster.list_all_nodes():
                    cluster.remove_node(lost, allow_graceful=False)
                return found
        hands = Watched(cluster.address)
        assert ray.cluster_resources()["CPU"] == 2
        report = run(sweep, tmp_path / "ray.sqlite", workers=hands)
        hands.close()
        assert report.computed == 48 and lost not in cluster.list_all_nodes()
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.pop("PYTHONPATH")
        os.environ.update({} if before is None else {"PYTHONPATH": before})
    assert table(tmp_path / "ray.sqlite") == table(tmp_path / "whole.sqlite")
