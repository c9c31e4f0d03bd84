"""How Sphinx builds the site: `make docs`. It reads files and imports the package, and needs no network."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

import elbowroom  # noqa: E402

project = "Elbowroom"
release = version = elbowroom.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["**/_*"]

html_theme = "furo"
html_title = "Elbowroom"
html_show_copyright = False
html_show_sphinx = False
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

default_role = "code"  # our docstrings quote code with single backticks
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
napoleon_use_ivar = True
napoleon_use_rtype = False


def mark_code(app, what, name, obj, options, lines):
    """Write the indented examples and the stars of a docstring as reStructuredText has them."""
    marked = []
    for line in lines:
        before = marked[-1] if marked else ""
        if line.startswith("    ") and not before and len(marked) > 1 and re.match(r"\S.*[^:]$|\S+ .*:$", marked[-2]):
            marked += ["::", ""]
        marked.append(re.sub(r"^( +\S.*?, )(\*\*\w+:)", r"\1\\\2", line))
    lines[:] = marked


def lead_to_pages(app, docname, source):
    """Let links to files of the repository lead to the pages that include these, and list the strategies."""
    for name, page in {"README": "overview", "CONTRIBUTING": "contributing", "CHANGELOG": "changelog"}.items():
        source[0] = re.sub(rf"\]\(((?:\.\./)*)\.\./{name}\.md", rf"](\1{page}.md", source[0])
    if docname == "strategies/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"


def setup(app):
    """Register what this file adds."""
    app.connect("autodoc-process-docstring", mark_code, priority=400)  # before napoleon
    app.connect("source-read", lead_to_pages)
