# Sphinx turns these pages into HTML: ninja -C build docs. A warning, such as one of a link that leads nowhere, fails
# the test. The pages stay plain Markdown; the tree that Sphinx sees is laid out by tests/docs/stage.py.
project = "glm52"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["README.md", "docs/**.md"]
myst_heading_anchors = 4
highlight_language = "text"
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "sidebar_width": "240px", "fixed_sidebar": True}
html_show_sphinx = False
html_copy_source = False
