"""What the host's benchmark measures is there, also where a stage's forward is in its backward."""

from benchmarks.host import host_cost


def test_an_empty_pipeline_is_timed_by_part():
    found = host_cost(leaves=2, microbatches=4, steps=2)
    assert found.keys() == {"scheduling", "dispatch", "transfer", "all", "bare"}
    assert all(one["median_us"] > 0 for one in found.values())
