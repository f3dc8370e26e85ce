"""Paths of this machine's file systems, told apart from the URLs of stores, which would name folders such as `s3:`."""

from __future__ import annotations

import os
import re
from pathlib import Path

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+::?)+/")  # pathlib makes one slash of two


def local_path(path: str | os.PathLike[str], argument: str) -> Path:
    """The path, which must be one of a file system.

    Args:
        path: what a user gave.
        argument: its function and name, such as `"checkpoint.save: path"`.

    Raises:
        ValueError: it is a URL.
    """
    if _URL.match(str(path)):
        raise ValueError(
            f"{argument} must be a local path, got {str(path)!r:.200}. Copy the files from or to a local folder, "
            f"or mount the store as one"
        )
    return Path(path)
