"""The configurations of other systems, as the lines of shardfn that do the same.

Imports nothing: it reads text and makes text.
"""

from shardfn.translate.draft import Row, Translation
from shardfn.translate.translating import translate
from shardfn.translate.values import TranslateError

__all__ = ["Row", "TranslateError", "Translation", "translate"]
