"""Collectives: the differentiable functions, the ops under them, and transfers into given buffers.

Imports `check`, `mesh` and `compat`.
"""

from shardfn.collectives.functional import local_slice, ragged_all_to_all
from shardfn.collectives.into_buffers import transports
from shardfn.collectives.ledger import Ledger, Record, ledger
from shardfn.collectives.redistribute import redistribute
from shardfn.mesh.grid import AxisName

__all__ = [
    "AxisName",
    "Ledger",
    "Record",
    "ledger",
    "local_slice",
    "ragged_all_to_all",
    "redistribute",
    "transports",
]
