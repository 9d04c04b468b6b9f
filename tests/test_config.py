import dataclasses
import json
import math
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpt2demo.config import (
    ATTENTIONS,
    MODELS,
    OPTIMIZERS,
    PRECISIONS,
    GPTConfig,
    InputError,
    RunConfig,
    Settings,
    default_sizes,
)

# a busy machine is no fault of the code
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

HUGE = 10**400
DEEP: list[object] = []
for _ in range(50_000):
    DEEP = [DEEP]

# what a page, a command line or a JSON body can send in place of a whole number
NOT_WHOLE = [
    0,
    -1,
    2.5,
    8.0000001,
    True,
    False,
    None,
    "8",
    "",
    1e9,
    10**9,
    1e300,
    math.nan,
    math.inf,
    -math.inf,
    HUGE,
    -HUGE,
    10**5000,  # Python refuses to write it out
    [],
    [8],
    [10**5000],
    DEEP,
    {},
    {"B": 8},
    "8" * 1_000_000,
    list(range(100_000)),
    "eight\nlines",
]
SENTENCE_LENGTH = 200  # characters: one line of a phone's warning box


def refusal(**setting: object) -> str:
    """The message of a refused setting, after what holds for every refusal was checked."""
    (name,) = setting
    with pytest.raises(InputError) as caught:
        RunConfig(**setting)
    message = str(caught.value)
    assert caught.value.field == name
    assert message.startswith(f"{name} must be ")
    assert message.endswith(".")
    assert message.isprintable()  # one line, no control characters
    assert len(message) <= SENTENCE_LENGTH
    assert isinstance(caught.value, ValueError)
    return message


def ids(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**300:
        return "huge number"
    if isinstance(value, list | dict | str):
        return f"{type(value).__name__} of {len(value)}"
    return repr(value)


@pytest.mark.parametrize("value", NOT_WHOLE, ids=ids)
@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("B", "a whole number from 1 to 256"),
        ("T", "a whole number from 1 to 1,024"),
        ("steps", "a whole number from 1 to 100,000"),
    ],
)
def test_sizes_are_whole_numbers_in_their_range(name: str, allowed: str, value: object) -> None:
    assert allowed in refusal(**{name: value})


# 0 and 10**9 are seeds, and Python holds False for 0
@pytest.mark.parametrize("value", [*(v for v in NOT_WHOLE if v not in (0, 10**9)), False], ids=ids)
def test_seed_is_a_whole_number(value: object) -> None:
    assert "a whole number from 0 to 2,147,483,647" in refusal(seed=value)


@pytest.mark.parametrize("seed", [0, 1e9, 2**31 - 1])
def test_seeds_that_are_taken(seed: float) -> None:
    assert RunConfig(seed=seed).seed == seed


@pytest.mark.parametrize(
    ("setting", "quoted"),
    [
        ({"B": 0}, "0"),
        ({"B": -1}, "-1"),
        ({"T": 2.5}, "2.5"),
        ({"T": 1025}, "1025"),
        ({"B": 8.0000001}, "8.0000001"),  # "not 8" would puzzle everybody
        ({"lr": 1.0000001}, "1.0000001"),
        ({"B": True}, "True"),
        ({"steps": None}, "None"),
        ({"steps": "8"}, "'8'"),
        ({"B": math.nan}, "nan"),
        ({"B": math.inf}, "inf"),
        ({"B": HUGE}, "a number of more than 20 digits"),
        ({"B": [8]}, "[8]"),
        ({"precision": "FP16"}, "'FP16'"),
        ({"precision": None}, "None"),
        ({"precision": ["fp16"]}, "['fp16']"),
        ({"seed": -1}, "-1"),
        ({"lr": "3e-4"}, "'3e-4'"),
        ({"lr": -0.5}, "-0.5"),
        ({"device": "cuda:-1"}, "'cuda:-1'"),
        ({"budget_gib": "8"}, "'8'"),
        ({"budget_gib": 0.2}, "0.2"),
        ({"budget_gib": math.nan}, "nan"),
        ({"text": 7}, "7"),
    ],
    ids=repr,
)
def test_a_refusal_quotes_the_value(setting: dict[str, object], quoted: str) -> None:
    assert refusal(**setting).endswith(f"not {quoted}.")


@pytest.mark.parametrize(
    "value", ["x" * 1_000_000, "\x00\n\u2028\U0001f600" * 100_000, [0] * 10**6]
)
@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(RunConfig)])
def test_a_huge_value_gives_a_short_message(name: str, value: object) -> None:
    if name == "text" and isinstance(value, str):
        assert RunConfig(text=value).text == value
    else:
        refusal(**{name: value})


NOT_A_CHOICE = [
    None,
    True,
    0,
    1,
    1.0,
    math.nan,
    HUGE,
    "",
    " fp32",
    "fp32\n",
    [],
    ["fp32"],
    {},
    DEEP,
]


@pytest.mark.parametrize("value", NOT_A_CHOICE, ids=ids)
@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("model", ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "tiny")),
        ("precision", ("fp32", "tf32", "bf16", "fp16", "fp64")),
        ("attention", ("manual", "sdpa")),
        ("optimizer", ("default", "fused")),
        ("vocab_size", ("50257", "50304")),
    ],
)
def test_choices_are_exact_and_the_message_lists_them(
    name: str, choices: tuple[str, ...], value: object
) -> None:
    message = refusal(**{name: value})
    assert f"must be one of {', '.join(choices)}, not" in message


@pytest.mark.parametrize("value", ["FP16", "Fp32", "float32", "bfloat16", "half"])
def test_precisions_have_one_spelling(value: str) -> None:
    refusal(precision=value)


@pytest.mark.parametrize("value", [50256, 50258, 50280, 50303, 50305, 50257.5, "50257", True])
def test_there_are_two_vocabularies(value: object) -> None:
    refusal(vocab_size=value)


@pytest.mark.parametrize("value", [None, 0, 1, 1.0, "true", "on", [], math.nan])
def test_compile_is_a_bool(value: object) -> None:
    assert "False, True" in refusal(compile=value)


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, -math.inf, 0, 0.0, -0.0, -3e-4, 1.0001, 2, 1e300, HUGE, -HUGE),
        *("3e-4", "", True, False, None, [3e-4], {}),
    ],
    ids=ids,
)
def test_lr_is_a_number_above_0_and_up_to_1(value: object) -> None:
    assert "a number above 0 and up to 1" in refusal(lr=value)


@pytest.mark.parametrize("value", [3e-4, 1, 1.0, 5e-324])
def test_lr_is_kept_as_a_float(value: float) -> None:
    lr = RunConfig(lr=value).lr
    assert (lr, type(lr)) == (value, float)


@pytest.mark.parametrize(
    "value",
    [
        *(0, 0.2, 0.2499999, -8, 1025, 1024.0001, 1e300, HUGE, -HUGE),
        *(math.nan, math.inf, -math.inf, "8", "", "8 GiB", True, False, [], [8], {}, DEEP),
    ],
    ids=ids,
)
def test_a_budget_is_a_number_of_gib(value: object) -> None:
    assert "a number from 0.25 to 1,024 (GiB) or nothing" in refusal(budget_gib=value)


@pytest.mark.parametrize("value", [None, 0.25, 8, 1024, 7.5])
def test_budgets_that_are_taken(value: float | None) -> None:
    budget = RunConfig(budget_gib=value).budget_gib
    assert budget == value
    assert type(budget) is (type(None) if value is None else float)


@pytest.mark.parametrize(
    "value", ["auto", "cpu", "mps", "cuda", "cuda:0", "cuda:7", "cuda:10", "xpu", "xpu:1"]
)
def test_devices_that_may_be_named(value: str) -> None:
    assert RunConfig(device=value).device == value


@pytest.mark.parametrize(
    "value",
    [
        *("", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:100", "cuda:1.0", "cuda: 1", "cuda:0\n"),
        *("cuda:01", "cuda:00", "cuda:\u0663"),  # torch itself refuses these
        *("cpu:0", "mps:0", "auto:0", "meta", "/dev/nvidia0"),
        *(None, 0, True, ["cpu"], {}, math.nan),
    ],
    ids=repr,
)
def test_devices_that_may_not(value: object) -> None:
    assert "auto, cpu, cuda, cuda:N, mps, xpu or xpu:N" in refusal(device=value)


@pytest.mark.parametrize(
    "value", [None, 0, 1.5, True, b"bytes", ["a"], {"a": 1}, math.nan], ids=repr
)
def test_a_text_is_a_string(value: object) -> None:
    assert "a text" in refusal(text=value)


@pytest.mark.parametrize("T", [1, 1024])
def test_T_reaches_the_models_block_size(T: int) -> None:  # noqa: N802
    for model, shape in MODELS.items():
        assert RunConfig(model=model, T=T).T == T
        assert shape.block_size == 1024


def test_T_is_bounded_by_the_model_that_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: N802
    monkeypatch.setitem(MODELS, "short", GPTConfig(block_size=16))
    assert RunConfig(model="short", T=16).T == 16
    with pytest.raises(InputError, match=r"T must be a whole number from 1 to 16, not 17\."):
        RunConfig(model="short", T=17)


# --- any JSON at all ---

json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text()
    | st.sampled_from((8.0, 50257.0, 50304, 1e9, "8", "fp32", "auto", "cuda:0", "gpt2", "sdpa")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
TYPES = {
    "model": str,
    "precision": str,
    "B": int,
    "T": int,
    "steps": int,
    "attention": str,
    "optimizer": str,
    "compile": bool,
    "vocab_size": int,
    "lr": float,
    "seed": int,
    "device": str,
    "budget_gib": (float, type(None)),
    "text": str,
}
likely = {
    "model": st.sampled_from(tuple(MODELS)),
    "precision": st.sampled_from(PRECISIONS),
    "B": st.integers(1, 256) | st.integers(1, 256).map(float),
    "T": st.integers(1, 1024),
    "steps": st.integers(1, 100_000),
    "attention": st.sampled_from(ATTENTIONS),
    "optimizer": st.sampled_from(OPTIMIZERS),
    "compile": st.booleans(),
    "vocab_size": st.sampled_from((50257, 50304)),
    "lr": st.floats(0, 1, exclude_min=True) | st.just(1),
    "seed": st.integers(0, 2**31 - 1),
    "device": st.sampled_from(("auto", "cpu", "cuda", "cuda:3", "mps", "xpu")),
    "budget_gib": st.none() | st.floats(0.25, 1024) | st.integers(1, 1024),
    "text": st.text() | st.sampled_from(("builtin", "shakespeare")),
}


def test_every_field_is_in_the_tests_tables() -> None:
    names = [f.name for f in dataclasses.fields(RunConfig)]
    assert names == list(TYPES) == list(likely)


def holds(config: RunConfig) -> None:
    """What is true of every config that passed, said without RunConfig's own code."""
    for name, kind in TYPES.items():
        assert isinstance(getattr(config, name), kind), name
        assert type(getattr(config, name)) is not bool or kind is bool, name
    assert config.model in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "tiny")
    assert config.precision in ("fp32", "tf32", "bf16", "fp16", "fp64")
    assert config.budget_gib is None or 0.25 <= config.budget_gib <= 1024
    assert 1 <= config.B <= 256
    assert 1 <= config.T <= 1024
    assert 1 <= config.steps <= 100_000
    assert config.vocab_size in (50257, 50304)
    assert 0 < config.lr <= 1
    assert 0 <= config.seed < 2**31
    assert config.tokens_per_step == config.B * config.T
    assert (config.gpt.vocab_size, config.gpt.block_size) == (config.vocab_size, 1024)
    json.dumps(config.to_dict(), allow_nan=False)


def made(given_: dict[str, object], odd: tuple[str, ...]) -> RunConfig | None:
    """The config, or None when it was refused as it should be, naming one of the odd fields."""
    refused = None
    try:
        config = RunConfig(**given_)
    except InputError as exc:
        refused = exc
    if refused is None:
        holds(config)
        return config
    message = str(refused)
    assert refused.field in odd
    assert message.startswith(f"{refused.field} must be ")
    assert message.isprintable()
    assert len(message) <= SENTENCE_LENGTH
    return None


@unhurried
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(TYPES, json_like)))
@example({"B": 1e308})
@example({"text": "\ud800"})
def test_any_json_is_a_config_or_refused(given_: dict[str, object]) -> None:
    config = made(given_, tuple(given_))
    if config:
        for name, value in given_.items():
            assert getattr(config, name) == value  # 8.0 is 8, nothing else changes


@unhurried
@given(st.data(), st.sampled_from(tuple(TYPES)))
def test_one_odd_value_in_a_good_config(data: st.DataObject, odd: str) -> None:
    good = {name: data.draw(strategy) for name, strategy in likely.items()}
    config = RunConfig(**good)
    holds(config)
    value = data.draw(json_like)
    made(good | {odd: value}, (odd,))


@unhurried
@given(st.fixed_dictionaries(likely))
def test_to_dict_makes_the_same_config_again(good: dict[str, object]) -> None:
    config = RunConfig(**good)
    again = RunConfig(**config.to_dict())
    if good["text"] in ("builtin", "shakespeare"):
        assert again == config
    else:
        assert again.text == "own"
        assert dataclasses.replace(again, text=config.text) == config


# --- what a config shows ---


def test_an_own_text_is_never_shown() -> None:
    secret = "my diary, 7 May"
    config = RunConfig(text=secret)
    shown = (
        repr(config),
        str(config),
        config.label,
        json.dumps(config.to_dict()),
        config.text_name,
    )
    for text in shown:
        assert "diary" not in text
    assert config.text == secret
    assert config.to_dict()["text"] == config.text_name == "own"
    assert RunConfig(text="shakespeare").to_dict()["text"] == "shakespeare"
    assert list(config.to_dict()) == list(TYPES)


@pytest.mark.parametrize(
    ("setting", "label"),
    [
        ({}, "fp32 B=4 T=32"),
        ({"precision": "bf16"}, "bf16 B=4 T=32"),
        ({"B": 16, "T": 1024, "precision": "tf32"}, "tf32 B=16 T=1024"),
        ({"model": "tiny"}, "fp32 B=4 T=32 tiny"),
        ({"attention": "sdpa"}, "fp32 B=4 T=32 sdpa"),
        ({"optimizer": "fused"}, "fp32 B=4 T=32 fused AdamW"),
        ({"compile": True}, "fp32 B=4 T=32 compiled"),
        ({"vocab_size": 50304}, "fp32 B=4 T=32 V=50304"),
        ({"budget_gib": 8}, "fp32 B=4 T=32 in 8 GiB"),
        ({"budget_gib": 0.25}, "fp32 B=4 T=32 in 0.25 GiB"),
        ({"budget_gib": 1024.0}, "fp32 B=4 T=32 in 1024 GiB"),
        (
            {"model": "gpt2-xl", "attention": "sdpa", "optimizer": "fused", "compile": True}
            | {"vocab_size": 50304, "precision": "fp16", "budget_gib": 7.5},
            "fp16 B=4 T=32 gpt2-xl sdpa fused AdamW compiled V=50304 in 7.5 GiB",
        ),
        ({"steps": 7, "seed": 1, "lr": 0.1, "device": "cpu", "text": "own words"}, "fp32 B=4 T=32"),
    ],
)
def test_label(setting: dict[str, object], label: str) -> None:
    assert RunConfig(**setting).label == label


def test_configs_are_frozen_slotted_and_keyword_only() -> None:
    config = RunConfig()
    for kind in (RunConfig, GPTConfig, Settings):
        one = kind()
        assert not hasattr(one, "__dict__")
        name = dataclasses.fields(kind)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, name, getattr(one, name))
        with pytest.raises(TypeError):
            kind("gpt2")
    with pytest.raises(TypeError):
        RunConfig(batch=4)
    assert {config: 1}[RunConfig()] == 1  # equal settings are one key
    assert dataclasses.replace(config, B=8.0).B == 8
    with pytest.raises(InputError):
        dataclasses.replace(config, B=0)  # a changed config is checked again


def test_models_have_the_published_shapes() -> None:
    def shape(model: str) -> tuple[int, int, int]:
        gpt = MODELS[model]
        return gpt.n_layer, gpt.n_head, gpt.n_embd

    assert shape("gpt2") == (12, 12, 768)
    assert shape("gpt2-medium") == (24, 16, 1024)
    assert shape("gpt2-large") == (36, 20, 1280)
    assert shape("gpt2-xl") == (48, 25, 1600)
    assert shape("tiny")[0] == 2
    assert shape("tiny")[2] == 64
    for gpt in MODELS.values():
        assert gpt.vocab_size == 50257
        assert gpt.n_embd % gpt.n_head == 0


def test_default_sizes_are_a_valid_start() -> None:
    assert default_sizes("cpu") == {"B": 4, "T": 32, "steps": 20}
    for device_type in ("cuda", "mps", "xpu"):
        assert default_sizes(device_type) == {"B": 4, "T": 1024, "steps": 50}
    config = RunConfig(**default_sizes("cuda"))
    assert (config.model, config.precision, config.lr, config.seed) == ("gpt2", "fp32", 3e-4, 1337)


# --- settings of the server ---

SETTING_NAMES = [f.name for f in dataclasses.fields(Settings)]


def variables() -> Iterator[str]:
    return (f"GPT2DEMO_{name.upper()}" for name in SETTING_NAMES)


def test_settings_without_variables_are_the_defaults() -> None:
    assert (
        Settings.from_env({}) == Settings.from_env({"PATH": "/bin", "GPT2DEMO": "1"}) == Settings()
    )


@pytest.mark.parametrize("name", SETTING_NAMES)
def test_each_setting_has_its_variable(name: str) -> None:
    changed = Settings.from_env({f"GPT2DEMO_{name.upper()}": " 7 "})
    assert getattr(changed, name) == 7
    assert dataclasses.replace(changed, **{name: getattr(Settings(), name)}) == Settings()


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in variables():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("GPT2DEMO_MAX_LINE", "3")
    assert Settings.from_env() == Settings(max_line=3)


@pytest.mark.parametrize(
    "value",
    [
        *("", " ", "0", "-5", "+5", "2.5", "1e3", "1_000", "1,000", "0x10", "10000001", "9" * 5000),
        *("ten", "nan", "True", "5\n6", "\u0663"),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_a_bad_variable_is_refused_by_name(value: str) -> None:
    for variable in variables():
        with pytest.raises(InputError) as caught:
            Settings.from_env({variable: value})
        message = str(caught.value)
        assert caught.value.field == variable
        assert message.startswith(f"{variable} must be a whole number from 1 to 10,000,000, not ")
        assert message.isprintable()
        assert len(message) <= SENTENCE_LENGTH


def test_deep_values_do_not_exhaust_the_stack() -> None:
    assert sys.getrecursionlimit() < 50_000  # so that DEEP means something
    for name in TYPES:
        refusal(**{name: DEEP})
