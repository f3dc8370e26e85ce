"""torchrun starts processes again, and its store may outlive them: what those that died left there is not met again."""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

import torch.distributed as dist

_HERE, _LIFE = "shardfn/here/{}", "shardfn/life/{}"
PAUSE = 0.01  # seconds between two looks of rank 0, at first; at most twenty times as long


def agents_store() -> bool:
    """Whether the store is torchrun's own, and not one that rank 0 serves."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_this_life(store: Any, rank: int, size: int) -> Any:
    """What only the processes of this life read and write, in a store that earlier ones may have used.

    torchrun's own number of restarts would not do: each host counts those that its own processes caused, so that hosts
    which go on together have different ones. Instead every process says a name that nobody had before, and rank 0
    answers to each of them. What is left of one that has died is answered, too, and nobody reads it.

    Raises:
        RuntimeError: a rank did not come within the store's timeout.
    """
    me = uuid.uuid4().hex
    if rank == 0:
        _answer(store, me, size)
        life = me
    else:
        store.set(_HERE.format(rank), me)
        life = store.get(_LIFE.format(me)).decode()
        store.add(_LIFE.format(life), 1)
    return dist.PrefixStore(f"life {life}", store)  # type: ignore[attr-defined]


def _answer(store: Any, life: str, size: int) -> None:
    end, pause, answered = time.monotonic() + store.timeout.total_seconds(), PAUSE, set()
    while store.add(_LIFE.format(life), 0) < size - 1:
        for other in range(1, size):
            if store.check([_HERE.format(other)]) and (name := store.get(_HERE.format(other))) not in answered:
                store.set(_LIFE.format(name.decode()), life)
                answered.add(name)
        if time.monotonic() > end:
            raise RuntimeError(f"of {size} ranks only {len(answered) + 1} came within {store.timeout}")
        time.sleep(pause)
        pause = min(2 * pause, 20 * PAUSE)
