"""Each inequality of the book, as a property of whatever hypothesis can think of, in float64.

A case that violates one is printed by hypothesis and saved as ``counterexamples/NAME.json``.
"""
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_variable_creation.capacity.bounds import head_capacity, optimal_split
from sparse_variable_creation.capacity.coverings import (greedy_cover, greedy_packing, matrix_covering_terms, matrix_log_covering, pursuit,
                                                         pursuit_log_covering, round_matrix, sign_log_packing, sup_distance, zhang_log_covering)
from sparse_variable_creation.capacity.generalization import entropy_integral
from sparse_variable_creation.capacity.lipschitz import (block_error, confirm_bound, head_lipschitz, layer_lipschitz, layer_lipschitz_exact,
                                                         softmax_bound)
from sparse_variable_creation.capacity.lower_bounds import (expected_survivors, information_bound, norm_floor, shattering_contexts,
                                                            shattering_head, shattering_promises, sufficient_examples)
from sparse_variable_creation.foundations.attention import softmax_head
from sparse_variable_creation.foundations.layers import project_rows, self_attention, transformer_block
from sparse_variable_creation.foundations.norms import norm_pq, project_spectral, spectral_norm

COUNTEREXAMPLES = Path(__file__).resolve().parent.parent / "counterexamples"
property_test = settings(max_examples=60, derandomize=True, deadline=None, database=None)
seeds, lengths, sizes = st.integers(0, 2**31), st.integers(1, 12), st.floats(1e-3, 30)


def holds(name, observed, bound, **witness):
    "Fail, and save the tensors, if `observed` exceeds `bound` by more than rounding."
    ratio = torch.as_tensor(observed, dtype=torch.float64) / torch.as_tensor(bound, dtype=torch.float64).clamp_min(1e-300)
    confirm_bound(ratio.reshape(-1), {k: torch.as_tensor(v) for k, v in witness.items()}, COUNTEREXAMPLES / f"{name}.json")


def draw(seed, *shapes, scale=1.0):
    "Normal tensors, whose entries differ in size from one tensor to the next."
    g = torch.Generator().manual_seed(seed)
    return [scale * 10 ** (torch.rand((), generator=g).item() - 0.5) * torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes]


@property_test
@given(seeds, st.integers(2, 40), sizes)
def test_softmax(seed, T, scale):
    a, move = draw(seed, (T,), (T,), scale=scale)
    changed, distance = (torch.softmax(a + move, -1) - torch.softmax(a, -1)).abs().sum(), move.abs().max()
    for name, bound in (("cor-softmax-two", 2 * distance), ("prop-softmax-one", distance), ("thm-softmax-tanh", softmax_bound(distance))):
        holds(name, changed - 1e-15, bound, a=a, move=move)
    p = torch.softmax(a, -1)
    holds("lem-jacobian", (torch.diag(p) - torch.outer(p, p)).abs().sum(), 2.0, a=a)


@property_test
@given(seeds, st.integers(1, 20), sizes)
def test_head(seed, T, scale):
    s, s_hat, v, v_hat = draw(seed, (T,), (T,), (T, 3), (T, 3), scale=scale)
    y, y_hat = torch.softmax(s, -1) @ v, torch.softmax(s_hat, -1) @ v_hat
    terms = head_lipschitz((s - s_hat).abs().max(), (v - v_hat).norm(dim=-1).max(), v.norm(dim=-1).max(), C_Norm=1.0)
    holds("lem-head-lipschitz", (y - y_hat).norm(), sum(terms), s=s, s_hat=s_hat, v=v, v_hat=v_hat)


@property_test
@given(seeds, lengths, sizes)
def test_layer_and_block(seed, T, scale):
    Z, move, W_Q, W_K, W_V, W_C = draw(seed, (T, 4), (T, 4), (4, 4), (4, 4), (4, 4), (4, 4), scale=scale)
    Z_hat, Z = project_rows(Z + move), project_rows(Z)
    delta, C_V, C_QK, C_C = (Z - Z_hat).norm(dim=-1).max(), spectral_norm(W_V), spectral_norm(W_Q @ W_K.T), spectral_norm(W_C)
    moved = (self_attention(Z, W_Q, W_K, W_V) - self_attention(Z_hat, W_Q, W_K, W_V)).norm(dim=-1).max()
    exact = layer_lipschitz_exact(C_V.item(), C_QK.item())
    holds("thm-layer-exact", moved - 1e-14 * C_V, exact * delta, Z=Z, Z_hat=Z_hat, W_Q=W_Q, W_K=W_K, W_V=W_V)
    holds("prop-layer-lipschitz", exact, layer_lipschitz(C_V, C_QK, sharp=True))
    blocks = (transformer_block(z, W_Q, W_K, W_V, W_C) for z in (Z, Z_hat))
    bound = block_error(delta, C_V, C_QK, C_C, sharp=True)
    holds("prop-block-lipschitz", (next(blocks) - next(blocks)).norm(dim=-1).max() - 1e-14, bound, Z=Z, Z_hat=Z_hat, W_Q=W_Q, W_K=W_K, W_V=W_V, W_C=W_C)


@property_test
@given(seeds, st.integers(1, 8), st.integers(1, 6), sizes)
def test_norms(seed, n, k, scale):
    (M,) = draw(seed, (n, k), scale=scale)
    spectral, frobenius, columns = spectral_norm(M), norm_pq(M, 2, 2), norm_pq(M, 2, 1)
    holds("prop-norms", torch.stack([spectral, frobenius, frobenius, columns]),
          torch.stack([frobenius, math.sqrt(min(n, k)) * spectral, columns, math.sqrt(k) * frobenius]), M=M)


@property_test
@given(seeds, st.integers(1, 30), st.floats(0.05, 2))
def test_covers_of_linear_maps(seed, N, eps):
    w, X, W = draw(seed, (5, 3), (N, 3), (4, 3))
    w, X = project_rows(w), project_rows(X)
    W = W / norm_pq(W.T, 2, 1)
    b = X.norm(dim=1).max().item()
    z = pursuit(w, X, eps)
    holds("thm-pursuit", ((w - eps / b**2 * z.double() @ X) @ X.T).abs().max(), eps, w=w, X=X)
    holds("thm-pursuit-moves", z.abs().sum(1) - 0.5, (w.norm(dim=1) * b / eps).square() + 0.5, w=w, X=X)
    rounded = round_matrix(W, X, 1.0, 1.0, eps)
    holds("thm-matrix-covering", sup_distance(X @ W.T, X @ rounded["element"].T), eps, W=W, X=X)
    moves = matrix_covering_terms(1, 1, 4, N, eps, sharp=True)
    assert sum(moves.values()) == pytest.approx(matrix_log_covering(1, 1, 4, N, eps, sharp=True).item())


@property_test
@given(st.floats(1e-2, 50), st.integers(1, 10**9), st.integers(1, 10**4), st.floats(1e-3, 10))
def test_covering_numbers_are_ordered(B, N, r, eps):
    "The lower bound, the sharp bound and the quoted one, for one output and for many."
    holds("cor-zhang", pursuit_log_covering(B, 1, eps, N), zhang_log_covering(B, 1, eps, N))
    holds("cor-matrix-covering", matrix_log_covering(1, B, r, N, eps, sharp=True), matrix_log_covering(1, B, r, N, eps))
    holds("prop-signs", sign_log_packing(1, B, r, N, eps), matrix_log_covering(1, B, r, N, eps, sharp=True))


@property_test
@given(seeds, st.integers(1, 40), st.floats(0.05, 3))
def test_packing_and_cover(seed, F, eps):
    (points,) = draw(seed, (F, 2, 2))
    holds("prop-packing", float(len(greedy_packing(points, 2 * eps))), float(len(greedy_cover(points, eps))), points=points)


@property_test
@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=1, max_size=6), seeds)
def test_split(parts, seed):
    a, beta = (torch.tensor(v, dtype=torch.float64) for v in zip(*parts))
    shares, cost = optimal_split(a.tolist(), beta.tolist())
    assert sum(shares) == pytest.approx(1)
    other = torch.softmax(torch.randn(len(parts), generator=torch.Generator().manual_seed(seed), dtype=torch.float64), 0)
    holds("lem-split", cost, (a * (beta / other) ** 2).sum(), a=a, beta=beta, other=other)


@property_test
@given(st.floats(1e-3, 1e3), st.floats(10, 1e9), st.floats(0.1, 10))
def test_entropy_integral(C, m, A):
    "Never below the integral itself, from a fine quadrature at the cut-off that it reports, nor above the trivial bound."
    value, cutoff, *_ = entropy_integral(lambda e: C / e**2, m, A)
    assert value <= A * (1 + 1e-12)
    truth = 4 * cutoff + 12 * math.sqrt(C / m) * math.log(A / cutoff) if cutoff < A else math.inf
    holds("thm-dudley", min(A, truth), value)


@property_test
@given(st.integers(1, 6), st.integers(0, 300), st.floats(0.01, 0.99))
def test_brute_force(s, more, p):
    T = s + 1 + more
    m = sufficient_examples(T, s, p)
    assert expected_survivors(T, s, m) <= 1 - p
    holds("prop-information-family", information_bound(math.comb(T, s), p), float(max(m, 1e-9)))
    allowed = s * math.log2(1 / ((2 - p) ** (1 / s) - 1)) + math.log2(math.factorial(s) / p) + 1
    holds("thm-brute-force", m - information_bound(math.comb(T, s), p), allowed)
    crude = (1 + (T - s) * 2 ** (-m / s)) ** s - 1
    holds("thm-brute-force-sum", expected_survivors(T, s, m), crude)


@property_test
@given(st.integers(2, 300), st.floats(3.5, 1e4), seeds)
def test_shattering(T, c, seed):
    promised = shattering_promises(T, c)
    labels = torch.randint(2, (promised["contexts"],), generator=torch.Generator().manual_seed(seed))
    X, z = shattering_contexts(T)
    outputs = softmax_head(X, z, *shattering_head(T, labels.double(), c), sigma=lambda u: u)[:, 0]
    holds("thm-shattering", promised["margin"] - 1e-7, (outputs * (2 * labels - 1)).min(), labels=labels)
    holds("thm-norm-floor", norm_floor(promised["contexts"], promised["margin"]), promised["norm"])


@property_test
@given(seeds, st.integers(2, 9), st.floats(1e-6, 10))
def test_layer_norm(seed, d, scale):
    x, y = draw(seed, (d,), (d,), scale=scale)
    normed = [torch.nn.functional.layer_norm(v, (d,)) for v in (x, y)]
    holds("lem-layernorm", (normed[0] - normed[1]).norm() - 1e-12, (x - y).norm() * 1e-5**-0.5, x=x, y=y)
    holds("lem-layernorm-length", normed[0].norm(), math.sqrt(d), x=x)


@property_test
@given(seeds, st.integers(1, 6), st.sampled_from([1e-3, 0.1, 1.0]))
def test_stretches_of_a_head(seed, T, scale):
    "Heads whose matrices differ: no further apart than the errors of the parts, stretched as thm-head-capacity says."
    X, QK, V, dQK, dV = draw(seed, (T, 3), (3, 3), (3, 2), (3, 3), (3, 2))
    X, dQK, dV = project_rows(X), scale * dQK, scale * dV
    y, y_hat = (torch.relu(torch.softmax(X @ A.T @ X[0], -1) @ X @ B) for A, B in ((QK.T, V), ((QK + dQK).T, V + dV)))
    B_V = spectral_norm(V).item()
    y_hat = project_rows(y_hat[None], B_V)[0]
    capacity = head_capacity(B_V=B_V, B_V21=1.0, B_QK21=1.0, T=T, m=1, sharp=True)
    weight = dict(zip(capacity.names, capacity.weight))
    errors = {"values": (X @ dV).norm(dim=-1).max(), "scores": (X @ dQK.T).norm(dim=-1).max()}
    holds("thm-head-capacity", (y - y_hat).norm() - 1e-14, sum(float(weight[n]) * e for n, e in errors.items()), X=X, QK=QK, V=V, dQK=dQK, dV=dV)


def test_a_violation_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr("test_inequalities.COUNTEREXAMPLES", tmp_path / "found")
    with pytest.raises(AssertionError, match="violated"):
        holds("false", 2.0, 1.0, x=torch.ones(2))
    assert "1.0" in (tmp_path / "found" / "false.json").read_text()
