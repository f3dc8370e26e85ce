"""All wrong programs of the gallery, by name."""

from tests.check.gallery import beside, doubled, forgotten, matrices, means, orders, pvary, reduced, several, stages
from tests.check.gallery.setting import GALLERY, Wrong

__all__ = [
    "GALLERY",
    "TYPED",
    "Wrong",
    "beside",
    "doubled",
    "forgotten",
    "matrices",
    "means",
    "orders",
    "pvary",
    "reduced",
    "several",
    "stages",
]

MEANT = (orders.__name__, reduced.__name__, several.__name__, stages.__name__)
TYPED = {name: case for name, case in GALLERY.items() if case.program.__module__ not in MEANT}
"""Those of which types may tell, and of which there is a program in JAX."""
