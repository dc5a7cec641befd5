"""The pages of docs/ and the reference of the docstrings as HTML: `make docs`, where every warning is an error."""

from sphinx.application import Sphinx

project = "fsdp_compile"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = project

default_role = "code"  # docstrings write `names` as the pages do
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
maximum_signature_line_length = 100


def setup(app: Sphinx) -> None:
    """The first page is README.md; pages link to that file, for it is what they lie beside in the repository."""

    def read(app: Sphinx, page: str, source: list[str]) -> None:
        source[0] = source[0].replace("](../README.md", "](index.md")

    app.connect("source-read", read)
