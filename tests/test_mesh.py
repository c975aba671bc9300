"""A layout is four degrees whose product is the number of ranks, or a sentence."""

import itertools
import re
from dataclasses import fields

import pytest
from jobs import composed

from meshwork.config import ConfigError
from meshwork.mesh import AXES, Layout
from meshwork.schema import Parallel


def asked(*degrees: int) -> Parallel:
    rest = dict.fromkeys(f.name for f in fields(Parallel)[4:])
    return Parallel(*degrees, **rest)


def test_every_product_that_is_the_world_size_resolves() -> None:
    for degrees in itertools.product([1, 2, 3], repeat=4):
        product = degrees[0] * degrees[1] * degrees[2] * degrees[3]
        layout = Layout.resolve(asked(*degrees), product)
        assert tuple(getattr(layout, a) for a in AXES) == degrees
        assert layout.data_ranks == degrees[0] * degrees[1]


@pytest.mark.parametrize("axis", range(4))
def test_minus_one_takes_the_ranks_that_are_left(axis: int) -> None:
    degrees = [1, 2, 3, 1]
    degrees[axis] = -1
    rest = {0: 6, 1: 3, 2: 2, 3: 6}[axis]
    layout = Layout.resolve(asked(*degrees), rest * 4)
    assert getattr(layout, AXES[axis]) == 4


@pytest.mark.parametrize(
    ("degrees", "world_size"),
    [
        ((1, 2, 3, 1), 4),
        ((1, 1, 2, 1), 4),
        ((-1, 1, 2, 2), 6),
        ((-1, 1, 4, 1), 2),
        ((1, -2, -2, 1), 4),
        ((1, 1, 0, 1), 4),
        ((-1, -1, 1, 1), 4),
        ((1, 1, 1, 1), 2),
        ((4, 1, 1, 1), 2),
    ],
)
def test_a_refusal_names_every_degree_and_the_world_size(degrees: tuple, world_size: int) -> None:
    with pytest.raises(ConfigError) as error:
        Layout.resolve(asked(*degrees), world_size)
    text = str(error.value)
    assert f"WORLD_SIZE={world_size}" in text
    for axis, degree in zip(AXES, degrees, strict=True):
        assert f"{axis}={degree}" in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("degrees", "world_size"), [((1, 2, 3, 1), 4), ((-1, 1, 2, 2), 6), ((-1, 1, 4, 1), 2)]
)
def test_the_counts_that_a_refusal_names_work(degrees: tuple, world_size: int) -> None:
    with pytest.raises(ConfigError) as error:
        Layout.resolve(asked(*degrees), world_size)
    counts = re.search(r"start (\d+)(?: or (\d+))? processes", str(error.value))
    for n in filter(None, counts.groups()):
        Layout.resolve(asked(*degrees), int(n))


def test_ddp_takes_all_ranks_and_data_ranks_are_numbered_past_tp() -> None:
    assert Layout.resolve(composed().parallel, 5) == Layout(dp_replicate=5)
    layout = Layout(dp_replicate=2, dp_shard=1, tp=2, pp=2)
    assert [layout.data_rank(r) for r in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert str(layout) == "dp_replicate 2 x tp 2 x pp 2"
    assert str(Layout()) == "one process, nothing to split"
