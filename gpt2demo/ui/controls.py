"""The narrow column: device panel, what to run, Run and Stop."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import gradio as gr

from gpt2demo import tracking
from gpt2demo.config import (
    MAX_B,
    MAX_SEED,
    MODELS,
    VOCAB_SIZES,
    InputError,
    RunConfig,
    default_sizes,
)
from gpt2demo.corpora import read_upload
from gpt2demo.hub import Hub
from gpt2demo.precision import PRECISION

_MODEL_NAMES: Final = {
    "gpt2": "GPT-2 124M",
    "gpt2-medium": "GPT-2 medium, 355M",
    "gpt2-large": "GPT-2 large, 774M",
    "gpt2-xl": "GPT-2 xl, 1.6B",
    "tiny": "tiny 3.4M",
}
_TEXTS: Final = [
    ("Built-in: the Python reference", "builtin"),
    ("Tiny Shakespeare", "shakespeare"),
    ("Your own", "own"),
]
# what the memory forecast depends on, in the order in which handlers get it
MEMORY_FIELDS: Final = (
    *("model", "precision", "B", "T", "steps", "attention", "optimizer", "compile"),
    *("vocab_size", "budget_gib"),
)
# the settings of a run; the last two are its own text
FIELDS: Final = (*MEMORY_FIELDS, "lr", "seed", "text", "pasted", "upload")


@dataclass(kw_only=True)
class Controls:
    """The column's components; those of a run's settings carry the settings' names."""

    device: gr.HTML
    note: gr.HTML
    memory_bar: gr.HTML
    run: gr.Button
    stop: gr.Button
    model: gr.Dropdown
    precision: gr.Dropdown
    B: gr.Slider
    T: gr.Slider
    steps: gr.Slider
    attention: gr.Radio
    optimizer: gr.Radio
    compile: gr.Checkbox
    vocab_size: gr.Radio
    lr: gr.Number
    seed: gr.Number
    text: gr.Radio
    own: gr.Group
    pasted: gr.Textbox
    upload: gr.File
    track: gr.Checkbox

    def named(self, names: Sequence[str], **others: Any) -> list[Any]:
        """The components of these settings, in order; `others` lie elsewhere on the page."""
        known = {f.name: getattr(self, f.name) for f in fields(self)} | others
        return [known[name] for name in names]


def settings_of(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """The controls' values by name, as RunConfig takes them: a budget of 0 is none."""
    settings = dict(zip(names, values, strict=True))
    return settings | {"budget_gib": settings["budget_gib"] or None}


def step_config(values: Sequence[Any]) -> RunConfig:
    """What the forecasts are of: a run of these controls, `values` in the order of MEMORY_FIELDS.

    Raises:
        InputError: a value is refused, as an empty field is while somebody types.
    """
    return RunConfig(**settings_of(MEMORY_FIELDS, values))


def config_of(values: Sequence[Any], max_text_mib: int) -> RunConfig:
    """The run that the controls ask for, `values` in the order of FIELDS.

    Raises:
        InputError: a value, or the own text, is refused.
    """
    settings = settings_of(FIELDS, values)
    pasted, upload = settings.pop("pasted"), settings.pop("upload")
    if settings["text"] == "own":
        settings["text"] = _uploaded(upload, max_text_mib) if upload else pasted or ""
    return RunConfig(**settings)


def _uploaded(path: Any, max_text_mib: int) -> str:
    if isinstance(path, str) and not Path(path).exists():
        raise InputError(
            "text",
            "The text file is gone: an upload is deleted once a run has read it, or half an hour "
            "later. Upload it again.",
        )
    return read_upload(path, max_text_mib * 2**20)


def own_upload(values: Sequence[Any]) -> str | None:
    """The uploaded file that `config_of` reads for these values, if it reads one."""
    settings = settings_of(FIELDS, values)
    return settings["upload"] or None if settings["text"] == "own" else None


def controls(hub: Hub, device_html: str, note_html: str) -> Controls:
    """Build the column's components in the Blocks that is open."""
    info, settings = hub.device_info, hub.settings
    sizes = default_sizes(info.type)
    plain = RunConfig()
    device = gr.HTML(device_html, elem_id="device", apply_default_css=False)
    with gr.Row(elem_classes="tight"):
        model = gr.Dropdown(
            [(_MODEL_NAMES[name], name) for name in MODELS],
            value=plain.model,
            label="Model",
            elem_id="model",
            min_width=150,
        )
        precision = gr.Dropdown(
            [(_choice(info.support[p].status, PRECISION[p].name), p) for p in PRECISION],
            value=plain.precision,
            label="Precision",
            elem_id="precision",
            min_width=150,
        )
    note = gr.HTML(note_html, elem_id="note", apply_default_css=False)
    B = gr.Slider(1, MAX_B, sizes["B"], step=1, label="B: sequences a step", elem_id="B")
    T = gr.Slider(8, 1024, sizes["T"], step=8, label="T: tokens a sequence", elem_id="T")
    steps = gr.Slider(1, settings.max_steps, sizes["steps"], step=1, label="Steps", elem_id="steps")
    memory_bar = gr.HTML(elem_id="memory", apply_default_css=False)
    with gr.Row(elem_classes="tight"):
        run = gr.Button("Run", variant="primary", elem_id="run", min_width=120)
        stop = gr.Button("Stop", variant="stop", elem_id="stop", interactive=False, min_width=120)
    with gr.Accordion("More", open=False, elem_id="more"):
        attention = gr.Radio(
            [("manual, as the lesson", "manual"), ("SDPA, one kernel", "sdpa")],
            value=plain.attention,
            label="Attention",
            elem_id="attention",
        )
        optimizer = gr.Radio(
            [("default", "default"), ("fused", "fused")],
            value=plain.optimizer,
            label="AdamW",
            elem_id="optimizer",
        )
        vocab_size = gr.Radio(
            [(f"{size:,}", size) for size in VOCAB_SIZES],
            value=plain.vocab_size,
            label="Vocabulary",
            elem_id="vocab_size",
        )
        compile_ = gr.Checkbox(False, label="torch.compile", elem_id="compile")
        lr = gr.Number(plain.lr, label="Learning rate", elem_id="lr")
        seed = gr.Number(
            plain.seed,
            label="Seed",
            precision=0,
            minimum=0,
            maximum=MAX_SEED,
            elem_id="seed",
        )
        text = gr.Radio(_TEXTS, value=plain.text, label="Text", elem_id="text")
        track = gr.Checkbox(
            False,
            label=f"Log this run to trackio here, project {tracking.PAGE_PROJECT}",
            visible=tracking.is_usable(),
            elem_id="track",
        )
        with gr.Group(visible=False) as own:
            pasted = gr.Textbox(label="Paste a text", lines=4, max_lines=8, elem_id="pasted")
            upload = gr.File(
                label=f"or upload one (up to {settings.max_text_mib} MiB; deleted when read)",
                type="filepath",
                height=110,
                elem_id="upload",
            )
    return Controls(
        device=device,
        note=note,
        memory_bar=memory_bar,
        run=run,
        stop=stop,
        model=model,
        precision=precision,
        B=B,
        T=T,
        steps=steps,
        attention=attention,
        optimizer=optimizer,
        compile=compile_,
        vocab_size=vocab_size,
        lr=lr,
        seed=seed,
        text=text,
        own=own,
        pasted=pasted,
        upload=upload,
        track=track,
    )


def _choice(status: str, name: str) -> str:
    """A precision in the dropdown; says so where this device has nothing special for it."""
    return name if status in ("native", "unknown") else f"{name} ({status} here)"
