"""Whatever happens, the end is what the spec asks for, and on the way nothing that is needed is ended."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.operator.model_cluster import World
from support.operator.random_faults import Step, Storm

SEARCH = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
steps = st.lists(st.tuples(st.integers(0, 31), st.integers(0, 60)), min_size=1, max_size=60)


@SEARCH
@given(steps)
def test_random_faults_end_in_the_state_of_the_spec(storm: list[Step]) -> None:
    run = Storm(World())
    run.run(storm)
    run.heal()
    run.converge()
    run.check_end()
