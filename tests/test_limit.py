"""The search for the largest B or T that runs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2demo.config import InputError, RunConfig
from gpt2demo.fit import Capacity, largest
from gpt2demo.limit import MAX_TRIES, LimitSearch
from gpt2demo.records import RunRecord, RunSummary

GIB = 2**30


def ended(config: RunConfig, state: str) -> RunRecord:
    summary = RunSummary(state=state, message="", steps_done=2, steps_measured=0, seconds=1.0)
    return RunRecord(config=config.to_dict(), device={}, steps=(), summary=summary)


def search(config: RunConfig, axis: str, capacity: Capacity, limit: int) -> tuple[str, list[int]]:
    """What the search finds on a machine where sizes up to `limit` run, and what it tried."""
    found = LimitSearch(config=config, axis=axis, capacity=capacity)
    tried = []
    while run := found.next_run():
        assert replace(run, **{axis: getattr(config, axis)}, steps=config.steps) == config
        assert run.steps == 2  # AdamW's moments are born in the first
        size = getattr(run, axis)
        tried.append(size)
        assert str(len(tried)) in found.doing
        found.ended(ended(run, "finished" if size <= limit else "out of memory"))
    assert found.next_run() is None
    return found.message, tried


CARD = Capacity(total_bytes=16 * GIB, device_type="cuda", with_context=True)
BUDGET = Capacity(total_bytes=4 * GIB, tracked=True)


def test_a_forecast_that_holds_takes_two_tries() -> None:
    config = RunConfig(T=1024)
    B = largest(config, "B", BUDGET)
    said, tried = search(config, "B", BUDGET, B)
    assert tried == [B, B + 1]
    assert said == f"The largest B that ran at T=1024 is {B}; B={B + 1} ran out of memory."


def test_the_search_goes_into_the_band_in_which_it_may_fail() -> None:
    config = RunConfig(T=256)
    sure = largest(config, "B", CARD)
    most = largest(config, "B", CARD, also_may_fail=True)
    assert sure + 1 < most
    for limit in range(sure, most + 1):
        said, tried = search(config, "B", CARD, limit)
        assert f"is {limit}; B={limit + 1} ran out of memory" in said
        assert tried[0] == sure


def test_lengths_are_tried_in_the_sliders_steps() -> None:
    said, tried = search(RunConfig(B=8), "T", BUDGET, 136)
    assert all(T % 8 == 0 for T in tried)
    assert said == "The largest T that ran at B=8 is 136; T=144 ran out of memory."


def test_where_nothing_runs() -> None:
    said, tried = search(RunConfig(T=1024), "B", Capacity(total_bytes=0, device_type="cuda"), 0)
    assert tried == [1]
    assert said == "No B ran at T=1024: B=1 ran out of memory."


def test_the_sliders_end() -> None:
    said, tried = search(RunConfig(model="tiny", T=8), "B", CARD, 10_000)
    assert tried == [256]
    assert said == "The largest B that ran at T=8 is 256: that is the slider's end."


def test_without_a_known_memory_the_slider_is_halved() -> None:
    said, tried = search(RunConfig(T=64), "B", Capacity(total_bytes=None), 50)
    assert tried == [1, 129, 65, 33, 49, 57]
    assert said == "The largest B that ran at T=64 is 49; B=57 ran out of memory."


@given(
    st.integers(0, 300),
    st.sampled_from((RunConfig(T=1024), RunConfig(T=64), RunConfig(model="tiny", T=512))),
    st.sampled_from((CARD, BUDGET, Capacity(total_bytes=None))),
)
def test_at_most_six_tries_and_only_what_was_seen_is_said(limit, config, capacity) -> None:
    said, tried = search(config, "B", capacity, limit)
    assert 1 <= len(tried) <= MAX_TRIES
    assert len(set(tried)) == len(tried)
    passed = [B for B in tried if B <= limit]
    failed = [B for B in tried if B > limit]
    if passed:
        assert f"is {max(passed)}" in said
    if failed:
        assert f"B={min(failed)} ran out of memory" in said


@pytest.mark.parametrize("state", ["stopped", "error", "diverged", "interrupted"])
def test_any_other_end_ends_the_search(state: str) -> None:
    found = LimitSearch(config=RunConfig(), axis="B", capacity=BUDGET)
    first = found.next_run()
    found.ended(ended(first, "finished"))
    found.ended(ended(found.next_run(), state))
    assert found.next_run() is None
    assert found.message.startswith(f"The search ended: a try was {state}.")
    assert f"is {first.B}" in found.message


def test_there_are_two_axes() -> None:
    with pytest.raises(InputError, match="axis must be B or T"):
        LimitSearch(config=RunConfig(), axis="C", capacity=BUDGET)
