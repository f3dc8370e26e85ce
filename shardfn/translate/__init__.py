"""The configurations of other systems, as the lines of shardfn that do the same.

Imports nothing: it reads text and makes text.
"""

from shardfn.translate.facts import Row, TranslateError, Translation
from shardfn.translate.translating import translate

__all__ = ["Row", "TranslateError", "Translation", "translate"]
