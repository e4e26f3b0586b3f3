"""Properties of the library that span chapters; each chapter tests its own definitions."""
import itertools
import subprocess
import sys

import pytest
import torch
from conftest import DEVICES
from sparse_variable_creation.compiler.heads import AndHead, and_promises
from sparse_variable_creation.experiments.and_sample_complexity import train_block
from sparse_variable_creation.foundations.attention import softmax_head
from sparse_variable_creation.foundations.boolean import SparseBoolean
from sparse_variable_creation.laboratory.ensemble import Ensemble, attention_of
from sparse_variable_creation.laboratory.models import Transformer
from sparse_variable_creation.laboratory.tasks import conjunction_sample, seed_for
from sparse_variable_creation.laboratory.training import accuracy, stack_samples, train


@pytest.mark.parametrize("module", ["sparse_variable_creation", "sparse_variable_creation.compiler.heads",
                                    "sparse_variable_creation.laboratory.training"])
def test_import_is_light(module):
    code = f"import time, torch; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    times = [float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) for _ in range(3)]
    assert min(times) < 0.3, times


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("s", [1, 2, 3, 5])
def test_and_head_on_every_context(s, device):
    T = 10
    contexts = torch.tensor(list(itertools.product([0, 1], repeat=T)), dtype=torch.uint8, device=device)
    indices = torch.randperm(T, generator=torch.Generator().manual_seed(s))[:s].tolist()
    f, head = SparseBoolean.conjunction(indices, T), AndHead(indices, T).to(device)
    truth = f(contexts)
    assert torch.equal(head.predict(contexts), truth)
    assert (head(contexts) - truth.float()).abs().max() <= and_promises(T, s, head.beta)["error"] + 1e-5


def test_and_head_is_a_module():
    head = AndHead([0, 2], 5)
    other = AndHead([1, 3], 5)
    other.load_state_dict(head.state_dict())
    bits = torch.tensor([[1, 0, 1, 0, 0], [1, 1, 0, 1, 1]])
    assert torch.equal(other(bits), head(bits))
    assert head.double()(bits).dtype == torch.float64
    assert head(bits.reshape(1, 2, 1, 5)).shape == (1, 2, 1)
    head(bits).sum().backward()
    assert all(p.grad is not None for p in head.parameters())


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_softmax_head_in_any_dtype(dtype, tolerance):
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((4, 7, 5), (4, 5), (5, 3), (5, 3), (5, 2))]
    exact = softmax_head(*inputs)
    result = softmax_head(*(x.to(dtype) for x in inputs))
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("T", [1, 2, 100])
def test_ensemble_equals_dense_network(T, device):
    nets = [Transformer(T, d=32, seed=r).to(device) for r in range(4)]
    ensemble = Ensemble.from_modules(nets).to(device)
    bits = torch.randint(0, 2, (4, 9, T), generator=torch.Generator().manual_seed(T)).to(device)
    dense = torch.stack([net(b) for net, b in zip(nets, bits)])
    torch.testing.assert_close(ensemble(bits), dense, rtol=1e-4, atol=1e-5)
    seen = torch.stack([net(b, return_attention=True) for net, b in zip(nets, bits)])
    torch.testing.assert_close(attention_of(ensemble, bits), seen, rtol=1e-4, atol=1e-6)


def _losses(members, steps=40):
    "Losses of networks of an ensemble, by their numbers."
    samples = [conjunction_sample(12, 2, 20 + r, seed_for("t", r)) for r in members]
    ensemble = Ensemble.from_modules([Transformer(12, d=16, mlp_width=16, seed=r) for r in members])
    losses = train(ensemble, stack_samples(samples), [seed_for("b", r) for r in members], steps=steps, batch=16)
    return losses, accuracy(ensemble, stack_samples(samples))


def test_training_is_repeatable():
    first, second = _losses(range(4)), _losses(range(4))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_a_network_does_not_depend_on_its_neighbours():
    together, apart = _losses(range(5))[0], _losses([3])[0]
    torch.testing.assert_close(together[:, 3], apart[:, 0], rtol=1e-4, atol=1e-5)


def test_no_row_moves_when_rows_are_added():
    few, many = train_block(8, 2, [(12, 1)], 5), train_block(8, 2, [(12, 0), (12, 1), (40, 1)], 5)
    assert few.targets[0] == many.targets[1]
    assert torch.equal(few.tests.bits[0], many.tests.bits[1])
    torch.testing.assert_close(few.losses[:, 0], many.losses[:, 1], rtol=1e-4, atol=1e-5)


def test_saturated_scores_stay_finite():
    "Scores far beyond the range of float32 take the exact fallback, gradients included."
    net = Transformer(6, d=16, heads=2, mlp_width=8)
    for p in (net.W_Q, net.W_K, net.E, net.P):
        p.data *= 300
    ensemble = Ensemble.from_modules([net])
    bits = torch.tensor(list(itertools.product([0, 1], repeat=6)))[None]
    torch.testing.assert_close(ensemble(bits)[0], net(bits[0]), rtol=1e-3, atol=1e-4)
    ensemble(bits).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in ensemble.parameters())


@pytest.mark.parametrize("call,named", [
    (lambda: SparseBoolean.conjunction([0, 0], 4), "indices"),
    (lambda: SparseBoolean.from_table([0, 1, 1], [0, 1], 4), "table"),
    (lambda: AndHead([4], 4), "indices"),
    (lambda: AndHead([0], 4, beta=0), "beta"),
    (lambda: AndHead([0], 4)(torch.ones(3)), "bits"),
    (lambda: Transformer(4, heads=3), "heads"),
    (lambda: Transformer(0), "sizes"),
    (lambda: Transformer(4)(torch.full((2, 4), -1)), "bits"),
    (lambda: AndHead([0, 1], 4).attention(torch.ones(1)), "bits"),
    (lambda: Ensemble.from_modules([Transformer(3)])(torch.ones(3)), "bits"),
    (lambda: conjunction_sample(3, 4, 5, 0), "s is 4"),
])
def test_bad_input_names_the_argument(call, named):
    with pytest.raises(ValueError, match=named):
        call()
