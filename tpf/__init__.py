"""Train AlphaFold3-style structure models: fast, stable, reproducible."""

__version__ = "0.1.0"
