"""A short fault campaign: every kind of fault once. `make faults` runs the long one."""

import os

import pytest
from campaign import FAULTS, make_world, play, undisturbed

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def environment():
    """What the test does to the environment, on which the processes that it starts depend, is undone."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_a_grid_survives_every_kind_of_fault_and_ends_like_an_undisturbed_one(environment):
    with make_world(seed=0) as world:
        expected = undisturbed(world, real=False)
        assert len(expected) == 6
        kinds = [name for name in FAULTS if world.small or name != "disk full"]
        world.random.shuffle(kinds)
        play(world, "short", False, kinds, expected, print)
        assert world.injected.total() >= len(kinds) // 2, "the grid was over before the faults came"
