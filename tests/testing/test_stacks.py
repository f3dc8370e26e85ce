"""From a stack to the one line that matters."""

import threading
from pathlib import Path

import pytest
import torch

import shardfn
from shardfn.testing import stacks
from shardfn.testing.stacks import Frame

TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(shardfn.__file__).parent)

ALL_REDUCE = Frame(f"{TORCH}/distributed/distributed_c10d.py", 10, "all_reduce")
WRAPPER = Frame(f"{TORCH}/distributed/c10d_logger.py", 20, "wrapper")
MODULE = Frame(f"{TORCH}/nn/modules/module.py", 30, "_call_impl")
CORE = Frame(f"{OURS}/transport.py", 40, "start")
TEST = Frame("/somewhere/test_x.py", 50, "body")
WAIT = Frame(threading.__file__, 60, "wait")
OTHER = Frame("/venv/lib/python3/site-packages/optree/ops.py", 70, "tree_map")


@pytest.mark.parametrize(
    ("frames", "line"),
    [
        ([], "outside the function"),
        ([TEST], "at test_x.py:50 (body)"),
        ([ALL_REDUCE, WRAPPER, TEST], "in all_reduce, called at test_x.py:50 (body)"),
        ([WAIT, ALL_REDUCE, WRAPPER, TEST], "in all_reduce, called at test_x.py:50 (body)"),
        ([WAIT, MODULE, TEST], "at test_x.py:50 (body)"),
        ([ALL_REDUCE, CORE, TEST], "in all_reduce, called at transport.py:40 (start), from test_x.py:50 (body)"),
        ([CORE, OTHER, TEST], "at transport.py:40 (start), from test_x.py:50 (body)"),
        ([WAIT, OTHER, TEST], "at test_x.py:50 (body)"),
        ([ALL_REDUCE, CORE], "in all_reduce, called at transport.py:40 (start)"),
        ([WAIT], "at threading.py:60 (wait)"),
    ],
)
def test_where_a_rank_stands(frames, line):
    assert stacks.where(frames) == line


RECORD = """main thread 0x00007f0000000001
Thread 0x00007f0000000002 (most recent call first):
  File "/a/helper.py", line 1 in helper

Current thread 0x00007f0000000001 (most recent call first):
  File "/a/test_x.py", line 7 in inner
  File "/a/test_x.py", line ??? in outer
"""


def test_the_main_thread_is_found_in_a_record():
    frames, text = stacks.parse_stacks(RECORD)
    assert frames == [Frame("/a/test_x.py", 7, "inner"), Frame("/a/test_x.py", 0, "outer")]
    assert text.index("inner") < text.index("helper")


def test_a_record_of_nothing_is_nothing():
    assert stacks.parse_stacks("") == ([], "")
    assert stacks.parse_stacks("main thread 0x00007f0000000001\n") == ([], "")
