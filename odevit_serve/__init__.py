"""Vision Transformers as ODEs, served so that every image gets just the depth it needs."""

__version__ = "0.1.0"
