"""The laboratory's engine: data that never move, ensembles that equal their dense reference, and errors before any work."""
import itertools
import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import DEVICES, ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_variable_creation.compiler.heads import AndHead
from sparse_variable_creation.foundations.boolean import SparseBoolean
from sparse_variable_creation.laboratory.baselines import LSTM, MLP, Logistic
from sparse_variable_creation.laboratory.cluster import plan_block
from sparse_variable_creation.laboratory.constructed import load_constructed
from sparse_variable_creation.laboratory.ensemble import Ensemble, attention_of, find_device, memory_needed, mix_heads
from sparse_variable_creation.laboratory.models import Architecture, Transformer
from sparse_variable_creation.laboratory.tasks import Task, conjunction_sample, count_consistent, named_target, seed_for
from sparse_variable_creation.laboratory.training import Stack, Streams, Validation, accuracy, stack_samples, train

NAMES = ["and", "or", "majority", "parity", "threshold:2", "exactly:1", "formula:x0 & ~x1 | x2"]
few = settings(max_examples=40, deadline=None, derandomize=True)


@few
@given(st.sampled_from(NAMES), st.integers(3, 40), st.integers(1, 60), st.integers(0, 2**63 - 1), st.floats(0.05, 0.95),
       st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([0.0, 0.2]))
def test_the_same_seed_gives_the_same_data(name, T, m, seed, p, label_noise, input_noise):
    task = Task(name, 3, p, label_noise, input_noise)
    torch.manual_seed(seed % 1000)  # the global generator has no say
    a, b, first = task.sample(T, m, seed), task.sample(T, m, seed), next(task.stream(T, m, seed))
    for other in (b, first):
        assert a.target == other.target and torch.equal(a.bits, other.bits) and torch.equal(a.labels, other.labels)
    assert a.bits.dtype == torch.uint8 and a.bits.shape == (m, T) and a.labels.dtype == torch.bool
    assert a.target.table == named_target(name, range(3), 3).table and list(a.target.indices) == sorted(a.target.indices)
    clean = Task(name, 3, p).sample(T, m, seed)
    assert clean.target == a.target and torch.equal(clean.labels, clean.target(clean.bits))
    if not label_noise:
        assert torch.equal(a.labels, clean.labels)  # noise on bits moves no label
    if not input_noise:
        assert torch.equal(a.bits, clean.bits)


@few
@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 50), st.integers(0, 2**40))
def test_the_first_data_of_the_book_stay(T, s, m, seed):
    "What conjunction_sample drew before there were tasks."
    s = min(s, T)
    sample, g = conjunction_sample(T, s, m, seed), torch.Generator().manual_seed(seed)
    target = SparseBoolean.conjunction(sorted(torch.randperm(T, generator=g)[:s].tolist()), T)
    bits = (torch.rand(m, T, generator=g) < 2 ** (-1 / s)).to(torch.uint8)
    assert sample.target == target and torch.equal(sample.bits, bits) and torch.equal(sample.labels, target(bits))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "exactly:1"])
def test_labels_are_balanced(name):
    labels = Task(name, 3).sample(10, 100_000, seed_for("balance", name)).labels
    assert abs(labels.float().mean() - 0.5) < 3.9 * 0.5 / math.sqrt(len(labels))


@few
@given(st.sampled_from(NAMES), st.integers(4, 9), st.integers(1, 90), st.integers(0, 10**6))
def test_consistent_functions_are_counted_rightly(name, T, m, seed):
    sample = Task(name, 3, "uniform").sample(T, m, seed)
    every = [named_target(name, I, T)(sample.bits).equal(sample.labels) for I in itertools.combinations(range(T), 3)]
    assert count_consistent(name, 3, sample.bits, sample.labels, most=10**6) == sum(every) >= 1


def _pair(T, heads, norm, R, sharpness, seed, dtype, **rest):
    "Networks with random weights, and their ensemble."
    nets = []
    for r in range(R):
        net = Transformer(T, d=4 * heads, heads=heads, mlp_width=6, norm=norm, seed=r, **rest).to(dtype)
        g = torch.Generator().manual_seed(seed + r)
        for p in net.parameters():
            p.data += 0.3 * torch.randn(p.shape, generator=g, dtype=torch.float64).to(dtype)
        net.W_Q.data *= sharpness
        nets.append(net)
    return nets, Ensemble.from_modules(nets)


def _differences(nets, ensemble, bits):
    "Relative differences of logits and gradients."
    logits, dense = ensemble(bits), torch.stack([net(b) for net, b in zip(nets, bits)])
    logits.sigmoid().square().sum().backward()
    dense.sigmoid().square().sum().backward()
    theirs = {n: torch.stack([net.get_parameter(n).grad for net in nets]) for n, _ in ensemble.named_parameters()}
    scale = max(g.abs().max() for g in theirs.values()) + 1e-30
    worst = max(((p.grad - theirs[n]).abs().max() / scale).item() for n, p in ensemble.named_parameters())
    return ((logits - dense).abs().max() / (dense.abs().max() + 1e-30)).item(), worst


@pytest.mark.parametrize("device", DEVICES)
@few
@given(T=st.integers(1, 20), B=st.integers(1, 9), heads=st.sampled_from([1, 2, 4]), norm=st.sampled_from(["pre", "post", "none"]),
       R=st.integers(1, 3), sharpness=st.sampled_from([0, 1, 10, 1000, 20_000]), layers=st.integers(1, 2), seed=st.integers(0, 10**6),
       activation=st.sampled_from(["gelu", "relu"]), positions=st.sampled_from(["learned", "random-sign", "trig-polynomial"]),
       dropout=st.sampled_from([0.0, 0.0, 0.2]))
def test_ensemble_equals_dense_reference(device, T, B, heads, norm, R, sharpness, layers, seed, activation, positions, dropout):
    nets, ensemble = _pair(T, heads, norm, R, sharpness, seed, torch.float64, layers=layers, activation=activation, positions=positions, dropout=dropout)
    nets, ensemble = [net.to(device) for net in nets], ensemble.to(device)
    assert ensemble.form == ("table" if layers == 1 else "dense")
    bits = torch.randint(0, 2, (R, B, T), generator=torch.Generator().manual_seed(seed)).to(device)
    logits, gradients = _differences(nets, ensemble, bits)
    assert logits < 1e-9 and gradients < 1e-8
    seen = torch.stack([net(b, return_attention=True) for net, b in zip(nets, bits)])
    torch.testing.assert_close(attention_of(ensemble, bits), seen, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_ensemble_in_float32(norm):
    nets, ensemble = _pair(15, 4, norm, 3, 3, 7, torch.float32)
    bits = torch.randint(0, 2, (3, 11, 15), generator=torch.Generator().manual_seed(0))
    assert max(_differences(nets, ensemble, bits)) < 2e-5


@pytest.mark.parametrize("gap", [1, 50, 80, 120, 141, 160, 1000])
@pytest.mark.parametrize("only", [0, 1])
def test_scores_of_any_range_in_float32(gap, only):
    "The largest score belongs to a bit that some examples lack; logits and gradients stay finite and right."
    T, scores = 6, torch.zeros(1, 13, 1)
    scores[0, only * T] = gap
    values = torch.randn(1, 13, 3, generator=torch.Generator().manual_seed(gap))
    bits = torch.tensor(list(itertools.product([0, 1], repeat=T)))[None]
    results = []
    for dtype in (torch.float32, torch.float64):
        s, v = (t.to(dtype).clone().requires_grad_() for t in (scores, values))
        x = bits.to(dtype)
        mix = mix_heads(s, v, torch.cat([1 - x, x], -1))
        mix.square().sum().backward()
        results.append([t.double() for t in (mix, s.grad, v.grad)])
    for mine, exact in zip(*results):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("stack", [Logistic(7, [0, 1, 2]), MLP(7, [0, 1, 2], 8), LSTM(7, [0, 1, 2], 4),
                                   Ensemble.from_modules([Transformer(7, d=8, mlp_width=8, seed=r, dropout=0.1) for r in range(3)])],
                         ids=lambda s: type(s).__name__)
def test_every_kind_trains_stops_and_returns(stack):
    "One interface: a subset trains as it would within the whole, and comes back to its place."
    sample = stack_samples([conjunction_sample(7, 2, 12 + r, r) for r in range(3)])
    twin = stack.subset([0, 1, 2])
    stop = lambda step, networks, active, loss: active == 1  # noqa: E731
    losses, reference = train(stack, sample, [0, 1, 2], 20, 4, callback=stop, every=10), train(twin, sample, [0, 1, 2], 20, 4)
    assert losses[10:, 1].isnan().all() and not losses[:, [0, 2]].isnan().any()
    torch.testing.assert_close(losses[:, [0, 2]], reference[:, [0, 2]], rtol=1e-4, atol=1e-5)
    for (name, mine), (_, theirs) in zip(stack.named_parameters(), twin.named_parameters()):
        torch.testing.assert_close(mine[[0, 2]], theirs[[0, 2]], rtol=1e-2, atol=1e-4, msg=name)
    assert stack.training and accuracy(stack, sample).shape == (3,)


def test_an_interrupted_run_keeps_what_was_learned():
    sample = stack_samples([conjunction_sample(7, 2, 12, r) for r in range(3)])
    ensemble = Ensemble.from_modules([Transformer(7, d=8, mlp_width=8, seed=r) for r in range(3)])
    before = ensemble.W_1.clone()

    def callback(step, networks, active, loss):
        if step == 10:
            raise KeyboardInterrupt
        return active == 1

    with pytest.raises(KeyboardInterrupt):
        train(ensemble, sample, [0, 1, 2], 50, 4, callback=callback, every=5)
    assert all(not torch.equal(ensemble.W_1[r], before[r]) for r in range(3))


def test_constructed_networks_of_the_compiler_load():
    compiled = pytest.importorskip("sparse_variable_creation.compiler.compile")
    contexts = (torch.arange(2**8)[:, None] >> torch.arange(8)) & 1
    for f, construction in ((SparseBoolean.conjunction([1, 4], 8), "threshold"), (SparseBoolean.parity([0, 3, 6], 8), "symmetric"),
                            (SparseBoolean.from_formula("x1 & ~x5", 8), "weighted")):
        head = compiled.compile_boolean(f, construction=construction)
        net = load_constructed(head)
        torch.testing.assert_close(net(contexts), head(contexts).to(net.w.dtype) - 0.5, rtol=1e-9, atol=1e-9)
        assert torch.equal(net(contexts) > 0, f(contexts))
    with pytest.raises(ValueError, match="hidden layer"):
        load_constructed(compiled.compile_boolean(SparseBoolean.parity([0, 3], 8), construction="gated"))


def test_constructed_networks_train_on():
    ensemble = Ensemble.from_modules([load_constructed(AndHead(I, 9)) for I in ([0, 4], [2, 8])])
    sample = stack_samples([Task("and", 2).sample(9, 200, r, SparseBoolean.conjunction(I, 9)) for r, I in enumerate(([0, 4], [2, 8]))])
    assert (accuracy(ensemble, sample) == 1).all()
    losses = train(ensemble, sample, [0, 1], 50, 32)
    assert (losses[-1] < losses[0]).all() and (accuracy(ensemble, sample) == 1).all()


PEAK = """
import torch; torch.set_num_threads(1)
from sparse_variable_creation.laboratory.ensemble import *; from sparse_variable_creation.laboratory.models import *
from sparse_variable_creation.laboratory.tasks import *; from sparse_variable_creation.laboratory.training import *
peak = lambda: [int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")][0]
def run(T, R, B, steps, **rest):
    e = Ensemble.from_modules([Transformer(T, seed=r, **rest) for r in range(R)])
    train(e, stack_samples([conjunction_sample(T, 3, 64, r) for r in range(R)]), list(range(R)), steps, B)
run(5, 1, 2, 2); start = peak(); run(*{shape}, 3, **{rest}); print(peak() - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("T,R,B,rest", [(3000, 8, 32, {}), (100, 32, 256, {}), (100, 2, 32, {"layers": 2}), (100, 2, 32, {"dropout": 0.1})])
def test_memory_is_planned_from_above(T, R, B, rest):
    code = PEAK.replace("{shape}", str((T, R, B))).replace("{rest}", str(rest))
    used = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    planned = R * memory_needed(Architecture(T, **rest), B, 64)
    assert used < planned < 4 * used, (used / 2**20, planned / 2**20)
    assert plan_block(Architecture(T, **rest), B, examples=64, budget=planned / 2) <= max(1, R // 2)


STACK = stack_samples([conjunction_sample(6, 2, 5, r) for r in range(2)])
TWO = Ensemble.from_modules([Transformer(6, d=8, mlp_width=8, seed=r) for r in range(2)])


@pytest.mark.parametrize("call,named", [
    (lambda: Task("nand"), "target is 'nand'"),
    (lambda: Task("threshold:"), "target is 'threshold:'"),
    (lambda: Task("formula:x0 & x7", 2), "x7"),
    (lambda: Task("formula:x0", 2), "all s = 2"),
    (lambda: Task("exactly:1"), "no bias"),
    (lambda: Task(s=0), "s is 0"),
    (lambda: Task(s=21), "at most 20"),
    (lambda: Task(p="fair"), "p is 'fair'"),
    (lambda: Task(input_noise=-0.1), "input_noise is -0.1"),
    (lambda: Task(redraw=True, label_noise=0.1), "redraw"),
    (lambda: Task().sample(20, 0, 0), "m is 0"),
    (lambda: Task().sample(2, 5, 0), "T is 2"),
    (lambda: Task().stream(2, 5, 0), "T is 2"),
    (lambda: Task().stream(20, 0, 0), "m is 0"),
    (lambda: Task("parity", 9, redraw=True).sample(60, 5, 0), "s is 9"),
    (lambda: find_device("cuda:7" if torch.cuda.device_count() < 8 else "cuda:99"), "it is not there"),
    (lambda: find_device("gpu"), "device is 'gpu'"),
    (lambda: plan_block(Architecture(50), 32, "cuda:99"), "it is not there"),
    (lambda: plan_block(Architecture(50), 32, budget=1000), "budget"),
    (lambda: Transformer(5, activation="tanh"), "activation is 'tanh'"),
    (lambda: Transformer(5, layers=2, heads=7), "heads is 7"),
    (lambda: Ensemble.from_modules([Transformer(5), Transformer(5, layers=2)]), r"modules\[1\]"),
    (lambda: train(TWO, STACK, [0]), "seeds has 1"),
    (lambda: train(TWO, STACK, None), "seeds has 0"),
    (lambda: train(TWO, STACK, [0, 1], steps=0), "steps is 0"),
    (lambda: train(TWO, STACK, [0, 1], batch=0), "batch is 0"),
    (lambda: train(TWO, STACK, [0, 1], every=0), "every is 0"),
    (lambda: train(TWO, STACK, [0, 1], lr=[1e-3, -1.0]), "lr is -1"),
    (lambda: train(TWO, STACK, [0, 1], lr=[1e-3] * 3), "lr has 3"),
    (lambda: train(TWO, STACK, [0, 1], optimiser="lbfgs"), "optimiser is 'lbfgs'"),
    (lambda: train(TWO, STACK, [0, 1], weight_decay=-1), "weight_decay is -1"),
    (lambda: train(TWO, Streams([Task().stream(6, 4, 0)])), "sample has 1"),
    (lambda: train(TWO, Stack(STACK.bits.to("meta"), STACK.labels, STACK.sizes), [0, 1]), "sample is on meta"),
    (lambda: Validation(STACK, patience=0), "patience is 0"),
])
def test_bad_input_is_refused_before_any_work(call, named):
    before = [p.clone() for p in TWO.parameters()]
    with pytest.raises(ValueError, match=named):
        call()
    assert all(torch.equal(p, q) for p, q in zip(TWO.parameters(), before))


@pytest.mark.skipif("SVC_SLOW" not in os.environ, reason="compiles for a minute: set SVC_SLOW=1")
def test_a_compiled_step_is_the_same():
    results = []
    for compiled in (False, True):
        ensemble = Ensemble.from_modules([Transformer(6, d=8, mlp_width=8, seed=r).double() for r in range(2)])
        results.append(train(ensemble, Stack(STACK.bits, STACK.labels.double(), STACK.sizes), [0, 1], 5, 4, compiled=compiled))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)
