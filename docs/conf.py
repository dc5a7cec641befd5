"""The pages of docs/ and the reference of the docstrings as HTML: `make docs`, where every warning is an error."""

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
