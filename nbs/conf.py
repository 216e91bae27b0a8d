"""Sphinx's settings for the site. ``python nbs/build.py`` builds it."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]  # the package beside this folder, and the extensions

import learnerkit  # noqa: E402

project = "learnerkit"
author = "the learnerkit contributors"
project_copyright = "the learnerkit contributors"
version = release = learnerkit.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
extensions += ["errors", "descriptions", "reference", "search"]  # those in _ext
smartquotes_action = "D"  # dashes; quotes in a docstring stay those of code
exclude_patterns = ["_build", "_ext", "**/.ipynb_checkpoints", "reference/examples.md"]

# Pages

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebooks are stored with their outputs; a test runs them
nb_merge_streams = True
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # by default scripts from another host
copybutton_exclude = ".linenos, .gp, .go"  # line numbers, prompts, what a session prints
copybutton_selector = ", ".join(
    f"div.highlight-{language} pre" for language in ("python", "ipython3", "sh", "json", "toml", "yaml")
)  # not what is printed

# The reference, from docstrings

default_role = "name"  # `Learner` is a link, and everything else in single backticks is code; see _ext/reference.py
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # what a class only overrides is documented with its base
autodoc_preserve_defaults = True
autoclass_content = "both"  # the types of a constructor go to its arguments, in the docstring of the class
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True
napoleon_use_rtype = False

# Looks

html_theme = "furo"
html_title = "learnerkit"
html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_search_summary = False  # _ext/search.py has excerpts that need no server
html_theme_options = {"top_of_page_buttons": []}
pygments_dark_style = "a11y-high-contrast-dark"  # as the theme's light one: contrasts of at least 7, nothing underlined
