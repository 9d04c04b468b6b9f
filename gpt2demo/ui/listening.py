"""How the page's events are listened to: gradio's options, by what an event is for.

What all pages ask for at once, at a run's start and end, answers with plain values where it can:
for every `gr.update`, an empty one too, gradio builds the component anew and describes it three
times over, milliseconds each that a full room waits for.
"""

from typing import Any, Final

# what the page itself calls is no endpoint for scripts
PRIVATE: Final[dict[str, Any]] = {
    "api_visibility": "private",
    "show_progress": "hidden",
    "concurrency_limit": None,
}
# an answer that waits for nothing
AT_ONCE: Final[dict[str, Any]] = PRIVATE | {"queue": False}
# What shows a state must show the last one: gradio else drops an event that comes while the answer
# to the one before is on its way.
SHOWING: Final[dict[str, Any]] = AT_ONCE | {"trigger_mode": "always_last"}
# Two in a row are two: of events with data of their own "always_last" would bring the first's.
EACH: Final[dict[str, Any]] = AT_ONCE | {"trigger_mode": "multiple"}
