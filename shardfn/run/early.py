"""What follows a run that ended early: in the same program nothing but that run."""

from __future__ import annotations

import os
from pathlib import Path

from shardfn.mesh.groups import world_of_thread, worlds
from shardfn.run.interrupts import unheard

KEY = "run that ended early"  # in what a world has agreed on


def ended(save: Path | None, why: str) -> None:
    """A run with this folder has ended."""
    agreed, mine = world_of_thread().agreed, _whole(save)
    if why != "finished":
        agreed[KEY] = mine, why
    elif agreed.get(KEY, (None, ""))[0] == mine:
        agreed.pop(KEY, None)


def refuse(save: Path | None) -> None:
    """Raises RuntimeError for a run that would keep what it makes of the state that another one has left half trained.

    The one that ended may go on, and so may one that keeps nothing.
    """
    folder, why = world_of_thread().agreed.get(KEY, (None, ""))
    if why and save is not None and _whole(save) != folder:
        raise RuntimeError(
            f"sf.run.loop: the run before this one{f', in {folder},' if folder else ''} has ended early "
            f"(run.ended == {why!r}), and save={str(save)!r} is another run, which would begin from a state that is "
            f"half trained and keep it: end the program where run.ended is not 'finished', and start it again, or let "
            f"the first run finish before"
        )


def forget() -> None:
    """No run has ended early, or was asked to, as in a program that has just begun."""
    unheard.clear()
    for world in worlds():
        world.agreed.pop(KEY, None)


def _whole(save: Path | None) -> str | None:
    return None if save is None else os.path.abspath(save)
