"""The soaks in their short form; tests/test_board.py has that of `soak_kill`."""

from soak import soak_api, soak_room, soak_runs


def test_calls_that_nobody_should_make() -> None:
    report = soak_api.run(soak_api.SHORT)
    assert report.faults == {}
    assert report.calls >= soak_api.SHORT
    assert report.answers[200] > 20  # much of it was taken
    assert report.answers[422] > 10


def test_runs_in_a_row() -> None:
    figures = soak_runs.run(soak_runs.SHORT)
    assert figures.faults == []
    assert {kind for kind, _ in figures.runs} == set(soak_runs.KINDS)
    assert figures.runs.total() == soak_runs.SHORT


def test_a_full_room() -> None:
    figures = soak_room.run(soak_room.SHORT)
    assert figures.faults == []
    assert figures.updates > soak_room.SHORT.watchers
    assert figures.ends["dropped"] > 0
    assert len(figures.all_clicks()) > 3
