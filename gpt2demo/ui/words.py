"""Plain words as HTML; whatever they come from is escaped."""

from collections.abc import Mapping, Sequence
from html import escape


def said(text: str) -> str:
    """One sentence, read aloud when it changes."""
    return f'<p class="said" aria-live="polite">{escape(text)}</p>'


def word_list(words: Mapping[str, str]) -> str:
    """A list of names and what is to be said of each."""
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in words.items()
    )
    return f'<dl class="words">{rows}</dl>'


def paragraphs(texts: Sequence[str]) -> str:
    """Each text as a paragraph of its own."""
    return "".join(f'<p class="told">{escape(text)}</p>' for text in texts)
