"""The adversaries of the chapter on Lipschitz lemmas, with more norms, lengths and starts than the page has time for."""
import math

import pytest
import torch
from conftest import DEVICES
from sparse_variable_creation.capacity.lipschitz import (adversarial_search, block_error, confirm_bound, head_lipschitz, layer_lipschitz,
                                                         layer_lipschitz_exact, softmax_bound, softmax_ratio)
from sparse_variable_creation.foundations.layers import project_rows, self_attention, transformer_block
from sparse_variable_creation.foundations.norms import project_spectral


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("T", [2, 3, 32])
def test_softmax(T, device, tmp_path):
    def objective(a, b):
        distance = (a - b).abs().amax(-1).clamp_min(1e-6)
        return softmax_ratio(a, b) * distance / softmax_bound(distance)

    found = adversarial_search(objective, {"a": (T,), "b": (T,)}, lambda a, b: {"a": a.clamp(-9, 9), "b": b.clamp(-9, 9)},
                               restarts=64, steps=150, seed=T, device=device)
    confirm_bound(*found, tmp_path / "counterexample.json")


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_softmax_in_any_dtype(dtype, tolerance):
    g = torch.Generator().manual_seed(0)
    a, b = (2 * torch.randn(2, 5, 4, 9, generator=g, dtype=torch.float64)).to(dtype)
    ratio = softmax_ratio(a, b)
    assert ratio.dtype == dtype and ratio.shape == (5, 4) and softmax_bound(ratio).dtype == dtype
    torch.testing.assert_close(ratio.double(), softmax_ratio(a.double(), b.double()), rtol=tolerance, atol=tolerance)


def test_heads_in_bulk():
    "100 000 random heads, of any size of move: scores and values directly, so that every score and value function is covered."
    g = torch.Generator().manual_seed(1)
    for T in (2, 5, 20):
        scale = torch.logspace(-3, 2, 30_000, dtype=torch.float64)[:, None]
        s = torch.randn(30_000, T, generator=g, dtype=torch.float64)
        s_hat = s + scale * torch.randn(30_000, T, generator=g, dtype=torch.float64)
        v, v_hat = torch.randn(2, 30_000, T, 3, generator=g, dtype=torch.float64)
        y, y_hat = (torch.einsum("nt,ntk->nk", torch.softmax(a, -1), b) for a, b in ((s, v), (s_hat, v_hat)))
        terms = head_lipschitz((s - s_hat).abs().amax(-1), (v - v_hat).norm(dim=-1).amax(-1), v.norm(dim=-1).amax(-1), C_Norm=1.0)
        assert ((y - y_hat).norm(dim=-1) <= sum(terms) * (1 + 1e-12)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("T,C,B_X,size", [(1, 1.0, 1.0, 0.01), (2, 0.3, 1.0, 1.0), (6, 4.0, 0.5, 0.01), (6, 10.0, 1.0, 0.1), (40, 1.0, 2.0, 0.01)])
def test_layer(T, C, B_X, size, device, tmp_path):
    exact = layer_lipschitz_exact(2.0, C, B_X)
    assert exact <= layer_lipschitz(2.0, C, True, B_X) <= layer_lipschitz(2.0, C, False, B_X)

    def objective(Z, move, W_Q, W_K, W_V):
        A, B = project_rows(Z + size / 2 * move, B_X), project_rows(Z - size / 2 * move, B_X)
        moved = self_attention(A, W_Q, W_K, W_V) - self_attention(B, W_Q, W_K, W_V)
        return moved.norm(dim=-1).amax(-1) / (A - B).norm(dim=-1).amax(-1).clamp_min(1e-6) / exact

    def project(Z, move, W_Q, W_K, W_V):
        return {"Z": project_rows(Z, B_X), "move": project_rows(move),
                "W_Q": project_spectral(W_Q, C), "W_K": project_spectral(W_K, 1.0), "W_V": project_spectral(W_V, 2.0)}

    shapes = {"Z": (T, 4), "move": (T, 4), "W_Q": (4, 4), "W_K": (4, 4), "W_V": (4, 3)}
    found = adversarial_search(objective, shapes, project, restarts=16, steps=120, seed=3, device=device, lr=0.05)
    confirm_bound(*found, tmp_path / "counterexample.json")


@pytest.mark.parametrize("sigma,L_sigma", [(torch.relu, 1.0), (torch.tanh, 1.0), (lambda u: 2 * u, 2.0)])
def test_block_with_other_weights(sigma, L_sigma):
    "The recursion with an error in every matrix, at norms between 0.1 and 3."
    g = torch.Generator().manual_seed(4)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    for n in range(100):
        T, size = 2 + n % 11, 10 ** -(n % 4)
        Z = project_rows(rand(T, 3))
        Z_hat = project_rows(Z + size * rand(T, 3))
        W_Q, W_K, W_V, W_C = (project_spectral(3 * rand(3, 3), 0.1 + 2.9 * torch.rand((), generator=g).item()) for _ in range(4))
        Q, K, V, M = (W + size * rand(3, 3) for W in (W_Q, W_K, W_V, W_C))
        inner = sigma(project_rows(self_attention(Z_hat, Q, K, V)))
        errors = (Z_hat @ (W_V - V)).norm(dim=-1).max(), (Z_hat @ (W_Q @ W_K.T - Q @ K.T) @ Z_hat.T).abs().max(), (inner @ (W_C - M)).norm(dim=-1).max()
        norms = (torch.linalg.matrix_norm(W, 2) for W in (W_V, W_Q @ W_K.T, W_C))
        bound = block_error((Z - Z_hat).norm(dim=-1).max(), *norms, L_sigma, *errors, sharp=True)
        moved = transformer_block(Z, W_Q, W_K, W_V, W_C, sigma=sigma) - transformer_block(Z_hat, Q, K, V, M, sigma=sigma)
        assert moved.norm(dim=-1).max() <= bound * (1 + 1e-12)


def test_bounds_broadcast():
    C = torch.tensor([[0.5], [1.0]])
    assert layer_lipschitz(torch.ones(3), C).shape == layer_lipschitz_exact(torch.ones(3), C).shape == (2, 3)
    assert block_error(0.1, torch.ones(3), C, 1.0, eps_V=torch.zeros(3)).shape == (2, 3)
    assert math.isclose(layer_lipschitz_exact(1.0, 1e3) / layer_lipschitz(1.0, 1e3, sharp=True), 1.0, rel_tol=1e-3)
