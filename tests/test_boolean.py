"""Sparse Boolean functions and their spectra: properties on functions, formulas and bits that Hypothesis makes up."""
import itertools
import math
import time
import tracemalloc

import pytest
import torch
from conftest import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_variable_creation.foundations.boolean import SparseBoolean, check_bits, parse_formula
from sparse_variable_creation.foundations.spectra import (degree, directions, flips, has_equal_sums, influences, is_halfspace, is_monotone,
                                                          is_symmetric, reduced, relevant, sensitivity, set_sizes, spectrum, walsh_hadamard)

T = 7
ROWS = [dict(zip((f"x{i}" for i in range(T)), row)) for row in itertools.product([False, True], repeat=T)]
BITS = torch.tensor([list(row.values()) for row in ROWS])
settings.register_profile("book", deadline=None, derandomize=True, max_examples=150)
settings.load_profile("book")

leaves = st.sampled_from(["0", "1", *(f"x{i}" for i in range(T))])
trees = st.recursive(leaves, lambda t: st.one_of(st.tuples(st.just("~"), t), st.tuples(st.sampled_from("&^|"), t, t)), max_leaves=12)
BINDS = {"|": 1, "^": 2, "&": 3, "~": 4}


def truth(tree, row):
    "The value of a tree, by Python's own operators on False and True."
    if isinstance(tree, str):
        return row[tree] if tree in row else tree == "1"
    if tree[0] == "~":
        return not truth(tree[1], row)
    a, b = truth(tree[1], row), truth(tree[2], row)
    return a and b if tree[0] == "&" else a or b if tree[0] == "|" else a != b


def written(tree, above=0, space=" "):
    "The formula of a tree, with the parentheses that it needs and no others."
    if isinstance(tree, str):
        return tree
    rank = BINDS[tree[0]]
    text = "~" + written(tree[1], rank) if rank == 4 else written(tree[1], rank, space) + space + tree[0] + space + written(tree[2], rank + 1, space)
    return f"({text})" if rank < above else text


@st.composite
def functions(draw, most=5):
    s = draw(st.integers(0, most))
    indices = draw(st.permutations(range(T)))[:s]
    return SparseBoolean(indices, draw(st.lists(st.integers(0, 1), min_size=2**s, max_size=2**s)), T)


@given(trees, st.sampled_from(["", " ", "  "]))
def test_formula_means_what_it_says(tree, space):
    f = SparseBoolean.from_formula(written(tree, space=space), T)
    assert f(BITS).tolist() == [truth(tree, row) for row in ROWS]
    assert list(f.indices) == sorted(f.indices)


@given(trees)
def test_precedence_is_pythons(tree):
    text = written(tree)
    assert SparseBoolean.from_formula(text, T)(BITS).tolist() == [bool(eval(text, {}, {**row, "1": 1}) & 1) for row in ROWS]  # noqa: S307


@given(st.text(alphabet="x0123456789&|^~() ae+é\n", max_size=14))
def test_no_text_breaks_the_parser(text):
    try:
        postfix = parse_formula(text, T)
    except ValueError as error:
        assert "at position " in str(error) and "allowed: " in str(error)
        assert 0 <= int(str(error).split("at position ")[1].split()[0]) <= len(text)
    else:
        depth = 0
        for token in postfix:
            depth += {"~": 0}.get(token, -1 if token in BINDS else 1)
            assert depth >= 1
        assert depth == 1


@pytest.mark.parametrize("attack", ["__import__('os')", "x0.__class__", "[x0]", "x0 if x1 else x2", "lambda: x0", "x0 == x1", "x0;x1", "x0**9", "1e9", "0x1", "x0 # x1"])
def test_no_python_gets_in(attack):
    with pytest.raises(ValueError, match="at position"):
        SparseBoolean.from_formula(attack, T)


def test_long_formulas_take_linear_time():
    for text in ("~" * 200_000 + "x0", "(" * 100_000 + "x1" + ")" * 100_000, " ^ ".join(["x0", "x1"] * 50_000), "x0 &" * 100_000 + " x1"):
        start = time.perf_counter()
        SparseBoolean.from_formula(text, T)
        assert time.perf_counter() - start < 5


@given(functions(), st.data())
def test_evaluation_is_the_table(f, data):
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = data.draw(st.sampled_from([torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.float16, torch.float64]))
    bits = torch.randint(0, 2, (*shape, T), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999))))
    got = f(bits.to(dtype))
    assert got.shape == tuple(shape) and got.dtype == torch.bool
    want = [f.table[sum(row[i] << n for n, i in enumerate(f.indices))] for row in bits.reshape(math.prod(shape), T).tolist()]
    assert got.reshape(-1).int().tolist() == want


@given(functions())
def test_every_maker_agrees(f):
    again = SparseBoolean.from_callable(lambda *b: f.table[sum(v << n for n, v in enumerate(b))], f.indices, T)
    terms = ["&".join(f"{'' if j >> n & 1 else '~'}x{i}" for n, i in enumerate(f.indices)) for j, v in enumerate(f.table) if v]
    text = "|".join(terms) if f.s and terms else str(f.table[0])
    assert f == again == SparseBoolean.from_table(f.values, f.indices, T)
    assert torch.equal(f(BITS), SparseBoolean.from_formula(text, T)(BITS))


@pytest.mark.parametrize("name", ["conjunction", "disjunction", "majority", "parity"])
@pytest.mark.parametrize("s", range(T + 1))
def test_gates(name, s):
    count = BITS[:, :s].sum(1)
    want = {"conjunction": count == s, "disjunction": count > 0, "majority": 2 * count > s, "parity": count % 2 == 1}
    assert torch.equal(getattr(SparseBoolean, name)(range(s), T)(BITS), want[name])
    for k in range(s + 1):
        assert torch.equal(SparseBoolean.threshold(k, range(s), T)(BITS), count >= k)
        assert torch.equal(SparseBoolean.exactly(k, range(s), T)(BITS), count == k)


@pytest.mark.parametrize("make", [
    lambda: SparseBoolean.parity(range(40), 64), lambda: SparseBoolean.majority(range(40), 64),
    lambda: SparseBoolean.from_callable(lambda *b: 0, range(40), 64), lambda: SparseBoolean.from_formula("&".join(f"x{i}" for i in range(40)), 64),
    lambda: SparseBoolean(range(40), [0, 1], 64), lambda: SparseBoolean.symmetric([0] * 41, range(40), 64)])  # fmt: skip
def test_too_many_positions_are_refused_before_any_work(make):
    tracemalloc.start()
    with pytest.raises(ValueError, match="8,192 GiB"):
        make()
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("device", DEVICES)
def test_all_inputs_of_sixteen_bits_take_no_time(device):
    bits = (torch.arange(2**16, device=device)[:, None] >> torch.arange(16, device=device) & 1).to(torch.uint8)
    f = SparseBoolean.majority(range(16), 16)
    f(bits)
    start = time.perf_counter()
    f(bits).any().item()
    assert time.perf_counter() - start < 0.2


@pytest.mark.parametrize("value", [2, -1, 0.5, math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float32, torch.float64])
def test_wrong_bits_are_refused(value, dtype):
    if dtype.is_floating_point or value in (2, -1):
        bits = torch.zeros(3, T, dtype=dtype)
        bits[1, 2] = value
        with pytest.raises(ValueError, match="bits has the value"):
            check_bits(bits, T)


@given(functions())
def test_spectrum_by_its_definition(f):
    sets = torch.arange(2**f.s)
    parity = set_sizes(2**f.s)[sets[:, None] & sets] % 2
    want = ((1 - 2 * f.values.long()) * (1 - 2 * parity)).sum(1).double() / 2**f.s
    assert torch.equal(spectrum(f), want) and spectrum(f).square().sum() == 1
    assert torch.equal(walsh_hadamard(walsh_hadamard(f.values.int())), 2**f.s * f.values.int())


@given(functions())
def test_measures_by_their_definitions(f):
    n, table = 2**f.s, f.table
    changed = [[table[j] != table[j ^ 1 << i] for j in range(n)] for i in range(f.s)]
    assert influences(f).tolist() == [sum(row) / n for row in changed]
    assert sensitivity(f) == max(sum(row[j] for row in changed) for j in range(n))
    assert relevant(f).tolist() == [any(row) for row in changed]
    assert is_monotone(f) == all(table[j] <= table[j | 1 << i] for i in range(f.s) for j in range(n))
    assert is_symmetric(f) == all(table[j] == table[k] for j in range(n) for k in range(n) if j.bit_count() == k.bit_count())
    assert degree(f) == max((k.bit_count() for k in range(n) if spectrum(f)[k] != 0), default=0)
    assert influences(f).sum() <= min(sensitivity(f), degree(f)) or f.s == 0
    assert torch.equal(reduced(f)(BITS), f(BITS)) and relevant(reduced(f)).all()


@pytest.mark.parametrize("device", DEVICES)
def test_measures_of_many_functions_at_once(device):
    tables = torch.randint(0, 2, (2, 3, 16), generator=torch.Generator().manual_seed(0))
    for measure in (spectrum, degree, flips, influences, sensitivity, relevant, directions, is_monotone, is_symmetric, has_equal_sums):
        got = measure(tables.to(device)).cpu()
        for i, j in itertools.product(range(2), range(3)):
            assert torch.equal(got[i, j], measure(tables[i, j])), measure.__name__


def monotone_table(s, generator):
    "A random monotone function, its bits then complemented at random."
    j = torch.arange(2**s)
    terms = torch.randint(1, 2**s, (1 + int(torch.randint(1, 8, (1,), generator=generator)),), generator=generator)
    g = ((j[:, None] & terms) == terms).any(1)
    return g[j ^ torch.randint(0, 2**s, (1,), generator=generator)]


def test_halfspaces_are_right_on_every_setting():
    generator, yes, no = torch.Generator().manual_seed(0), 0, 0
    for n in range(150):
        s = 4 + n % 4
        table = monotone_table(s, generator)
        weights = is_halfspace(table)
        if weights is None:  # equal sums of two contexts are enough up to eight bits
            assert has_equal_sums(table)
            no += 1
        else:
            assert all(isinstance(w, int) for w in weights)
            for j, v in enumerate(table.tolist()):
                total = weights[0] + sum(w * (j >> i & 1) for i, w in enumerate(weights[1:]))
                assert total > 0 if v else total < 0
            yes += 1
    assert yes > 20 and no > 20, (yes, no)


@pytest.mark.parametrize("s", [5, 8, 11])
def test_random_halfspaces_are_found(s):
    generator = torch.Generator().manual_seed(s)
    bits = (torch.arange(2**s)[:, None] >> torch.arange(s) & 1).double()
    for _ in range(5):
        c = torch.randn(s, generator=generator, dtype=torch.float64)
        assert is_halfspace(bits @ c > c.sum() / 2) is not None


@given(functions(4))
def test_halfspaces_do_not_mind_complements(f):
    flipped = f.values.flip(0)  # every bit complemented
    answers = {is_halfspace(t) is not None for t in (f.values, ~f.values, flipped)}
    assert len(answers) == 1


def test_every_unate_function_of_four_bits():
    tables = (torch.arange(2**16)[:, None] >> torch.arange(16) & 1).bool()
    unate = tables[~directions(tables).all(-1).any(-1)]
    assert len(unate) == 2170
    found = torch.tensor([is_halfspace(table) is not None for table in unate])
    assert torch.equal(found, ~has_equal_sums(unate)) and found.sum() == 1882
