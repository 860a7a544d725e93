"""The web page, and (in `embed/`) the exported file inside other applications."""
