"""Time a training step of an ensemble against other ways to train the same networks: python benchmarks/ensemble.py --help"""
import argparse
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from sparse_variable_creation.figures import provenance  # noqa: E402
from sparse_variable_creation.laboratory.ensemble import Ensemble, find_device  # noqa: E402
from sparse_variable_creation.laboratory.models import Transformer, dense_logits  # noqa: E402

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    jax = None

BARS = {(20, 32): 15, (100, 64): 65, (100, 256): 120, (400, 256): 500}  # least ratio to the loop of PyTorch's layers
CLOSE = 1e-4  # by how much the losses of the first steps, in nats, may differ between the contestants
H = 4


def flops(T, B, d=64):
    "Floating point operations in the matrix products of a training step of one network in table form."
    return 3 * ((2 * T + 1) * (2 * d * d + 2 * d * H) + B * 18 * d * d) + 4 * B * 2 * T * (d + H)


def seconds(f, device):
    "Time of a call: processor time where the processor computes, for the machine may be shared; else by the clock."
    if device.type == "cpu":
        start = time.process_time()
        f()
        return time.process_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    f()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


class Loop:
    "(a) One module after the other: embeddings, nn.TransformerEncoderLayer, LayerNorm, read-out."

    def __init__(self, nets, device):
        self.nets = []
        for net in nets:
            layer = nn.TransformerEncoderLayer(net.d, H, net.mlp_width, 0.0, "gelu", batch_first=True, norm_first=True)
            with torch.no_grad():
                attention = layer.self_attn
                attention.in_proj_weight.copy_(torch.cat([net.W_Q.T, net.W_K.T, net.W_V.T]))
                attention.in_proj_bias.zero_()
                attention.out_proj.weight.copy_(net.W_O.T)
                layer.linear1.weight.copy_(net.W_1.T)
                layer.linear2.weight.copy_(net.W_2.T)
                layer.linear1.bias.zero_()
                layer.linear2.bias.zero_()
            module = nn.ModuleDict({"layer": layer, "norm": nn.LayerNorm(net.d), "out": nn.Linear(net.d, 1)})
            for name in ("E", "P", "c"):
                module.register_parameter(name, nn.Parameter(net.get_parameter(name).detach().clone()))
            with torch.no_grad():
                module["out"].weight.copy_(net.w[None])
                module["out"].bias.zero_()
            module.to(device)
            self.nets.append((module, torch.optim.Adam(module.parameters(), lr=1e-3, fused=True)))

    def step(self, bits, labels):
        losses = []
        for (m, update), b, y in zip(self.nets, bits, labels):
            X = torch.cat([m.E[b.long()] + m.P[:-1], (m.c + m.P[-1]).expand(len(b), 1, -1)], 1)
            logits = m["out"](m["norm"](m["layer"](X)[:, -1])).squeeze(-1)
            loss = F.binary_cross_entropy_with_logits(logits, y)
            update.zero_grad()
            loss.backward()
            update.step()
            losses.append(loss.item())
        return losses


class Vmap:
    "(b) torch.func.vmap over the dense model."

    def __init__(self, nets, device):
        a = nets[0].architecture
        self.p = {n: torch.stack([net.get_parameter(n).detach() for net in nets]).to(device).requires_grad_() for n, _ in nets[0].named_parameters()}
        self.update = torch.optim.Adam(self.p.values(), lr=1e-3, fused=True)
        self.loss = torch.func.vmap(lambda p, b, y: F.binary_cross_entropy_with_logits(dense_logits(p, b, a), y))

    def step(self, bits, labels):
        with warnings.catch_warnings():  # the fused attention has no rule for vmap; its fallback is still faster than MATH
            warnings.simplefilter("ignore")
            losses = self.loss(self.p, bits, labels)
        self.update.zero_grad()
        losses.sum().backward()
        for p in self.p.values():
            p.grad = p.grad.contiguous()
        self.update.step()
        return losses.tolist()


class Table:
    "The ensemble."

    def __init__(self, nets, device):
        self.ensemble = Ensemble.from_modules(nets).to(device)
        self.update = torch.optim.Adam(self.ensemble.parameters(), lr=1e-3, fused=True)

    def step(self, bits, labels):
        losses = F.binary_cross_entropy_with_logits(self.ensemble(bits), labels, reduction="none").mean(1)
        self.update.zero_grad()
        losses.sum().backward()
        self.update.step()
        return losses.tolist()


class Jax:
    "(c) jax.jit of jax.vmap of the same table form, with Adam."

    def __init__(self, nets, device):
        T, d = nets[0].T, nets[0].d
        p = {n: jnp.array(torch.stack([net.get_parameter(n).detach() for net in nets]).numpy()) for n, _ in nets[0].named_parameters()}
        zeros = {n: jnp.zeros_like(v) for n, v in p.items()}
        self.state = (p, zeros, {n: jnp.zeros_like(v) for n, v in p.items()}, 0)

        def norm(x):
            return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

        def loss(p, bits, y):
            tokens = (p["E"][:, None] + p["P"][None, :-1]).reshape(2 * T, d)
            cls = p["c"] + p["P"][-1]
            u = norm(jnp.concatenate([tokens, cls[None]])) * p["g_1"] + p["c_1"]
            q = u[-1] @ p["W_Q"] + p["b_Q"]
            scores = u @ (p["W_K"] * q).reshape(d, H, -1).sum(-1) / (d / H) ** 0.5
            values = (u @ p["W_V"] + p["b_V"]).reshape(2 * T + 1, H, -1)
            lo = jnp.maximum(scores[:-1].reshape(2, T, H).min(0).max(0), scores[-1])
            w = jnp.exp(scores - jax.lax.stop_gradient(jnp.maximum(lo, scores.max(0) - 70)))
            table = jnp.concatenate([(w[..., None] * values).reshape(-1, d), w], -1)
            x = bits.astype(jnp.float32)
            sums = jnp.concatenate([1 - x, x], -1) @ table[:-1] + table[-1]
            mix = (sums[:, :d].reshape(-1, H, d // H) * (1 / sums[:, d:])[..., None]).reshape(-1, d)
            h = cls + mix @ p["W_O"] + p["b_O"]
            u = norm(h) * p["g_2"] + p["c_2"]
            h = h + jax.nn.gelu(u @ p["W_1"] + p["b_1"], approximate=False) @ p["W_2"] + p["b_2"]
            z = (norm(h) * p["g_3"] + p["c_3"]) @ p["w"] + p["w_0"]
            return jnp.mean(jnp.maximum(z, 0) - z * y + jnp.log1p(jnp.exp(-jnp.abs(z))))

        def step(state, bits, y):
            p, m, v, t = state
            losses, g = jax.vmap(jax.value_and_grad(loss))(p, bits, y)
            t, new = t + 1, ({}, {}, {})
            for n in p:
                new[1][n] = 0.9 * m[n] + 0.1 * g[n]
                new[2][n] = 0.999 * v[n] + 0.001 * g[n] ** 2
                size = jnp.sqrt(new[2][n] / (1 - 0.999**t)) + 1e-8
                new[0][n] = p[n] - 1e-3 * new[1][n] / (1 - 0.9**t) / size
            return (*new, t), losses

        self.jitted = jax.jit(step, donate_argnums=0)
        self.data = None

    def step(self, bits, labels):
        if self.data is None:
            self.data = jnp.array(bits.numpy()), jnp.array(labels.numpy())
        self.state, losses = self.jitted(self.state, *self.data)
        return losses.tolist()


def measure(T, B, R, rounds, device, budget):
    "One shape: all contestants in turn, in each round, on the same networks and data."
    g = torch.Generator().manual_seed(T + B)
    bits = torch.randint(0, 2, (R, B, T), generator=g, dtype=torch.uint8).to(device)
    labels = torch.randint(0, 2, (R, B), generator=g).float().to(device)
    nets = [Transformer(T, heads=H, seed=r) for r in range(R)]
    cost = B * (T + 1) * (T + 400)  # of a dense network, in some unit
    few = 2 if cost < 5e7 else 1
    many = max(1, min(8, int(6e7 / cost)))
    contestants = {"table": (Table, R), "loop": (Loop, few)}
    if cost < 3e7:
        contestants["vmap"] = (Vmap, many)
    if jax is not None and device.type == "cpu":
        contestants["jax"] = (Jax, R)
    made = {name: (kind(nets[:n], device), n) for name, (kind, n) in contestants.items()}
    first = {}
    for name, (one, n) in made.items():  # warm-up, and the equality check: losses of the first three steps
        first[name] = torch.tensor([one.step(bits[:n], labels[:n]) for _ in range(3 if name != "loop" or few == 2 else 2)])
    differ = {name: (x - first["table"][: len(x), : x.shape[1]]).abs().max().item() for name, x in first.items() if name != "table"}
    if apart := {name: x for name, x in differ.items() if not x < CLOSE}:
        raise SystemExit(f"T = {T}, B = {B}: these do not train the same networks, their losses differ by {apart}")
    A, C = torch.randn(2, 1024, 1024, generator=g).to(device)
    times, start = {name: [] for name in (*made, "peak")}, time.perf_counter()
    for done in range(rounds):
        for name, (one, n) in made.items():
            times[name].append(seconds(lambda: one.step(bits[:n], labels[:n]), device) / n)  # noqa: B023
        times["peak"].append(seconds(lambda: A @ C, device) / (2 * 1024**3))
        if time.perf_counter() - start > budget and done >= 2:
            break
    row = {"T": T, "B": B, "R": R, "rounds": len(times["table"])}
    row |= {f"{name} ms": 1e3 * statistics.median(t) for name, t in times.items() if name != "peak"}
    row |= {f"{name} networks": n for name, (_, n) in made.items()}
    for name in differ:
        row[f"{name} / table"] = statistics.median(a / b for a, b in zip(times[name], times["table"]))
        row[f"{name}: largest difference of losses"] = differ[name]
    row["peak GF/s"] = 1e-9 / statistics.median(times["peak"])
    row["share of peak"] = statistics.median(flops(T, B) * p / t for p, t in zip(times["peak"], times["table"]))
    if (T, B) in BARS:
        row["bar: loop / table"] = BARS[T, B]
    return row


def curve(name, values, device, rounds=5):
    "Milliseconds a model-step of the table form, as one size varies; and the exponent of the fitted power."
    rows = []
    for value in values:
        T, B, R, m = (value if name == n else default for n, default in (("T", 100), ("B", 64), ("R", 16), ("m", 256)))
        one = Table([Transformer(T, heads=H, seed=r) for r in range(R)], device)
        g = torch.Generator().manual_seed(0)
        bits = torch.randint(0, 2, (R, m, T), generator=g, dtype=torch.uint8).to(device)
        labels = torch.randint(0, 2, (R, m), generator=g).float().to(device)
        at, rows_ = torch.randint(0, m, (R, B), generator=g).to(device), torch.arange(R, device=device)[:, None]
        step = lambda: one.step(bits[rows_, at], labels[rows_, at])  # noqa: B023, E731
        step()
        rows.append({name: value, "table ms": 1e3 * statistics.median(seconds(step, device) for _ in range(rounds)) / R})
    x, y = torch.tensor([[math.log(r[name]), math.log(r["table ms"])] for r in rows], dtype=torch.float64).T
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    return {"rows": rows, "exponent": slope.item()}


def apart(code):
    "Run code in a process of its own: seconds by the clock, imports included, and its largest memory in GiB."
    code += "; print([int(line.split()[1]) / 2**20 for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    if done.returncode:
        raise SystemExit(done.stderr)
    return {"seconds": time.perf_counter() - start, "GiB": float(done.stdout.split()[-1])}


LARGE = (
    "import torch; torch.set_num_threads(1); from sparse_variable_creation.laboratory.tasks import *; from sparse_variable_creation.laboratory.models import *; "
    "from sparse_variable_creation.laboratory.ensemble import *; from sparse_variable_creation.laboratory.training import *; "
    "e = Ensemble.from_modules([Transformer(10_000, seed=r) for r in range(16)]); "
    "s = stack_samples([conjunction_sample(10_000, 3, 64, r) for r in range(16)]); train(e, s, list(range(16)), steps=3)"
)
QUICK = (
    "import torch; torch.set_num_threads(1); from sparse_variable_creation.experiments.and_sample_complexity import train_block; "
    "[train_block(T, 3, [(m, r) for m in (8, 16, 32, 64, 128) for r in range(5)], steps=200, tests=500) for T in (20, 40)]"
)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each shape, at most (7)")
    parser.add_argument("--budget", type=float, default=60, help="seconds for the rounds of one shape (60); at least 3 rounds")
    parser.add_argument("--R", type=int, default=32, help="networks in an ensemble (32)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--skip-curves", action="store_true", help="only the shapes of the bars")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmark.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = find_device(args.device)
    revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    result = {
        "computed on": provenance(device),
        "clock": "processor time of this process" if device.type == "cpu" else "clock, synchronised",
        "provenance": {
            "python": platform.python_version(), "torch": torch.__version__, "jax": getattr(jax, "__version__", None),
            "threads": torch.get_num_threads(), "cores": os.cpu_count(), "revision": revision or None, "load at start": load,
            "command": "python benchmarks/ensemble.py", "d": 64, "heads": H, "mlp_width": 256, "norm": "pre", "dtype": "float32",
        },
        "shapes": [],
    }
    if jax is None:
        print("jax is not installed: the comparison with it is left out")
    for T, B in BARS:
        row = measure(T, B, args.R, args.rounds, device, args.budget)
        result["shapes"].append(row)
        print(json.dumps({k: round(v, 7) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    if not args.skip_curves:
        sizes = {"T": (50, 100, 200, 400, 800), "B": (16, 32, 64, 128, 256), "m": (64, 256, 1024, 4096), "R": (1, 2, 4, 8, 16, 32, 64)}
        result["curves"] = {name: curve(name, values, device) for name, values in sizes.items()}
        result["T = 10,000, R = 16, 3 steps"], result["10,000 model-steps of AND"] = apart(LARGE), apart(QUICK)
        print({name: round(c["exponent"], 3) for name, c in result["curves"].items()}, result["T = 10,000, R = 16, 3 steps"], result["10,000 model-steps of AND"])
    result["provenance"]["seconds"] = time.process_time()
    result["provenance"]["GiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {args.out.name}")


if __name__ == "__main__":
    main()
