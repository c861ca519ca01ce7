"""Settings of Sphinx for the site of these pages; the sources are read where they lie, so that links work there too."""

project = "Farandole"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/programs/*.md", "docs/*.svg", "roles/*/README.md", "molecule/README.md"]
include_patterns += ["files/patches/*/README.md"]
# Links to the clone itself lead round in circles.
exclude_patterns = [".*", "CHANGELOG.md", "collections", "playbooks"]
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "description": "A cluster that trains with Horovod, and proves it"}
html_copy_source = False
html_show_copyright = False
myst_heading_anchors = 3
