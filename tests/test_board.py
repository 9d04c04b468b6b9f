import contextlib
import dataclasses
import json
import math
import os
import random
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from soak import soak_kill

from gpt2demo import board as board_module
from gpt2demo import board_file, board_import
from gpt2demo.board import Board
from gpt2demo.board_file import FILE_NAME, default_folder
from gpt2demo.board_import import MAX_IMPORT_CHARS, MAX_IMPORT_STEPS
from gpt2demo.config import InputError, RunConfig
from gpt2demo.records import OutOfMemory, RunMemory, RunRecord, RunSummary, StepMetrics, timing

ROOT = Path(__file__).resolve().parent.parent
DEVICE = {
    "type": "cuda",
    "index": 0,
    "name": "Tesla T4",
    "memory_total_bytes": 15828320256,
    "memory_free_bytes": None,
    "compute_capability": "7.5",
    "architecture": "Turing",
    "driver_version": "580.65.06",
    "torch_version": "2.13.0+cu130",
    "cuda_version": "13.0",
    "hip_version": None,
    "python_version": "3.11.7",
    "platform": "Linux",
    "cores": 8,
    "torch_threads": 4,
    "gpu": "Tesla T4",
    "problem": None,
    "support": {"fp32": {"status": "native", "reason": "The GPU's own.", "slow": None}},
}


def made(number: int = 0, *, steps: int = 4, **changes: object) -> RunRecord:
    """A run that differs from that of every other number."""
    config = RunConfig(precision="bf16", B=2, T=64, steps=max(steps, 1)).to_dict()
    measured = tuple(
        StepMetrics(
            step=i,
            loss=10.8 - i / 7,
            step_ms=100.1 + number + i / 3,
            tokens_per_sec=1280 / 1.3,
            is_warmup=i < 2,
            peak_memory_bytes=2**31 + number,
        )
        for i in range(steps)
    )
    summary = {
        "state": "finished",
        "message": f"Finished: run {number}.",
        "notes": ("runs without torch.compile",),
        "steps_done": steps,
        "seconds": 1.5,
        **dataclasses.asdict(timing(measured)),
        "final_loss": measured[-1].loss if measured else None,
        "flops_per_token": 20_000_000,  # whole, though its field is a float
        "memory": RunMemory(
            forecast_bytes=2**31,
            verdict="fits",
            capacity_bytes=None,
            measured_bytes=2**31 + number,
            reserved_bytes=2**32,
            measured_by="max_memory_allocated",
        ),
    }
    record = RunRecord(
        config=config, device=DEVICE, steps=measured, summary=RunSummary(**summary | changes)
    )
    return record


def diverged(loss: float) -> RunRecord:
    record = made(7, state="diverged", final_loss=loss)
    last = dataclasses.replace(record.steps[-1], loss=loss, loss_scale=math.inf)
    return dataclasses.replace(record, steps=(*record.steps[:-1], last))


def failed() -> RunRecord:
    return made(
        8,
        steps=0,
        state="out of memory",
        out_of_memory=OutOfMemory(
            step=None,
            moment="forward",
            asked_bytes=2**30,
            parts={"weights": 2**29, "logits": 2**28},
            capacity_bytes=None,
            smaller_B=1,
            smaller_T=None,
        ),
    )


def messages(board: Board) -> list[str]:
    return [run.record.summary.message for run in board.runs()]


def said(board: Board) -> str:
    """The board's note, which never shows where the file lies."""
    assert board.note
    assert "/" not in board.note
    assert FILE_NAME not in board.note
    assert board.note.endswith(".")
    return board.note


def exported(*records: RunRecord) -> str:
    return json.dumps({"gpt2demo": 1, "runs": [record.to_dict() for record in records]})


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def content(record: RunRecord) -> dict[str, object]:
    """What a run says, NaN equal to NaN, 1 to 1.0, and the device as an import knows it."""
    data = record.to_dict()
    data["device"] = {name: data["device"][name] for name in DEVICE if name != "support"}
    return data


# --- keeping ---


def test_runs_survive_a_restart(tmp_path: Path) -> None:
    board = Board(tmp_path / "new" / "folder", limit=10)
    records = [made(1), diverged(math.nan), diverged(-math.inf), failed()]
    before = time.time()
    ids = [board.add(record, "ada") for record in records]
    assert board.note is None
    board.close()
    again = Board(tmp_path / "new" / "folder", limit=10)
    assert [run.id for run in again.runs()] == ids[::-1]
    for run, record in zip(again.runs(), records[::-1], strict=True):
        assert run.record.steps == ()
        assert run.record.to_dict() == dataclasses.replace(record, steps=()).to_dict()
        assert run.record.device["support"] == DEVICE["support"]
        assert before <= run.added <= time.time()
        assert not run.imported
        assert 0 <= run.id < 2**53
    for run_id, record in zip(ids, records, strict=True):
        assert again.record(run_id).to_dict() == record.to_dict()
    assert again.record(ids[0]) == records[0]
    assert again.record(1) is None
    assert again.record(10**30) is None
    assert again.note is None


def test_owners_know_their_runs_and_the_file_knows_no_token(tmp_path: Path) -> None:
    board = Board(tmp_path, limit=10)
    board.add(made(1), "token-of-ada")
    board.add(made(2), "token-of-bob")
    board.import_json(exported(made(3)), "token-of-ada")
    assert [(run.mine, run.imported) for run in board.runs("token-of-ada")] == [
        (True, True),
        (False, False),
        (True, False),
    ]
    assert not any(run.mine for viewer in (None, "", "x") for run in board.runs(viewer))
    assert b"token-of" not in (tmp_path / FILE_NAME).read_bytes()


@pytest.mark.parametrize("on_disk", [True, False])
def test_the_oldest_go_and_imports_take_at_most_half(tmp_path: Path, on_disk: bool) -> None:
    board = Board(tmp_path if on_disk else None, limit=6)
    for number in range(4):
        board.add(made(number), "ada")
    for number in range(10, 15):
        assert board.import_json(exported(made(number)), "bob") == 1
    kept = [14, 13, 12, 3, 2, 1]
    assert messages(board) == [f"Finished: run {number}." for number in kept]
    for number in range(20, 24):
        board.add(made(number), "ada")
    kept = [23, 22, 21, 20, 14, 13]
    assert messages(board) == [f"Finished: run {number}." for number in kept]
    assert len(json.loads(board.export_json())["runs"]) == 6
    with pytest.raises(InputError, match="holds 4 runs; at most 3 are taken"):
        board.import_json(exported(*map(made, range(4))), "bob")


def test_a_board_without_a_folder_keeps_runs_in_memory() -> None:
    board = Board(None, limit=3)
    assert "in memory only" in said(board)
    run_id = board.add(made(1), "ada")
    assert board.record(run_id) == made(1)
    assert [run.mine for run in board.runs("ada")] == [True]
    board.close()
    assert messages(board) == ["Finished: run 1."]
    with pytest.raises(ValueError, match="limit"):
        Board(None, limit=0)


def test_two_equal_runs_are_two(tmp_path: Path) -> None:
    board = Board(tmp_path, limit=3)
    assert board.add(made(1), "ada") != board.add(made(1), "ada")
    assert len(board.runs()) == 2


def test_what_is_no_record_is_not_kept() -> None:
    board = Board(None, limit=3)
    for wrong in (
        dataclasses.replace(made(), device={"name": object()}),
        dataclasses.replace(made(), config={"speed": 1}),
        made(state="asleep"),
        made(steps_done="4"),
    ):
        with pytest.raises(ValueError, match="not a run of gpt2demo"):
            board.add(wrong, "ada")
    assert board.runs() == []


def test_500_runs_of_50_steps_are_listed_in_no_time(tmp_path: Path) -> None:
    board = Board(tmp_path, limit=500)
    row = board_module._row(made(steps=50), "ada", imported=False)
    board._add([row._replace(id=number, content=str(number)) for number in range(500)])

    def milliseconds(work: Callable[[], object]) -> float:
        """CPU time: what a busy machine does besides is no fault of the code."""
        times = []
        for _ in range(2):
            started = time.process_time()
            work()
            times.append(time.process_time() - started)
        return min(times) * 1000

    assert len(board.runs()) == 500
    assert milliseconds(lambda: board.runs("ada")) < 100
    assert milliseconds(lambda: board.record(7)) < 100
    assert milliseconds(lambda: Board(tmp_path, limit=500).runs()) < 1000
    assert milliseconds(board.export_json) < 2000


# --- out and in ---


@pytest.mark.parametrize("indent", [None, 1])
def test_an_export_is_strict_and_comes_back_whole(tmp_path: Path, indent: int | None) -> None:
    here, there = Board(tmp_path / "a", limit=20), Board(tmp_path / "b", limit=20)
    records = [made(1), diverged(math.nan), diverged(math.inf), failed()]
    ids = [here.add(record, "ada") for record in records]
    data = json.loads(here.export_json(), parse_constant=no_constant)
    assert data == {"gpt2demo": 1, "runs": [record.to_dict() for record in records]}
    text = json.dumps(data, indent=indent)
    assert there.import_json(text, "bob") == 4
    assert [run.imported for run in there.runs()] == [True] * 4
    back = [there.record(run.id) for run in reversed(there.runs())]
    assert [content(record) for record in back] == [content(record) for record in records]
    assert {record.device["name"] for record in back} == {"Tesla T4"}
    assert "support" not in back[0].device
    # counted, not added: here, where they were run, as there, and out of there again
    assert here.import_json(text, "ada") == there.import_json(text, "eve") == 4
    assert here.import_json(there.export_json(), "ada") == 4
    assert len(here.runs()) == len(there.runs()) == 4
    chosen = json.loads(here.export_json([ids[2], ids[0], 10**30]))["runs"]
    assert chosen == [records[0].to_dict(), records[2].to_dict()]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (json.dumps([made(1).to_dict(), made(2).to_dict()]), 2),
        (json.dumps(made(1).to_dict(), indent=1) + "\n", 1),
        ("\ufeff" + exported(made(1)), 1),
        (json.dumps({"gpt2demo": 1, "runs": [made(1).to_dict()], "saved": "today"}), 1),
        (exported(made(1), made(1)), 2),
    ],
    ids=["a list", "one run", "a byte order mark", "more beside", "one twice"],
)
def test_other_shapes_of_the_file(text: str, count: int) -> None:
    board = Board(None, limit=10)
    assert board.import_json(text, "ada") == count
    assert content(board.record(board.runs()[-1].id)) == content(made(1))


def test_an_own_text_never_arrives() -> None:
    data = made(1).to_dict()
    data["config"]["text"] = "my diary"
    del data["config"]["budget_gib"]  # of an older version
    data["device"] |= {"home": "/home/ada", "hostname": ["x"]}
    board = Board(None, limit=10)
    board.import_json(json.dumps(data), "ada")
    record = board.record(board.runs()[0].id)
    assert record.config["text"] == "own"
    assert record.config == RunConfig(**record.config).to_dict()
    assert record.device.keys() == DEVICE.keys() - {"support"}
    assert "diary" not in board.export_json()


def changed(path: str, value: object) -> str:
    """An export of two runs with one value of the second changed; ... takes it away."""
    data = json.loads(exported(made(1), failed() if path.startswith("summary.out") else made(2)))
    *above, name = ("runs.1." + path).split(".")
    place = data
    for key in above:
        place = place[int(key) if isinstance(place, list) else key]
    if value is ...:
        del place[name]
    else:
        place[int(name) if isinstance(place, list) else name] = value
    return json.dumps(data)


STEP = made(1).to_dict()["steps"][0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "the file is no text"),
        ("", "the file is no JSON (line 1, column 1)"),
        ("{\n'a': 1}", "the file is no JSON (line 2, column 1)"),
        ("[NaN]", "a number or a nesting"),
        ("[" + "9" * 5000 + "]", "a number or a nesting"),
        ("[" * 100_000, "a number or a nesting"),
        (" " * (MAX_IMPORT_CHARS + 1), "the file has 8,388,609 characters; at most 8,388,608"),
        ("[]", "the file holds no run"),
        ("{}", "neither an export nor a run"),
        ("7", "neither an export nor a run"),
        ('{"gpt2demo": 1}', "neither an export nor a run"),
        ('{"gpt2demo": 2, "runs": []}', "written by a newer version"),
        ('{"gpt2demo": true, "runs": []}', "gpt2demo must be 1, not True"),
        ("[null]", "run 1: None is no run"),
        ('{"config": {}}', "run 1: device is missing or no table"),
        (changed("steps", ...), "run 2: steps is missing or no list"),
        (changed("config.B", 0), "run 2: B must be a whole number from 1 to 256, not 0."),
        (changed("config.B", ...), "run 2: config lacks B"),
        (changed("config.lr", None), "run 2: lr must be a number"),
        (changed("config.path", "/home/ada"), "run 2: config has the unknown field 'path'"),
        (changed("config.steps", 3), "differ in how many steps ran"),
        (changed("device.type", ...), "run 2: device lacks its type"),
        (changed("device.cores", "8"), "run 2: device: cores is of type str"),
        (changed("device.cores", True), "run 2: device: cores is of type bool"),
        (changed("device.name", ["T4"]), "run 2: device: name is of type list"),
        (changed("device.name", "x" * 5000), "device: name has more than 4,000 characters"),
        (changed("device.name", "\ud800"), "run 2: device: name holds half a character"),
        (changed("steps.1", 5), "run 2: step 1 is no table"),
        (changed("steps.1.step", 5), "run 2: step 1 says that it is step 5"),
        (changed("steps.1.loss", ...), "run 2: step 1 lacks loss"),
        (changed("steps.1.loss", None), "run 2: loss is of type null"),
        (changed("steps.1.loss", "9"), "run 2: loss is of type str"),
        (changed("steps.1.loss_flag", "nan"), "step 1 has the unknown field 'loss_flag'"),
        (changed("steps.1.step_ms", -1.0), "run 2: step 1: step_ms is out of range"),
        (changed("steps.1.step_ms", 10**400), "run 2: step 1: step_ms is out of range"),
        (changed("steps.1.peak_memory_bytes", 2**60), "peak_memory_bytes is out of range"),
        (changed("steps.1.note", "x"), "run 2: step 1 has the unknown field 'note'"),
        (changed("steps", [STEP] * (MAX_IMPORT_STEPS + 1)), "it has more than 10,000 steps"),
        (changed("summary.state", "asleep"), "run 2: state 'asleep'"),
        (changed("summary.state", ...), "run 2: summary lacks state"),
        (changed("summary.steps_done", 3), "differ in how many steps ran"),
        (changed("summary.message", "x" * 4001), "summary: message has more than 4,000"),
        (changed("summary.notes", ["x"] * 101), "summary: notes has more than 100 items"),
        (changed("summary.notes", [["x"]]), "run 2: notes is no list of texts"),
        (changed("summary.mfu", "much"), "run 2: mfu is of type str"),
        (changed("summary.memory", 3), "run 2: memory is no table"),
        (changed("summary.memory.verdict", ...), "run 2: memory lacks verdict"),
        (changed("summary.out_of_memory.parts", {"x": 1.5}), "no table of whole numbers"),
        (changed("summary.out_of_memory.parts", {"x" * 4001: 1}), "more than 4,000 characters"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_nothing_is_taken(text: object, words: str) -> None:
    board = Board(None, limit=10)
    with pytest.raises(InputError) as caught:
        board.import_json(text, "ada")
    assert words.rstrip(".") in str(caught.value)
    assert str(caught.value).startswith("Nothing was imported: ")
    assert len(str(caught.value)) < 250
    assert caught.value.field == "import"
    assert not any(word in str(caught.value) for word in ("Error", "__", ROOT.name + "/"))
    assert board.runs() == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
one_run = {"config", "device", "steps", "summary"}


def taken_or_refused(board: Board, text: str) -> bool:
    """Whether the text was taken; then all that the page makes of a run must work."""
    from gpt2demo.table import forecast_errors, shown_table, table_csv

    refusal = None
    try:
        count = board.import_json(text, "ada")
    except InputError as exc:
        refusal = exc
    if refusal:
        assert refusal.field == "import"
        assert len(str(refusal)) < 300
        return False
    assert count > 0
    records = [run.record for run in board.runs()]
    shown_table(records)
    table_csv(records).encode()
    forecast_errors(records)
    assert board.record(board.runs()[0].id)
    json.loads(board.export_json(), parse_constant=no_constant)
    other = Board(None, limit=10)
    assert other.import_json(board.export_json(), "bob") == len(records)
    assert repr([run.record for run in other.runs()]) == repr(records)
    return True


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(json_values | st.dictionaries(st.sampled_from(["gpt2demo", "runs", *one_run]), json_values))
def test_any_json_is_refused_or_taken(value: object) -> None:
    taken_or_refused(Board(None, limit=10), json.dumps(value))


@settings(max_examples=50)
@given(st.text(max_size=50))
def test_any_text_is_refused(text: str) -> None:
    assert not taken_or_refused(Board(None, limit=10), text)


def places(value: object) -> Iterator[tuple[object, object]]:
    """Every table or list in the value, and every key of it."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_run_with_anything_in_any_place_is_refused_or_taken(data: st.DataObject) -> None:
    record = data.draw(st.sampled_from([made(1), diverged(math.nan), failed()]))
    run = json.loads(json.dumps(record.to_dict()))
    everywhere = list(places(run))
    place, key = everywhere[data.draw(st.integers(0, len(everywhere) - 1))]
    place[key] = data.draw(json_values)
    taken_or_refused(Board(None, limit=10), json.dumps(run))


def test_a_device_has_these_fields() -> None:
    from gpt2demo.device import DeviceInfo

    fields = {field.name: field.type for field in dataclasses.fields(DeviceInfo)}
    assert fields.keys() == DEVICE.keys() == board_import.DEVICE_FIELDS | {"support"}
    for name, kind in fields.items():
        assert (kind in (int, int | None)) == (name in board_import._DEVICE_NUMBERS)


# --- what can go wrong with the file ---


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_a_killed_process_loses_nothing_that_was_added(tmp_path: Path) -> None:
    figures = soak_kill.run(tmp_path, soak_kill.SHORT)
    assert figures.faults == []
    assert figures.kills >= 20
    assert len(figures.promised) >= 20


def test_many_threads_add_and_read(tmp_path: Path) -> None:
    board = Board(tmp_path, limit=1000)

    def work(thread: int) -> list[int]:
        ids = []
        for i in range(6):
            ids.append(board.add(made(10 * thread + i), f"owner {thread}"))
            assert set(ids) <= {run.id for run in board.runs(f"owner {thread}") if run.mine}
            assert board.record(ids[-1]) == made(10 * thread + i)
        return ids

    with ThreadPoolExecutor(10) as threads:
        ids = [run_id for found in threads.map(work, range(10)) for run_id in found]
    assert board.note is None
    assert sorted(run.id for run in board.runs()) == sorted(ids)
    assert len(set(ids)) == 60
    assert len(Board(tmp_path, limit=1000).runs()) == 60


def test_many_threads_without_a_disk() -> None:
    board = Board(None, limit=50)

    def work(thread: int) -> None:
        for i in range(20):
            board.add(made(thread * 100 + i), "ada")
            assert board.import_json(exported(made(i)), "ada") == 1
            assert len(board.runs()) <= 60  # each of the ten may be about to drop one

    with ThreadPoolExecutor(10) as threads:
        list(threads.map(work, range(10)))
    assert len(board.runs()) == 50
    assert sum(run.imported for run in board.runs()) <= 25


def saved(folder: Path) -> Path:
    """A folder with three runs; the file in it."""
    board = Board(folder, limit=10)
    for number in range(3):
        board.add(made(number, steps=40), "ada")
    assert board.note is None
    return folder / FILE_NAME


def garbage(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(10_000))


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def head_only(path: Path) -> None:
    os.truncate(path, 100)


def zeroed_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:8192] = bytes(4096)
    path.write_bytes(data)


def other_tables(path: Path) -> None:
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE runs (id INTEGER)")
        db.commit()


def newer(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 2")


DAMAGES = [garbage, truncated, head_only, zeroed_page, other_tables, newer]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("while_open", [False, True])
def test_a_damaged_file_is_moved_aside(
    tmp_path: Path, damage: Callable[[Path], None], while_open: bool
) -> None:
    path = saved(tmp_path)
    board = Board(tmp_path, limit=10)
    damage(path)
    before = path.read_bytes()
    if not while_open:
        board = Board(tmp_path, limit=10)
        assert board.runs() == []
    run_id = board.add(made(9), "ada")
    assert "moved aside and a new one started" in said(board)
    assert messages(board) == ["Finished: run 9."]
    assert (tmp_path / f"{FILE_NAME}.damaged-1").read_bytes() == before
    again = Board(tmp_path, limit=10)
    assert again.note is None
    assert again.record(run_id) == made(9)


def test_an_empty_file_is_a_new_one(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).touch()
    board = Board(tmp_path, limit=10)
    board.add(made(1), "ada")
    assert board.note is None
    assert len(Board(tmp_path, limit=10).runs()) == 1


def test_few_damaged_files_are_kept(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / FILE_NAME).write_text(f"damaged {number} " * 100)
        os.utime(tmp_path / FILE_NAME, (1e9 + number, 1e9 + number))
        said(Board(tmp_path, limit=10))
    aside = sorted(tmp_path.glob("*.damaged-*"))
    assert [path.name[-1] for path in aside] == ["1", "2", "3"]
    assert sorted(path.read_text()[:9] for path in aside) == ["damaged 3", "damaged 4", "damaged 5"]


@pytest.mark.parametrize("suffix", ["-journal", "-wal", "-shm"])
def test_what_lay_beside_a_damaged_file_is_not_the_new_ones(tmp_path: Path, suffix: str) -> None:
    path = saved(tmp_path)
    garbage(path)
    Path(f"{path}{suffix}").write_bytes(random.Random(2).randbytes(5000))
    board = Board(tmp_path, limit=10)
    board.add(made(9), "ada")
    assert not Path(f"{path}{suffix}").exists()
    assert messages(Board(tmp_path, limit=10)) == ["Finished: run 9."]


def test_flipped_bytes_break_no_board(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    chance = random.Random(5)
    for _ in range(20):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 1, 3, 100])):
            data[chance.choice([chance.randrange(100), chance.randrange(len(data))])] ^= (
                1 << chance.randrange(8)
            )
        path.write_bytes(data)
        board = Board(tmp_path, limit=10)
        run_id = board.add(made(9), "ada")
        assert run_id in {run.id for run in board.runs()}
        assert board.record(run_id) == made(9)
        for run in board.runs():
            board.record(run.id)
        json.loads(board.export_json(), parse_constant=no_constant)


def test_processes_that_find_one_damaged_file_mend_it_once(tmp_path: Path) -> None:
    garbage(saved(tmp_path))
    processes = [soak_kill.writer(tmp_path, 100 * i, count=3) for i in range(4)]
    lines = []
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        lines += out.splitlines()
    assert len(lines) == 12
    there = {run.id for run in Board(tmp_path, limit=100).runs()}
    assert there == {int(line.split()[0]) for line in lines}
    assert len(list(tmp_path.glob("*.damaged-*"))) == 1


def test_a_row_that_says_nonsense_is_left_out(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE runs SET head = CAST(x'7bff' AS TEXT) WHERE seq = 1")
        db.execute("UPDATE runs SET steps = x'00' WHERE seq = 2")
        db.execute("UPDATE runs SET head = replace(head, 'bf16', 'bf17') WHERE seq = 3")
        for added in ("noon", math.inf, -1.0):
            db.execute(
                "INSERT INTO runs (id, content, owner, imported, added, head, steps) "
                "SELECT 7, content, owner, imported, ?, head, steps FROM runs WHERE seq = 2",
                (added,),
            )
        db.commit()
    board = Board(tmp_path, limit=10)
    board.add(made(9), "ada")
    assert messages(board) == ["Finished: run 9.", "Finished: run 1."]
    assert len(json.loads(board.export_json())["runs"]) == 1  # the steps of the other are gone
    assert [board.record(run.id) is None for run in board.runs()] == [False, True]


def test_a_run_older_than_a_setting_has_its_default(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("""UPDATE runs SET head = replace(head, ', "budget_gib": null', '')""")
        db.commit()
    board = Board(tmp_path, limit=10)
    assert [run.record.config for run in board.runs()] == [made(steps=40).config] * 3
    assert board.record(board.runs()[0].id) == made(2, steps=40)
    assert json.loads(board.export_json())["runs"][0]["config"] == made(steps=40).config


def test_a_folder_that_vanishes_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    saved(folder)
    board = Board(folder, limit=10)
    shutil.rmtree(folder)
    run_id = board.add(made(9), "ada")
    assert "gone" in said(board)
    assert board.record(run_id) == made(9)
    assert board.import_json(exported(made(10)), "ada") == 1
    assert messages(board) == ["Finished: run 10.", "Finished: run 9."]
    folder.mkdir()
    board.close()
    assert board.note is None
    assert messages(Board(folder, limit=10)) == ["Finished: run 10.", "Finished: run 9."]
    assert messages(board) == ["Finished: run 10.", "Finished: run 9."]


def test_a_full_disk_that_is_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    board = Board(tmp_path, limit=10)
    connect = board_file._connect
    pages = path.stat().st_size // 4096

    def full(path: Path) -> sqlite3.Connection:
        db = connect(path)
        db.execute(f"PRAGMA max_page_count = {pages}")
        return db

    monkeypatch.setattr(board_file, "_connect", full)
    large = dataclasses.replace(made(9), device=DEVICE | {"support": "x" * 20_000})
    board.add(large, "ada")
    assert "the disk is full" in said(board)
    assert [text[-2:] for text in messages(board)] == ["9.", "2.", "1.", "0."]
    monkeypatch.undo()
    assert len(Board(tmp_path, limit=10).runs()) == 3
    board.add(made(10), "ada")
    assert board.note is None
    again = [text[-3:].strip() for text in messages(Board(tmp_path, limit=10))]
    assert again == ["10.", "9.", "2.", "1.", "0."]


def test_a_process_that_holds_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    board = Board(tmp_path, limit=10)
    monkeypatch.setattr(board_file, "_BUSY_SECONDS", 0.05)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        board.add(made(9), "ada")
        assert "another process holds" in said(board)
        assert messages(board) == ["Finished: run 9."]
        other.execute("ROLLBACK")
    board.close()
    assert board.note is None
    assert len(board.runs()) == 4


@contextlib.contextmanager
def plain_user() -> Iterator[None]:
    """No root, whom no folder is closed to."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no users of this kind on this system")
def test_a_read_only_folder() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        folder = Path(name)
        saved(folder)
        os.chmod(folder, 0o555)
        os.chmod(folder / FILE_NAME, 0o444)
        try:
            with plain_user():
                board = Board(folder, limit=10)
                assert "read-only" in said(board)
                assert len(board.runs()) == 3  # what is there is shown all the same
                board.add(made(9), "ada")
                assert len(board.runs()) == 4
                closed = Board(folder / "deeper", limit=10)
                closed.add(made(9), "ada")
                assert len(closed.runs()) == 1
                said(closed)
        finally:
            os.chmod(folder, 0o755)
        assert [path.name for path in folder.iterdir()] == [FILE_NAME]
        assert len(Board(folder, limit=10).runs()) == 3


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)
@pytest.mark.parametrize("name", [".", FILE_NAME])
def test_what_another_user_owns_is_left_alone(tmp_path: Path, name: str) -> None:
    before = saved(tmp_path).read_bytes()
    os.chown(tmp_path / name, 12345, 12345)
    board = Board(tmp_path, limit=10)
    assert "belongs to another user" in said(board)
    board.add(made(9), "ada")
    assert messages(board) == ["Finished: run 9."]
    assert (tmp_path / FILE_NAME).read_bytes() == before


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "file above", "zero byte"])
def test_what_is_no_file_is_left_alone(tmp_path: Path, kind: str) -> None:
    folder, path = tmp_path, tmp_path / FILE_NAME
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(saved(tmp_path / "elsewhere"))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "file above":
        path.write_text("")
        folder = path / "runs"
    else:
        folder = tmp_path / "a\0b"
    board = Board(folder, limit=10)
    board.add(made(9), "ada")
    said(board)
    assert messages(board) == ["Finished: run 9."]
    if kind == "link":
        assert len(Board(tmp_path / "elsewhere", limit=10).runs()) == 3


# --- where it lies ---


@pytest.mark.parametrize(
    ("platform", "environ", "folder"),
    [
        ("linux", {}, "home/.cache/gpt2demo"),
        ("linux", {"XDG_CACHE_HOME": ""}, "home/.cache/gpt2demo"),
        ("linux", {"XDG_CACHE_HOME": "not/absolute"}, "home/.cache/gpt2demo"),
        ("linux", {"XDG_CACHE_HOME": "/fast"}, "/fast/gpt2demo"),
        ("darwin", {"XDG_CACHE_HOME": "/fast"}, "home/Library/Caches/gpt2demo"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/gpt2demo"),
        ("win32", {}, "home/AppData/Local/gpt2demo"),
    ],
)
def test_the_folder_of_this_user(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    environ: dict[str, str],
    folder: str,
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert default_folder(environ, platform) == tmp_path / folder
    assert list(tmp_path.iterdir()) == []


def test_a_user_without_a_home_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert default_folder({}, "linux") is None
    assert Board(default_folder({}, "linux"), limit=1).runs() == []
