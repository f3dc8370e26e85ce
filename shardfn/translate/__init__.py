"""Translates the configurations of other systems into the lines of shardfn that do the same.

It imports only `local_paths` and `quoting`: it reads text and writes text.
"""

from shardfn.translate.draft import Row, Translation
from shardfn.translate.translating import translate
from shardfn.translate.values import TranslateError

__all__ = ["Row", "TranslateError", "Translation", "translate"]
