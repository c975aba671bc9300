"""The order of the data: a keyed permutation of range(n), looked up position by position."""

import numpy as np

VERSION = 1  # stored with a position: another function here would continue another order
ROUNDS = 24  # each halves what is left of the order before it


def permuted(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Samples at these positions of an epoch's order, both int64 arrays of numbers below n.

    A pure function, the same for every n, bijective on range(n), in O(len(positions)). It is the
    swap-or-not shuffle (Hoang, Morris, Rogaway, CRYPTO 2012): each round pairs x with key - x and
    swaps the pair if a hash of its larger member says so.
    """
    # Fixed 32-bit words: SeedSequence would take (seed + 2**32, 0) and (seed, 1) for the same.
    words = np.random.SeedSequence((seed & 0xFFFFFFFF, seed >> 32, epoch))
    keys = words.generate_state(2 * ROUNDS, np.uint64)
    pairs, salts = (keys[:ROUNDS] % np.uint64(n)).astype(np.int64), keys[ROUNDS:]
    x = np.array(positions, np.int64)
    for pair, salt in zip(pairs, salts, strict=True):
        partner = pair - x
        partner += n & (partner >> 63)  # modulo n
        swap = mixed(np.maximum(x, partner).view(np.uint64) ^ salt) >> np.uint64(63)
        x += (partner - x) * swap.view(np.int64)
    return x


def mixed(x: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each element, bijective (finaliser of splitmix64); uint64 to uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
