"""The finished runs as files: routes of the server and the links to them.

The files are made when they are asked for, so that nothing is written to a disk.
"""

from collections.abc import Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpt2demo.hub import Hub
from gpt2demo.records import RunRecord
from gpt2demo.table import records_json, table_csv

# below /gradio_api, the one prefix that every front end of gradio passes on
_CSV: Final = "/gradio_api/gpt2demo-runs.csv"
_JSON: Final = "/gradio_api/gpt2demo-runs.json"
_BOARD: Final = "/gradio_api/gpt2demo-board.json"

LINKS: Final = (
    '<p class="downloads">Download the table: '
    f'<a href=".{_CSV}" download>CSV</a> '
    f'<a href=".{_JSON}" download>JSON with every step</a></p>'
)
BOARD_LINK: Final = (
    '<p class="downloads">Export the board: '
    f'<a href=".{_BOARD}" download>JSON with every step</a></p>'
)
# behind a proxy the page lives under a prefix that only gradio's own settings know
LINKS_SCRIPT: Final = """
const root = (window.gradio_config && window.gradio_config.root) || "";
for (const link of element.querySelectorAll("a")) {
  link.href = root + link.getAttribute("href").slice(1);
}
"""


def download_routes(hub: Hub) -> list[Route]:
    """The routes for `launch(app_kwargs={"routes": ...})`."""

    def records() -> Sequence[RunRecord]:
        return [run.record() for run in list(hub.finished)]

    def csv(_: Request) -> Response:
        return _file(table_csv(records()), "text/csv; charset=utf-8", "gpt2demo-runs.csv")

    def json(_: Request) -> Response:
        return _file(records_json(records()), "application/json", "gpt2demo-runs.json")

    def board(_: Request) -> Response:
        return _file(hub.board.export_json(), "application/json", "gpt2demo-board.json")

    return [Route(_CSV, csv), Route(_JSON, json), Route(_BOARD, board)]


def _file(text: str, media_type: str, name: str) -> Response:
    headers = {
        "Content-Disposition": f'attachment; filename="{name}"',
        "Cache-Control": "no-store",
    }
    return Response(text, media_type=media_type, headers=headers)
