"""Tokens and batches: GPT-2's encoding, the corpora as tokens, and the lesson's data loader."""

import base64
import functools
import hashlib
import re
from array import array
from typing import Final

import tiktoken
import torch

from gpt2demo.config import CORPORA, InputError, RunConfig
from gpt2demo.corpora import FetchError, builtin_text, fetch_shakespeare, too_large
from gpt2demo.shipped import asset

EOT: Final = 50256  # <|endoftext|>, the last of GPT-2's 50,257 tokens
SHAKESPEARE_SHA256: Final = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

# 50,256 lines "base64 token, space, rank"; the same ranks as r50k_base, whose hash tiktoken expects
_RANKS: Final = asset("gpt2.tiktoken")
_RANKS_SHA256: Final = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
# GPT-2's split pattern with possessive quantifiers, as tiktoken has it: same pieces, less work
_PATTERN: Final = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# One call of the tokenizer takes this many characters, so that it returns in well under 0.2 s.
_CHUNK: Final = 2**16
# No piece of _PATTERN holds a blank after a non-blank: a text cut there has the same tokens.
_SAFE_CUT: Final = re.compile(r"(?<=\S)[ \n]")


@functools.cache
def gpt2_encoding() -> tiktoken.Encoding:
    """GPT-2's byte pair encoding from the file in `assets`: no network, no cache folder.

    tiktoken's own loader copies every file into a cache folder, and fails where that folder
    belongs to somebody else; so the file is read here.

    Raises:
        RuntimeError: the file is not the one this project ships.
    """
    contents = _RANKS.read_bytes()
    if hashlib.sha256(contents).hexdigest() != _RANKS_SHA256:
        raise RuntimeError("assets/gpt2.tiktoken is damaged: its SHA-256 is not the expected one")
    lines = (line.split() for line in contents.splitlines())
    return tiktoken.Encoding(
        "gpt2",
        pat_str=_PATTERN,
        mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in lines},
        special_tokens={"<|endoftext|>": EOT},
        explicit_n_vocab=50257,
    )


def encode(text: str) -> torch.Tensor:
    """The GPT-2 tokens of `text`: (n,) int64, each below 50257.

    "<|endoftext|>" inside the text is text, and a lone surrogate becomes U+FFFD. The text is
    encoded in chunks, cut where that changes no token. A run of more than `_CHUNK` characters
    without such a place is cut all the same: the tokenizer panics on a million blanks, and its
    tokens beside such a cut are as good as any.

    Raises:
        InputError: the tokenizer failed.
    """
    encoding = gpt2_encoding()
    pieces = [torch.empty(0, dtype=torch.int64)]
    start = 0
    while start < len(text):
        cut = _SAFE_CUT.search(text, start + _CHUNK, start + 2 * _CHUNK)
        stop = cut.start() if cut else start + 2 * _CHUNK
        try:
            tokens = encoding.encode_ordinary(text[start:stop])
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # a panic inside the tokenizer is no Exception
            raise InputError(
                "text",
                f"text could not be turned into tokens ({type(exc).__name__} near character "
                f"{start:,}). Use a text of ordinary words and lines.",
            ) from exc
        pieces.append(torch.tensor(tokens, dtype=torch.int64))
        start = stop
    return torch.cat(pieces)


def shakespeare_text() -> tuple[str, str | None]:
    """Tiny Shakespeare, 1,115,394 characters, and None.

    Where it cannot be had (no internet, another content than expected, no right to write the
    cache): the built-in text, and a sentence that says so. Takes `corpora.FETCH_SECONDS` at most.
    """
    try:
        raw = fetch_shakespeare()
        tokens = array("H", raw[: len(raw) // 2 * 2])
        # the copy on the Hub has <|endoftext|> before every speech, which the text has not
        text = gpt2_encoding().decode_bytes([token for token in tokens if token < EOT])
        if hashlib.sha256(text).hexdigest() != SHAKESPEARE_SHA256:
            raise FetchError("its content is not the expected one")
    except FetchError as exc:
        return builtin_text(), (
            f"Tiny Shakespeare could not be downloaded ({exc}); "
            "this run trains on the built-in text instead."
        )
    return text.decode(), None


def load_tokens(
    config: RunConfig, max_text_bytes: int, num_processes: int = 1
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """The tokens a run trains on, (n,) int64 with n >= num_processes*B*T + 1, and notes for the
    visitor.

    A corpus shorter than that is repeated, which a note says; an own text is refused. The tensor of
    a corpus is shared between runs: do not write to it.

    Raises:
        InputError: an own text that is empty, larger than `max_text_bytes` as UTF-8, too short, or
            that the tokenizer cannot take. Nothing of the text is quoted.
    """
    needed = num_processes * config.tokens_per_step + 1
    step = f"one step of B={config.B} T={config.T}"
    step += f" in {num_processes} processes" if num_processes > 1 else ""
    if config.text not in CORPORA:
        return _own_tokens(config, needed, step, max_text_bytes), ()
    tokens, note = _corpus_tokens(config.text)
    notes = () if note is None else (note,)
    if len(tokens) < needed:
        times = -(-needed // len(tokens))
        notes += (
            f"The text has {len(tokens):,} tokens and {step} needs {needed:,}: it is repeated "
            f"{times} times.",
        )
        tokens = tokens.repeat(times)
    return tokens, notes


_corpus_cache: dict[str, torch.Tensor] = {}


def _corpus_tokens(name: str) -> tuple[torch.Tensor, str | None]:
    if name not in _corpus_cache:
        text, note = (builtin_text(), None) if name == "builtin" else shakespeare_text()
        if note is not None:  # not kept: the next run tries again
            return _corpus_tokens("builtin")[0], note
        _corpus_cache[name] = encode(text)
    return _corpus_cache[name], None


def _own_tokens(config: RunConfig, needed: int, step: str, max_text_bytes: int) -> torch.Tensor:
    text = config.text
    if not text or text.isspace():
        found = f"only {len(text):,} blank characters" if text else "0 characters"
        raise InputError(
            "text",
            f"text is empty ({found}): {step} needs at least {needed:,} tokens.",
        )
    # in slices: a refused text must not cost its size once more
    size = sum(
        len(text[i : i + _CHUNK].encode("utf-8", "surrogatepass"))
        for i in range(0, len(text), _CHUNK)
    )
    if size > max_text_bytes:
        raise too_large("text", size, max_text_bytes)
    tokens = encode(text)
    if len(tokens) < needed:
        raise InputError(
            "text",
            f"text has {len(tokens):,} tokens; {step} needs at least {needed:,} (B*T + 1). Use a "
            "longer text, or lower B or T.",
        )
    return tokens


class DataLoaderLite:
    """Cuts batches from one row of tokens, one after the other, and starts over at its end.

    Of several processes each takes its own: process 0 the first batch, process 1 the second, and
    together they advance by `num_processes` batches a step. `tokens` is (n,) int64 with
    n >= num_processes*B*T + 1.

    Raises:
        ValueError: too few tokens for one batch of every process.
    """

    def __init__(
        self, tokens: torch.Tensor, B: int, T: int, process_rank: int = 0, num_processes: int = 1
    ) -> None:
        needed = num_processes * B * T + 1
        if len(tokens) < needed:
            raise ValueError(f"{len(tokens):,} tokens, but B*T + 1 = {needed:,} are needed")
        self.B = B
        self.T = T
        self.process_rank = process_rank
        self.num_processes = num_processes
        self.tokens = tokens
        self.current_position = 0  # of process 0's batch

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs x and targets y, both (B, T) int64 views of `tokens`."""
        B, T = self.B, self.T
        mine = self.current_position + B * T * self.process_rank
        # +1: the last input has a target too, the token that follows the batch
        buf = self.tokens[mine : mine + B * T + 1]
        x = buf[:-1].view(B, T)  # inputs
        y = buf[1:].view(B, T)  # targets: the same tokens, one place on
        step = B * T * self.num_processes
        self.current_position += step
        # start over, all processes at once, when the next batches would run out of tokens
        if self.current_position + step + 1 > len(self.tokens):
            self.current_position = 0
        return x, y
