"""Random numbers in the code of a data set: a function of the seed and the row, on whichever process reads it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import get_worker_info


def seed_all(seed: int) -> None:
    """Seeds the generators of Python, numpy, and torch on the CPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def lent_generators() -> Iterator[None]:
    """What the block does to these generators is undone; a worker has them for itself."""
    if get_worker_info() is not None:
        yield
        return
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])
