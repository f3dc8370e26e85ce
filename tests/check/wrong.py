"""All wrong programs of the gallery, by name."""

from tests.check.gallery import beside, doubled, forgotten, matrices, means, pvary
from tests.check.gallery.setting import GALLERY, Wrong

__all__ = ["GALLERY", "Wrong", "beside", "doubled", "forgotten", "matrices", "means", "pvary"]
