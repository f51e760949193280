import runpy
import tracemalloc
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import PacelineError
from paceline.coded.codes import MDS

COMPARED = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "codes.py"))
CONSTRUCTIONS, worst_condition = COMPARED["CONSTRUCTIONS"], COMPARED["worst_condition"]


def matrix(rows, columns, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns))


def decoded(code, blocks, x, order, rows):
    return code.decode({int(i): blocks[i] @ x for i in order}, rows)


@pytest.mark.parametrize("construction", CONSTRUCTIONS.values())
def test_every_k_of_n_blocks_recover_the_product(construction):
    """Sun et al., section II-A."""
    a, x = matrix(23, 5), matrix(5, 2)
    code = construction(4, 7)
    blocks = code.encode(a)
    for chosen in combinations(range(7), 4):
        np.testing.assert_allclose(decoded(code, blocks, x, chosen, 23), a @ x, atol=1e-11)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 44), st.integers(0, 20), st.integers(1, 90), st.integers(0, 2**32))
def test_random_blocks_in_random_order_recover_the_product(k, parities, rows, seed):
    rng = np.random.default_rng(seed)
    k = min(k, rows)
    code = MDS(-(-rows // -(-rows // k)), k + parities)
    a, x = rng.standard_normal((rows, 3)), rng.standard_normal(3)
    y = decoded(code, code.encode(a), x, rng.permutation(code.n)[: code.k], rows)
    assert np.linalg.norm(y - a @ x) <= 1e-10 * np.linalg.norm(a @ x)


@pytest.mark.parametrize(("k", "n"), [(44, 64), (32, 64), (60, 64)])
def test_sixty_four_blocks_stay_accurate_to_1e_10(k, n):
    a, x = matrix(5 * k, 8), matrix(8, 1)[:, 0]
    code = MDS(k, n)
    blocks = code.encode(a)
    products = [b @ x for b in blocks]
    worst = 0.0
    parities = np.arange(k, n)
    for seed in range(150):
        rng = np.random.default_rng(seed)
        used = parities[
            : min(len(parities), k)
        ]  # every parity, with random own blocks: the hardest to decode
        own = rng.choice(k, k - len(used), replace=False)
        y = code.decode({int(i): products[i] for i in [*own, *used]}, len(a))
        worst = max(worst, np.linalg.norm(y - a @ x) / np.linalg.norm(a @ x))
    assert worst <= 1e-10


def test_the_default_is_the_best_conditioned_for_many_blocks():
    worst = {name: worst_condition(made(22, 32), 2000)[0] for name, made in CONSTRUCTIONS.items()}
    assert worst["orthogonal"] < 1e6
    assert worst["cauchy"] > 1e9
    assert worst["chebyshev"] > 1e9


def test_worst_condition_looks_at_every_choice_where_it_can():
    code = MDS(3, 5)
    value, all_of_them = worst_condition(code)
    assert all_of_them
    assert value == max(np.linalg.cond(code.generator[list(c)]) for c in combinations(range(5), 3))
    assert not worst_condition(MDS(22, 32), 500)[1]


def test_parities_beyond_the_missing_choose_the_better_conditioned_system():
    code = MDS(2, 4)
    # The first is useless for block 1.
    object.__setattr__(code, "parity", np.array([[1.0, 1e-12], [0.6, 0.8]]))
    a, x = matrix(4, 3), matrix(3, 1)[:, 0]
    blocks = code.encode(a)
    y = code.decode({i: blocks[i] @ x for i in (0, 2, 3)}, 4)
    np.testing.assert_allclose(y, a @ x, rtol=1e-12)


def test_a_code_grows_without_changing_its_blocks():
    short, long = MDS(6, 9), MDS(6, 30)
    np.testing.assert_array_equal(short.parity, long.parity[:3])


@pytest.mark.parametrize("code", [MDS(4, 7), MDS(250, 300)])
def test_chosen_blocks_are_the_generator_times_the_blocks_of_a(code):
    a = matrix(501, 3)  # no multiple of 4 or 250
    size = -(-501 // code.k)
    padded = np.zeros((code.k * size, 3))
    padded[:501] = a
    expected = np.einsum("nk,ksc->nsc", code.generator, padded.reshape(code.k, size, 3))
    np.testing.assert_allclose(code.encode(a), expected, atol=1e-12)
    chosen = [5, 0, 3]
    np.testing.assert_allclose(code.encode(a, chosen), expected[chosen], atol=1e-12)


def test_encoding_takes_no_more_memory_than_the_parities():
    a = matrix(4000, 100)
    code = MDS(40, 60)
    code.parity  # noqa: B018
    tracemalloc.start()
    blocks = code.encode(a)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 1.02 * a.nbytes * 20 / 40  # A itself, with its views, is the rest of (redundancy + 1) A
    assert np.shares_memory(blocks[0], a)


def test_float32_stays_float32():
    a = matrix(40, 3).astype(np.float32)
    blocks = MDS(4, 6).encode(a)
    assert all(b.dtype == np.float32 for b in blocks)


def test_too_few_products_and_bad_codes_are_refused():
    with pytest.raises(PacelineError, match="expected 3 of 5"):
        MDS(3, 5).decode({0: np.zeros(1)}, 3)
    for bad in (lambda: MDS(3, 2), lambda: MDS(0, 2)):
        with pytest.raises(PacelineError, match="expected"):
            bad()


def test_amplification_is_the_measured_growth_of_rounding_errors_and_falls_with_further_blocks():
    code, rng = MDS(20, 30), np.random.default_rng(0)
    order = rng.permutation(30).tolist()
    few, more = order[:20], order[:23]
    assert code.amplification(more) < code.amplification(few)
    assert code.amplification(range(20)) == 1
    for chosen in (few, more):
        noise = rng.standard_normal((30, 1, 4000))
        wrong = code.decode({i: noise[i] for i in chosen}, 20)
        assert np.sqrt(np.square(wrong).mean()) == pytest.approx(code.amplification(chosen), rel=0.1)
