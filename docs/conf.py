import re
from importlib.metadata import version as installed_version
from typing import Any

from sphinx.application import Sphinx

project = "shardfn"
author = "The shardfn authors"
copyright = author
release = version = installed_version("shardfn")

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser", "sphinx_design"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "shardfn"

default_role = "literal"  # docstrings quote code in single backticks, as Markdown does

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_use_rtype = False  # types come from annotations, so a colon after "Returns:" is only a colon

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3


def show_indented_blocks_as_code(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """In a docstring too, an indented block after a blank line is code, as in Markdown; so is a `Spec:`."""
    text = "\n".join(lines)
    text = re.sub(r"^Spec:\n(?=    )", "Spec::\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^(\S.*[^:\n]:?)\n\n+(?=    )", r"\1\n\n::\n\n", text, flags=re.MULTILINE)
    lines[:] = text.split("\n")


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", show_indented_blocks_as_code, priority=400)  # before napoleon
