import math
import time

import numpy as np

from meshwork.data.order import permuted


def test_the_order_is_a_permutation_for_every_n():
    sizes = [*range(1, 2001), *np.random.default_rng(0).integers(2000, 200_000, 20)]
    for n in map(int, sizes):
        order = permuted(np.arange(n), n, seed=n, epoch=n % 7)
        assert (np.bincount(order, minlength=n) == 1).all(), n


def test_positions_and_successors_are_spread_evenly_over_seeds():
    for n in (5, 8, 30, 100):
        position, successor = np.zeros((n, n)), np.zeros((n, n))
        for seed in range(2000):
            order = permuted(np.arange(n), n, seed, epoch=0)
            position[np.arange(n), order] += 1
            successor[order[:-1], order[1:]] += 1
        assert 1e-4 < chi_square_p(position, (n - 1) ** 2) < 1 - 1e-4, n
        off_diagonal = successor[~np.eye(n, dtype=bool)]
        assert 1e-4 < chi_square_p(off_diagonal, n * (n - 1) - 1) < 1 - 1e-4, n


def chi_square_p(counts: np.ndarray, degrees: int) -> float:
    """Probability of a larger chi-square under equal expectations (Wilson and Hilferty)."""
    expected = counts.sum() / counts.size
    ratio = ((counts - expected) ** 2 / expected).sum() / degrees
    width = 2 / (9 * degrees)
    return 0.5 * math.erfc((ratio ** (1 / 3) - (1 - width)) / math.sqrt(2 * width))


def test_an_order_out_of_step_is_told_by_the_same_chi_square():
    rotations = np.zeros((30, 30))
    for seed in range(2000):
        order = (np.arange(30) + seed) % 30
        rotations[order[:-1], order[1:]] += 1
    assert chi_square_p(rotations[~np.eye(30, dtype=bool)], 30 * 29 - 1) < 1e-12


def test_any_part_of_the_order_is_found_without_the_rest():
    n = 10**9
    whole = permuted(np.arange(1000, 2000), n, seed=3, epoch=4)
    assert (permuted(np.arange(1500, 1600), n, seed=3, epoch=4) == whole[500:600]).all()
    assert len(set(whole.tolist())) == 1000
    assert whole.min() >= 0 and whole.max() < n


def test_seed_and_epoch_change_the_order_and_a_repeat_does_not():
    orders = [
        tuple(permuted(np.arange(50), 50, seed, epoch).tolist())
        for seed, epoch in ((0, 0), (0, 1), (1, 0), (2**32, 0), (2**32 + 1, 0), (2**63 - 1, 0))
    ]
    assert len(set(orders)) == len(orders)
    assert tuple(permuted(np.arange(50), 50, 0, 1).tolist()) == orders[1]


def test_the_order_of_version_1_stays_what_it_is():
    assert permuted(np.arange(8), 8, seed=0, epoch=0).tolist() == ORDER_OF_8
    assert permuted(np.arange(3), 10**9, seed=1, epoch=2).tolist() == FIRST_OF_A_BILLION


ORDER_OF_8 = [3, 2, 0, 5, 1, 6, 4, 7]
FIRST_OF_A_BILLION = [972421531, 403559806, 53684531]


def test_the_first_batch_of_a_billion_samples_takes_less_than_ten_milliseconds():
    times = []
    for epoch in range(5):
        start = time.perf_counter()
        permuted(np.arange(256), 10**9, seed=0, epoch=epoch)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.01
