"""Sphinx configuration. ``make docs`` builds the pages into build/docs."""

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

project = "hotrec"
author = "the hotrec authors"
try:
    release = metadata.version("hotrec")
except metadata.PackageNotFoundError:  # a checkout that is on PYTHONPATH and not installed
    release = ""

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "configuration_reference",
    "figures_reference",
    "notebook",
]
exclude_patterns = ["_ext"]
html_theme = "furo"
html_title = "hotrec"
html_static_path = ["_static"]
html_css_files = ["hotrec.css"]
html_show_sphinx = False
html_show_copyright = False

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3
# Command lines may end in a comment or go on after a backslash; the copy button takes them whole.
copybutton_line_continuation_character = "\\"
highlight_language = "console"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def setup(app: Sphinx) -> None:
    """Register with Sphinx."""
    app.connect("autodoc-process-signature", show_factories)


def show_factories(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Write a dataclass's default factory as ``...``, since Sphinx cannot parse ``<factory>``."""
    return signature and (signature.replace("<factory>", "..."), returns)
