"""Which cases are started before a host is taken away."""

from workflow.lib.benchmark.time_limit import TimeLimit


def test_one_case_is_held_to_the_share_of_one_of_those_measured_together() -> None:
    now = [0.0]
    limit = TimeLimit(170.0, clock=lambda: now[0])
    assert limit.allows(6)  # nothing is known yet
    with limit.measuring(6):
        now[0] = 120.0
    assert limit.allows(1)
    assert limit.allows(2)
    assert not limit.allows(3)


def test_slowest_case_decides() -> None:
    now = [0.0]
    limit = TimeLimit(100.0, clock=lambda: now[0])
    for end in (30.0, 40.0):
        with limit.measuring(1):
            now[0] = end
    assert limit.allows(1)
    now[0] = 75.0
    assert not limit.allows(1)


def test_nothing_starts_after_the_end() -> None:
    assert not TimeLimit(0.0, clock=lambda: 0.0).allows(1)
