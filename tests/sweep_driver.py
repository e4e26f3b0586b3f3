"""Drive sweeps in processes that can be killed: called by test_sweeps.py, prints JSON.

PyTorch is imported once; each attempt is a fork, so that it begins at once.
"""
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from sparse_variable_creation.laboratory import blocks
from sparse_variable_creation.laboratory.sweeps import Sweep, run

torch.set_num_threads(1)
SWEEP = Sweep(name="tiny", T=list(range(4, 20)), m=[8, 16], s=2, d=16, heads=2, mlp_width=16, steps=20, batch=8, tests=40, replicates=2, block=1)
real = blocks.run_block


def attempt(store, log):
    "Begin a run of the sweep in a new process; each block that is begun leaves a byte in the log."
    child = os.fork()
    if child:
        return child
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def counted(*arguments):
        os.write(file, b".")
        return real(*arguments)
    blocks.run_block = counted
    try:
        run(SWEEP, store)
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)


def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    what, folder = sys.argv[1], Path(sys.argv[2])
    said = {"blocks": sum(len(SWEEP.blocks(cell)) for cell in SWEEP.cells)}
    start = time.monotonic()
    assert ended(attempt(folder / "whole.sqlite", folder / "whole.log")) == 0
    said["seconds"] = time.monotonic() - start
    if what == "two":
        said["codes"] = [ended(child) for child in [attempt(folder / "shared.sqlite", folder / "log") for _ in range(2)]]
    else:
        draw, said["kills"] = random.Random(0), 0
        for _ in range(int(sys.argv[3])):
            child = attempt(folder / "killed.sqlite", folder / "log")
            time.sleep(draw.uniform(0, said["seconds"] / 14))
            os.kill(child, signal.SIGKILL)
            said["kills"] += ended(child) == -signal.SIGKILL
        assert ended(attempt(folder / "killed.sqlite", folder / "log")) == 0
    said["work"] = (folder / "log").stat().st_size
    print(json.dumps(said))
