"""All wrong programs of the gallery, by name."""

from tests.check.gallery import beside, doubled, forgotten, matrices, means, pvary, reduced
from tests.check.gallery.setting import GALLERY, Wrong

__all__ = ["GALLERY", "TYPED", "Wrong", "beside", "doubled", "forgotten", "matrices", "means", "pvary", "reduced"]

TYPED = {name: case for name, case in GALLERY.items() if case.program.__module__ != reduced.__name__}
"""Those of which types may tell, and of which there is a program in JAX."""
