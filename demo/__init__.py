"""The web page, and (in `embed/`) the exported file inside other applications."""

import os

# Read when gradio is imported: no word to anyone about who runs it, and no update check.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
