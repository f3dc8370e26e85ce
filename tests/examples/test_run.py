"""What the examples share."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from examples.run import folder_of, sizes_of


def test_a_mesh_is_read_or_refused_in_words(tmp_path: Path) -> None:
    read = sizes_of("replica", "shard")
    assert read("shard=-1") == {"replica": 1, "shard": -1}
    assert read("shard=2,replica=3") == {"replica": 3, "shard": 2}
    for text in ("shard", "shard=x", "tensor=2", "shard=2=3", ""):
        with pytest.raises(ArgumentTypeError, match="axes are replica, shard, as in replica=2,shard=2; got"):
            read(text)
    assert folder_of(str(tmp_path)) == tmp_path
    with pytest.raises(ArgumentTypeError, match=r"there is no folder .*nowhere"):
        folder_of(str(tmp_path / "nowhere"))
