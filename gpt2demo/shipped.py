"""Files that come with the code: beside the package in a checkout, inside it once installed."""

from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(__file__).resolve().parent


def asset(name: str) -> Path:
    """The file of that name in `assets`."""
    return _shipped("assets", _PACKAGE.parent / "assets") / name


def app_file() -> Path:
    """`app.py`, which serves the page."""
    return _shipped("start", _PACKAGE.parent) / "app.py"


def _shipped(inside: str, beside: Path) -> Path:
    """The folder that pyproject.toml packs as `gpt2demo.<inside>`, or what it is packed from."""
    installed = _PACKAGE / inside
    return installed if installed.is_dir() else beside
