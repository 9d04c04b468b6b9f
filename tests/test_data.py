import functools
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import regex
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2demo import corpora, data
from gpt2demo.config import InputError, RunConfig
from gpt2demo.corpora import builtin_text, decode_upload, read_upload
from gpt2demo.data import DataLoaderLite, encode, gpt2_encoding, load_tokens, shakespeare_text

ROOT = Path(__file__).resolve().parent.parent
SHAKESPEARE = (
    Path(os.environ.get("GPT2DEMO_TEST_DATA", ROOT.parent / "shared" / "data"))
    / "tiny_shakespeare.txt"
)
needs_shakespeare = pytest.mark.skipif(
    not SHAKESPEARE.is_file(),
    reason="no tiny_shakespeare.txt in the folder that GPT2DEMO_TEST_DATA names",
)
MIB = 2**20
SHORT = RunConfig(B=1, T=1)


@functools.cache
def unsplit_builtin() -> list[int]:
    return gpt2_encoding().encode_ordinary(builtin_text())


# --- the encoding ---


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [15496, 995]),
        ("hello world", [31373, 995]),
        (" the", [262]),
        ("\n", [198]),
        ("\n\n", [628]),
        ("!", [0]),
        ("", []),
    ],
)
def test_known_gpt2_ids(text, ids):
    tokens = encode(text)
    assert tokens.dtype == torch.int64
    assert tokens.shape == (len(ids),)
    assert tokens.tolist() == ids


def test_endoftext_in_a_text_is_text():
    tokens = encode("<|endoftext|>" * 50)
    assert 50256 not in tokens
    assert len(tokens) > 100
    assert gpt2_encoding().decode(tokens.tolist()) == "<|endoftext|>" * 50


@functools.cache
def ranks() -> dict[bytes, int]:
    encoding = gpt2_encoding()
    return {encoding.decode_single_token_bytes(i): i for i in range(50256)}


def slow_bpe(text: str) -> list[int]:
    """GPT-2's published split pattern, and byte pair merging by the book."""
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ids = []
    for piece in regex.findall(pattern, text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while len(parts) > 1:
            pairs = [ranks().get(a + b, 1 << 30) for a, b in itertools.pairwise(parts)]
            best = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[best] == 1 << 30:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        ids += [ranks()[part] for part in parts]
    return ids


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=80) | st.text(alphabet="ab'st \n\t\r\u00a01.,é", max_size=80))
def test_encode_agrees_with_a_plain_bpe_and_decodes_back(text):
    tokens = encode(text).tolist()
    assert tokens == slow_bpe(text)
    assert gpt2_encoding().decode(tokens) == text
    assert all(0 <= token < 50257 for token in tokens)


def test_lone_surrogate_becomes_the_replacement_character():
    tokens = encode("a\ud800b").tolist()
    assert gpt2_encoding().decode(tokens) == "a\ufffdb"


def test_encoding_needs_no_network_and_no_cache_folder(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise AssertionError("network")

    blocked = tmp_path / "a file where the cache folder should be"
    blocked.write_bytes(b"")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(blocked))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(socket, "socket", refuse)
    encoding = gpt2_encoding.__wrapped__()
    assert encoding.n_vocab == 50257
    assert encoding.name == "gpt2"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_damaged_rank_file_is_not_used(monkeypatch, tmp_path):
    lines = (ROOT / "assets" / "gpt2.tiktoken").read_bytes().splitlines(keepends=True)
    assert len(lines) == 50256
    lines[300], lines[301] = lines[301], lines[300]
    (tmp_path / "ranks").write_bytes(b"".join(lines))
    monkeypatch.setattr(data, "_RANKS", tmp_path / "ranks")
    with pytest.raises(RuntimeError, match="damaged"):
        gpt2_encoding.__wrapped__()


# --- long texts ---


def test_a_long_text_has_the_tokens_of_the_unsplit_text(monkeypatch):
    text = builtin_text()
    assert len(text) > 3 * data._CHUNK
    assert encode(text).tolist() == unsplit_builtin()


WORDS = st.sampled_from(
    ["a", "the", "don't", "we'll", "x1", "12", "é", "中文", "...", "('s')", "😀"]
)
BLANKS = st.sampled_from([" ", "  ", "\n", "\n\n", " \n", "\n ", " \t", "   "])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(WORDS, BLANKS), max_size=60))
def test_cuts_change_no_token(pairs):
    text = "".join(word + blank for word, blank in pairs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "_CHUNK", 24)  # room for a cut in every window of 24
        got = encode(text).tolist()
    assert got == gpt2_encoding().encode_ordinary(text)


@pytest.mark.parametrize("offset", range(24))
def test_no_cut_inside_a_run_of_blanks(monkeypatch, offset):
    text = "x" * offset + "\n\n b \n\n\n c" * 30
    whole = gpt2_encoding().encode_ordinary(text)
    assert 628 in whole  # "\n\n" is one token, but two where it is cut
    monkeypatch.setattr(data, "_CHUNK", 24)
    assert encode(text).tolist() == whole


class Recorder:
    """An encoding that writes down what it is given."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.lengths: list[int] = []
        self.error = error

    def encode_ordinary(self, text: str) -> list[int]:
        self.lengths.append(len(text))
        if self.error is not None and len(self.lengths) > 1:
            raise self.error
        return [0] * len(text)


@pytest.mark.parametrize("text", [" " * 1_200_000 + "x", "a" * 900_000 + " b", "a b" * 400_000])
def test_the_tokenizer_never_gets_more_than_two_chunks(monkeypatch, text):
    recorder = Recorder()
    monkeypatch.setattr(data, "gpt2_encoding", lambda: recorder)
    assert len(encode(text)) == len(text)
    assert sum(recorder.lengths) == len(text)
    assert max(recorder.lengths) <= 2 * data._CHUNK == 2**17


@pytest.mark.parametrize("text", [" " * 1_200_000 + "x", "a" * 500_000, "中" * 300_000])
def test_unbroken_runs_are_encoded_in_seconds_without_a_panic(text, capfd):
    t0 = time.perf_counter()
    tokens, notes = load_tokens(RunConfig(text=text), 16 * MIB)
    assert time.perf_counter() - t0 < 5  # about 0.2 s on two cores
    assert notes == ()
    assert gpt2_encoding().decode(tokens.tolist()) == text
    assert capfd.readouterr() == ("", "")


class Panic(BaseException):
    """As pyo3's PanicException: not an Exception."""


def test_a_tokenizer_that_panics_is_a_refusal_in_words(monkeypatch):
    monkeypatch.setattr(data, "gpt2_encoding", lambda: Recorder(Panic("at src/lib.rs:1:2")))
    with pytest.raises(InputError, match=r"could not be turned into tokens \(Panic") as caught:
        encode("word " * 100_000)
    assert caught.value.field == "text"
    assert "lib.rs" not in str(caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes_through(monkeypatch, error):
    monkeypatch.setattr(data, "gpt2_encoding", lambda: Recorder(error()))
    with pytest.raises(error):
        encode("word " * 100_000)


# --- uploads ---


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("Grüße, 世界\n".encode(), "Grüße, 世界\n"),
        (b"\xef\xbb\xbfabc", "abc"),
        (b"\xff\xfeh\x00i\x00", "hi"),
        (b"\xfe\xff\x00h\x00i", "hi"),
        ("\ufeff😀".encode("utf-16-le"), "😀"),
        (b"a\r\nb\rc\n", "a\nb\rc\n"),
        (b"", ""),
        (b"e\xcc\x81 \x0c\xe2\x80\xa8", "e\u0301 \x0c\u2028"),  # nothing else is normalised
    ],
)
def test_uploads_that_are_text(raw, text):
    assert decode_upload(raw) == text


PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(range(256))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (PNG, "is a PNG image"),
        (b"\xff\xd8\xff\xe0\x00\x10JFIF", "is a JPEG image"),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "is a PDF document"),
        (b"PK\x03\x04\x14\x00", "ZIP archive or an Office document"),
        (
            "Grüße".encode("cp1252"),
            "not valid UTF-8: byte 0xFC at position 2; perhaps Windows-1252",
        ),
        (b"\xef\xbb\xbfab\xe9 ", "byte 0xE9 at position 5;"),
        (b"abc\x00def", "zero byte at position 3"),
        ("hi".encode("utf-16-le"), "without its byte order mark"),
        (b"\xff\xfeh\x00i", "not valid UTF-16"),
        (b"\xff\xfe\x00\xd8a\x00", "not valid UTF-16"),
        (b"\xff\xfeh\x00\x00\x00", "zero characters"),
        ("hi".encode("utf-32"), "UTF-32"),
    ],
)
def test_uploads_that_are_not(raw, words):
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        decode_upload(raw)
    assert caught.value.field == "text"
    assert "Save it as plain text in UTF-8" in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.binary(max_size=20).map(lambda b: b"\xff\xfe" + b))
def test_any_bytes_are_decoded_or_refused(raw):
    try:
        text = decode_upload(raw)
    except InputError:
        return
    text.encode()  # no lone surrogates
    assert "\0" not in text


def test_a_300_mb_upload_is_refused_unread(tmp_path):
    path = tmp_path / "secret-folder.txt"
    with path.open("wb") as file:
        file.truncate(300_000_000)  # sparse
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as caught:
            read_upload(path, 16 * MIB)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MIB
    message = str(caught.value)
    assert "286.1 MiB (300,000,000 bytes)" in message
    assert "at most 16.0 MiB (16,777,216 bytes)" in message
    assert "secret" not in message


def test_the_limit_of_an_upload_is_exact(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 100)
    assert read_upload(path, 100) == "x" * 100
    with pytest.raises(InputError, match=r"\(100 bytes\); at most .* \(99 bytes\)"):
        read_upload(str(path), 99)


def test_an_endless_file_is_read_up_to_the_limit():
    with pytest.raises(InputError, match=r"at least .*\(1,001 bytes\)"):
        read_upload("/dev/zero", 1000)


@pytest.mark.parametrize("name", ["missing.txt", "folder", "a\0b"])
def test_an_unreadable_upload_is_refused_without_its_path(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot be read") as caught:
        read_upload(str(tmp_path / name), MIB)
    assert str(tmp_path) not in str(caught.value)


# --- the tokens of a run ---


def test_builtin_tokens():
    tokens, notes = load_tokens(RunConfig(), MIB)
    assert notes == ()
    assert tokens.tolist() == unsplit_builtin()
    assert len(tokens) > 100_000
    assert load_tokens(RunConfig(precision="bf16"), MIB)[0] is tokens  # encoded once


def test_a_corpus_shorter_than_one_step_is_repeated_and_says_so():
    config = RunConfig(B=256, T=1024)
    tokens, notes = load_tokens(config, MIB)
    n = len(unsplit_builtin())
    assert n < 256 * 1024 + 1 <= len(tokens)
    assert len(tokens) % n == 0
    assert torch.equal(tokens[:n], tokens[n : 2 * n])
    assert len(notes) == 1
    assert f"{n:,} tokens" in notes[0]
    assert "262,145" in notes[0]
    x, y = DataLoaderLite(tokens, 256, 1024).next_batch()
    assert x.shape == y.shape == (256, 1024)


@pytest.mark.parametrize("text", ["", " ", "\n\t \u3000\n" * 100])
def test_an_empty_own_text_is_refused(text):
    with pytest.raises(InputError, match=r"text is empty.*at least 129 tokens") as caught:
        load_tokens(RunConfig(text=text), MIB)
    assert caught.value.field == "text"


def test_an_own_text_needs_one_token_more_than_a_step():
    config = {"B": 2, "T": 8}
    with pytest.raises(InputError, match=r"has 16 tokens.*at least 17 "):
        load_tokens(RunConfig(text=" the" * 16, **config), MIB)
    tokens, notes = load_tokens(RunConfig(text=" the" * 17, **config), MIB)
    assert tokens.tolist() == [262] * 17
    assert notes == ()


@pytest.mark.parametrize("letter", ["x", "é", "中", "😀"])
def test_the_size_of_an_own_text_is_counted_in_utf8_bytes(letter):
    text = letter * 100
    size = len(text.encode())
    load_tokens(RunConfig(B=1, T=1, text=text), size)
    with pytest.raises(InputError, match=rf"\({size} bytes\); at most .*\({size - 1} bytes\)"):
        load_tokens(RunConfig(B=1, T=1, text=text), size - 1)


def test_a_300_mb_own_text_is_refused_without_a_copy():
    text = "word " * 60_000_000
    config = RunConfig(text=text)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"286\.1 MiB"):
            load_tokens(config, 16 * MIB)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MIB


def test_a_refusal_does_not_quote_an_own_text():
    for text in ("hunter2", "hunter2 " * 10_000):
        with pytest.raises(InputError) as caught:
            load_tokens(RunConfig(text=text), 1000)
        assert "hunter2" not in str(caught.value)


def test_own_texts_are_not_kept():
    load_tokens(RunConfig(B=1, T=1, text="a text of my own"), MIB)
    assert set(data._corpus_cache) <= {"builtin", "shakespeare"}


# --- batches ---


@settings(max_examples=150, deadline=None)
@given(B=st.integers(1, 5), T=st.integers(1, 7), extra=st.integers(0, 80))
def test_batches_follow_each_other_and_wrap(B, T, extra):
    n = B * T + 1 + extra
    row = np.random.default_rng(n).integers(0, 50257, n)
    loader = DataLoaderLite(torch.from_numpy(row), B, T)
    whole = (n - 1) // (B * T)  # batches before the row runs out
    for k in range(2 * whole + 1):
        x, y = loader.next_batch()
        at = (k % whole) * B * T
        assert x.dtype == y.dtype == torch.int64
        np.testing.assert_array_equal(x.numpy(), row[at : at + B * T].reshape(B, T))
        np.testing.assert_array_equal(y.numpy(), row[at + 1 : at + B * T + 1].reshape(B, T))


def test_a_loader_refuses_a_row_too_short_for_one_batch():
    DataLoaderLite(torch.arange(13), 3, 4)
    with pytest.raises(ValueError, match=r"12 tokens.* 13 "):
        DataLoaderLite(torch.arange(12), 3, 4)


# --- Tiny Shakespeare ---


@needs_shakespeare
def test_shakespeare_has_the_known_number_of_tokens():
    text = SHAKESPEARE.read_text(encoding="utf-8")
    tokens = encode(text)
    assert len(tokens) == 338_025
    assert tokens.tolist() == gpt2_encoding().encode_ordinary(text)


def llmc_files(text: str) -> dict[str, bytes]:
    """The two files as llm.c's dev/data/tinyshakespeare.py writes them."""
    marked = "<|endoftext|>" + text.replace("\n\n", "\n\n<|endoftext|>")
    tokens = gpt2_encoding().encode(marked, allowed_special={"<|endoftext|>"})
    cut = min(32_768, len(tokens) // 2)
    files = {}
    for name, part in (("val", tokens[:cut]), ("train", tokens[cut:])):
        header = struct.pack("<256i", 20240520, 1, len(part), *[0] * 253)
        files[f"tiny_shakespeare_{name}.bin"] = header + np.array(part, "<u2").tobytes()
    return files


class Hub:
    """A stand-in for the Hugging Face Hub that serves `files` of one repository."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                hub.asked.append(self.path)
                prefix = "/datasets/karpathy/llmc-starter-pack/resolve/main/"
                body = hub.files.get(self.path.removeprefix(prefix))
                self.send_response(404 if body is None else 200)
                body = body or b""
                self.send_header("X-Repo-Commit", "0" * 40)
                self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_GET = do_HEAD

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    for name in [
        name for name in os.environ if name.startswith(("HF_", "HUGGING", "TRANSFORMERS"))
    ]:
        monkeypatch.delenv(name)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    hub = Hub()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(data, "_corpus_cache", {})
    yield hub
    hub.close()


def assert_fell_back(note_words: str, seconds: float) -> None:
    t0 = time.perf_counter()
    text, note = shakespeare_text()
    assert time.perf_counter() - t0 < seconds
    assert text == builtin_text()
    assert note is not None
    assert note.startswith("Tiny Shakespeare could not be downloaded (")
    assert note_words in note
    assert "built-in text" in note


@needs_shakespeare
def test_shakespeare_is_fetched_once_checked_and_cached(hub, monkeypatch):
    text = SHAKESPEARE.read_text(encoding="utf-8")
    hub.files = llmc_files(text)
    # the sizes that llm.c's script prints for its two files
    assert [len(file) for file in hub.files.values()] == [1024 + 2 * 32_768, 1024 + 2 * 305_260]
    assert shakespeare_text() == (text, None)
    assert len(hub.asked) >= 2
    hub.asked.clear()
    tokens, notes = load_tokens(RunConfig(text="shakespeare", B=256, T=1024), MIB)
    assert (len(tokens), notes) == (338_025, ())
    assert hub.asked == []  # from the cache on disk
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert shakespeare_text() == (text, None)
    shutil.rmtree(os.environ["HF_HOME"])
    assert load_tokens(RunConfig(text="shakespeare"), MIB)[0] is tokens  # from this process


def test_the_markers_of_the_hubs_copy_are_taken_out(hub, monkeypatch):
    text = "First Citizen:\nSpeak, <|endoftext|> speak.\n\nAll:\nResolved.\n\n\nÉnd.\n"
    text = text.replace("<|endoftext|>", "")
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", hashlib.sha256(text.encode()).hexdigest())
    hub.files = llmc_files(text)
    assert shakespeare_text() == (text, None)


@pytest.mark.parametrize(
    "broken",
    [
        llmc_files("Some other text.\n\nNot Shakespeare.\n" * 30),
        dict.fromkeys(corpora.HUB_FILES, b"\xff" * 4099),
        dict.fromkeys(corpora.HUB_FILES, b""),
    ],
    ids=["other text", "noise", "empty"],
)
def test_another_content_falls_back(hub, broken):
    hub.files = broken
    assert_fell_back("not the expected one", seconds=8)


def test_a_file_of_another_size_is_not_downloaded(hub):
    hub.files = dict.fromkeys(corpora.HUB_FILES, b"x" * (corpora.HUB_MAX_BYTES + 1))
    assert_fell_back("FileTooLarge", seconds=8)
    assert len(hub.asked) == 1


def test_a_missing_file_falls_back(hub):
    assert_fell_back("HTTPError", seconds=8)


def test_no_internet_falls_back_in_seconds_and_the_run_says_so(hub, monkeypatch):
    hub.close()  # connection refused
    t0 = time.perf_counter()
    tokens, notes = load_tokens(RunConfig(text="shakespeare"), MIB)
    assert time.perf_counter() - t0 < 8
    assert tokens.tolist() == unsplit_builtin()
    assert len(notes) == 1
    assert "(ConnectError)" in notes[0]
    assert "shakespeare" not in data._corpus_cache  # the next run tries again


def test_a_hub_that_never_answers_is_left_in_time(hub, monkeypatch):
    monkeypatch.setattr(corpora, "FETCH_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert_fell_back("not done within 1 s", seconds=4)


def test_offline_mode_asks_nobody(hub, monkeypatch):
    hub.files = llmc_files("a\n\nb")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_fell_back("Offline", seconds=8)
    assert hub.asked == []


def test_an_unwritable_cache_falls_back(hub, monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file" / "cache"))  # not even for root
    hub.files = llmc_files("a\n\nb")
    assert_fell_back("Error", seconds=8)


def test_no_python_to_start_falls_back(hub, monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    assert_fell_back("", seconds=8)


# --- importing ---


def test_importing_loads_no_tokens_and_no_hub():
    code = (
        "import json, sys, gpt2demo.data as d; "
        "print(json.dumps([d.gpt2_encoding.cache_info().currsize, "
        "'huggingface_hub' in sys.modules, 'pydoc_data.topics' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert json.load(io.BytesIO(done.stdout)) == [0, False, False]
