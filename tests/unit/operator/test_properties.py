"""After any faults the end state is that of the spec, and no needed pod is deleted before."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.operator.model_cluster import ModelCluster
from support.operator.random_faults import RandomFaults, Step

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
def test_random_faults_end_in_the_state_of_the_spec(chosen_steps: list[Step]) -> None:
    faults = RandomFaults(ModelCluster())
    faults.apply_steps(chosen_steps)
    faults.end_faults()
    faults.run_until_idle()
    faults.check_end_state()
