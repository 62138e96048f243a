"""Rarefy inside other libraries: each module imports its library, so import only what is installed."""
