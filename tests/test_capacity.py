"""The capacity bounds: their speed, their slopes, and adversaries that must refute a stretch with a factor left out."""
import json
import time

import numpy as np
import pytest
import torch
from conftest import ROOT
from nbdev_book import directives
from sparse_variable_creation.capacity.bounds import head_capacity
from sparse_variable_creation.capacity.depth import depth_capacity

HEAD = dict(B_V=0.7, B_V21=1.9, B_X=1.3, L_sigma=1.2, B_w=1.7, B_P=0.6, P_21=2.3, B_QK=0.8)
DEEP = dict(C_V=0.7, C_V21=1.9, C_QK=0.8, C_QK21=1.4, C_C=1.1, C_C21=2.1, B_w=1.7, B_X=1.3, L_sigma=1.2, B_P=0.6, P_21=2.3)
INNER = dict(C_in=0.9, C_in21=1.6)


@pytest.mark.parametrize("more", [{}, {"sharp": True}, {"B_w": 2.0}, {"B_w": 2.0, "sharp": True}])
def test_a_hundred_thousand_heads_in_50_ms(more):
    pairs = dict(T=np.tile(np.logspace(1, 6, 1000), 100), B_QK21=np.repeat(np.logspace(-1, 2, 100), 1000))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        nats = head_capacity(B_V=1.0, B_V21=1.0, m=100, **pairs, **more).log_covering(0.1)
        times.append(time.perf_counter() - start)
    assert nats.shape == (100_000,) and min(times) < 0.05, f"{1000 * min(times):.0f} ms"


def head_formula(v, c):
    "The coefficient of the theorem, by hand."
    R, out = v["B_X"] + v["B_P"], v["B_w"] * v["L_sigma"]
    scores = R * v["B_QK21"] * out * c * v["B_V"] * R**2 if "B_QK21" in v else R**2 * v["B_QKF"] * out * c * v["B_V"] * R
    parts = [R * v["B_V21"] * out, scores, out * v["B_V"] * R, v["P_21"] * out * v["B_V"] * (1 + 2 * c * R**2 * v["B_QK"])]
    return sum(part ** (2 / 3) for part in parts) ** 3


def depth_formula(v, c, layers, heads, residual):
    "The coefficient of the theorem, row by row of its table."
    inner = v.get("C_in", torch.ones((), dtype=torch.float64))
    wide = residual + v["L_sigma"] * v["C_C"] * inner
    R = [v["B_X"] + v["B_P"]] + [1] * (layers - 1)
    factor = [wide * (residual + heads * v["C_V"] * (1 + 2 * c * r**2 * v["C_QK"])) for r in R]
    parts = [v["B_w"]]
    for i, r in enumerate(R):
        alpha = v["B_w"]
        for f in factor[i + 1:]:
            alpha = alpha * f
        parts.append(alpha * v["L_sigma"] * inner * v["C_C21"])
        if "C_in" in v:
            parts.append(alpha * v["L_sigma"] * v["C_C"] * v["C_in21"])
        parts += [alpha * wide * r * v["C_V21"], alpha * wide * c * r**3 * v["C_V"] * v["C_QK21"]] * heads
    whole = v["B_w"]
    for f in factor:
        whole = whole * f
    return sum(part ** (2 / 3) for part in [*parts, whole * v["P_21"]]) ** 3


def compare_slopes(coefficient, formula, at):
    "The value, and the logarithmic slope in every norm, against the formula's derivative."
    leaves = {name: torch.tensor(x, dtype=torch.float64, requires_grad=True) for name, x in at.items()}
    value = formula(leaves)
    assert coefficient(**at) == pytest.approx(value.item(), rel=1e-12)
    value.log().backward()
    for name, x in at.items():
        up, down = (coefficient(**at | {name: x * np.exp(h)}) for h in (1e-4, -1e-4))
        exact = leaves[name].grad.item() * x
        assert np.log(up / down) / 2e-4 == pytest.approx(exact, abs=1e-6), name
        assert exact > 1e-3, f"{name} does not matter at this point"


@pytest.mark.parametrize("sharp", [False, True])
@pytest.mark.parametrize("score", ["B_QK21", "B_QKF"])
def test_slopes_of_a_head(score, sharp):
    compare_slopes(lambda **v: head_capacity(**v, T=50, m=20, sharp=sharp).coefficient, lambda v: head_formula(v, 1 if sharp else 2), HEAD | {score: 1.4})


@pytest.mark.parametrize("sharp,residual", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("layers,heads,inner", [(1, 1, {}), (2, 3, INNER), (3, 2, {})])
def test_slopes_of_a_deep_network(layers, heads, inner, sharp, residual):
    shape = dict(layers=layers, heads=heads, residual=residual)
    compare_slopes(lambda **v: depth_capacity(**v, **shape, T=50, m=20, sharp=sharp).coefficient,
                   lambda v: depth_formula(v, 1 if sharp else 2, **shape), DEEP | inner)


def from_page(path, *names):
    "What the page's imports and the cells that define these names leave behind."
    space = {}
    for cell in json.loads((ROOT / path).read_text())["cells"]:
        if cell["cell_type"] == "code":
            found, code = directives("".join(cell["source"]))
            imports = "hide" in found and "![" not in code
            if imports or found.keys() & {"export", "exports"} or any(f"def {name}(" in code for name in names):
                exec(code, space)
    return space


@pytest.fixture(scope="module")
def head_page():
    return from_page("nbs/capacity/02_bounds.ipynb", "head_attack")


@pytest.fixture(scope="module")
def deep_page():
    return from_page("nbs/capacity/03_depth.ipynb", "deep_attack")


R = 2.5  # of the page's class: 1.5 for the token, 1 for its position


def refuted(attack, path):
    with pytest.raises(AssertionError, match="violated"):
        attack()
    assert json.loads(path.read_text())["ratio"] > 1


@pytest.mark.parametrize("part,B_QK,spoil", [
    ("values", 0.5, lambda w: 0.9 * w),
    ("scores", 0.5, lambda w: w / 2), ("scores", 0.5, lambda w: w / R),  # c halved; one R dropped
    ("scalar scores", 0.5, lambda w: w / 2), ("scalar scores", 0.5, lambda w: w / R),
    ("readout", 0.5, lambda w: 0.9 * w),
    ("positions", 20.0, lambda w: 1 + R**2 * 20), ("positions", 20.0, lambda w: 1 + 2 * R * 20),
    ("positions", 1e-4, lambda w: 2 * R**2 * 1e-4),  # the 1 dropped
])
def test_a_spoiled_stretch_of_a_head_is_refuted(head_page, part, B_QK, spoil, tmp_path):
    path = tmp_path / "counterexample.json"
    weight = head_page["head_weight"](part, B_QK=B_QK)
    attack = lambda w: head_page["head_attack"](part, w, path, steps=10, B_QK=B_QK)
    attack(weight)
    refuted(lambda: attack(spoil(weight)), path)


QUIET, LARGE, CLOSE = dict(layers=2, B_X=1.5, B_P=1.0, QK=1e-4), dict(layers=1, B_X=1.5, B_P=1.0), dict(layers=1, B_X=0.2, B_P=0.15)


@pytest.mark.parametrize("part,layer,sizes,spoil", [
    *[(part, 1, QUIET | {"residual": residual}, spoil) for part in ("V", "in", "C", "P") for residual, spoil in (
        (False, lambda w, p, s: {n: x / 1.3 for n, x in w.items()}),  # C_C of a layer dropped
        (True, lambda w, p, s: p["deep_weight"](**s | {"residual": False})))],  # residual connections forgotten
    *[("QK", 1, sizes | {"QK": 0.5, "residual": residual}, lambda w, p, s: {n: x / 2 for n, x in w.items()}) for residual, sizes in ((False, LARGE), (True, CLOSE))],
    ("QK", 1, LARGE | {"QK": 0.5, "residual": False}, lambda w, p, s: {n: x / R for n, x in w.items()}),
    ("P", 0, LARGE | {"QK": 20.0, "residual": False}, lambda w, p, s: p["deep_weight"](**s | {"QK": 10.0})),  # c halved
    ("P", 0, CLOSE | {"QK": 1000.0, "residual": True}, lambda w, p, s: p["deep_weight"](**s | {"QK": 500.0})),
    ("w", 0, QUIET | {"residual": False}, lambda w, p, s: {n: 0.9 * x for n, x in w.items()}),
])
def test_a_spoiled_stretch_of_a_deep_network_is_refuted(deep_page, part, layer, sizes, spoil, tmp_path):
    path = tmp_path / "counterexample.json"
    weight = deep_page["deep_weight"](**sizes)
    kind = {} if sizes["QK"] < 0.1 else {"quiet": False}
    attack = lambda w: deep_page["deep_attack"](part, layer, w, path, steps=5, near_only=True, **sizes, **kind)
    attack(weight)
    refuted(lambda: attack(spoil(weight, deep_page, sizes)), path)


@pytest.fixture(scope="module")
def weights_page():
    return from_page("nbs/capacity/07_weights.ipynb", "recompute", "stretches", "transformer_attack")


@pytest.mark.parametrize("norm,part,missing", [
    ("none", "W_1", 1.13), ("none", "values", 1.13), ("none", "scores", 2), ("none", "embeddings", 2),  # GELU; c; two rows a token
    ("pre", "W_2", 316), ("pre", "W_1", 1.13), ("pre", "values", 316), ("pre", "scores", 2), ("pre", "embeddings", 316),
    ("post", "gain", 316), ("post", "values", 316), ("post", "scores", 2), ("post", "embeddings", 2), ("post", "w", 1.1),
])
def test_a_spoiled_stretch_of_a_transformer_is_refuted(weights_page, norm, part, missing, tmp_path):
    path = tmp_path / "counterexample.json"
    attack = lambda spoil: weights_page["transformer_attack"](norm, part, False, path, spoil=spoil, steps=2)
    attack(1.0)
    refuted(lambda: attack(missing), path)


@pytest.fixture(scope="module")
def coverings_page():
    return from_page("nbs/capacity/00_coverings.ipynb", "sphere", "measure_steps")


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_smaller_share_of_the_error_is_refuted(coverings_page, share, tmp_path):
    "The rows use all of their share: with nine tenths of it the matrix is saved."
    measure = lambda spoil: coverings_page["measure_steps"](0.5, share, 100, 8, 10, folder=tmp_path, spoil=spoil)
    measure(1.0)
    assert not list(tmp_path.iterdir())
    refuted(lambda: measure(1 / 0.9), tmp_path / "cover-rows.json")


@pytest.mark.parametrize("T", [2, 64])
def test_a_smaller_lipschitz_constant_of_heads_is_refuted(T, tmp_path):
    page, path = from_page("nbs/capacity/05_lower_bounds.ipynb", "attack"), tmp_path / "counterexample.json"
    page["device"] = "cpu"
    page["attack"](T, 32, 100, path)
    assert not path.exists()
    refuted(lambda: page["attack"](T, 32, 100, path, spoil=1.02), path)
