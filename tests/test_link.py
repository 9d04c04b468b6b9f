"""Links that carry a run's settings and result."""

from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2demo.config import InputError, RunConfig
from gpt2demo.records import RunRecord, RunSummary
from gpt2demo.ui.link import LINKED, link, result_in, settings_in


def record(name: str = "Tesla T4", ms: float | None = 812.25, **settings: object) -> RunRecord:
    summary = RunSummary(
        state="finished",
        message="",
        steps_done=3,
        steps_measured=1,
        seconds=1.0,
        step_ms_median=ms,
    )
    config = RunConfig(**settings).to_dict()
    return RunRecord(config=config, device={"name": name}, steps=(), summary=summary)


def query(text: str) -> dict[str, str]:
    assert text.startswith("?")
    return dict(parse_qsl(text[1:], strict_parsing=True))


SETTINGS = [
    {},
    {"model": "tiny", "precision": "bf16", "B": 8, "T": 1024, "steps": 7},
    {"attention": "sdpa", "optimizer": "fused", "compile": True, "vocab_size": 50304},
    {"budget_gib": 7.5, "lr": 1e-05, "seed": 7, "text": "shakespeare"},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_link_brings_every_setting_back(settings: dict[str, object]) -> None:
    made = record(**settings)
    assert RunConfig(**settings_in(query(link(made)))) == RunConfig(**settings)
    assert result_in(query(link(made))) == "The link's own result: 812.25 ms a step on Tesla T4."


def test_an_own_text_does_not_travel() -> None:
    text = link(record(text="a secret of mine"))
    assert "secret" not in text
    assert "text" not in query(text)


def test_without_a_measured_step_there_is_no_result() -> None:
    assert result_in(query(link(record(ms=None)))) == ""
    for ms in ("nan", "inf", "-1", "0", "fast", ""):
        assert result_in({"ms": ms, "on": "x"}) == ""
    assert result_in({}) == ""


def test_a_name_is_cut() -> None:
    assert len(result_in({"ms": "1", "on": "x" * 500})) < 120


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"B": "-3"}, "B"),
        ({"B": "many"}, "B"),
        ({"T": "nan"}, "T"),
        ({"model": "gpt9"}, "model"),
        ({"compile": "1"}, "compile"),
        ({"text": "words of somebody"}, "text"),
        ({"budget_gib": "0"}, "budget_gib"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, str], field: str) -> None:
    with pytest.raises(InputError) as caught:
        settings_in(given)
    assert caught.value.field == field


@given(st.dictionaries(st.sampled_from((*LINKED, "ms", "on", "x")), st.text(max_size=30)))
def test_any_link_is_taken_or_refused(given: dict[str, str]) -> None:
    result_in(given)
    try:
        found = settings_in(given)
    except InputError:
        return
    assert set(found) == set(given) & set(LINKED)
