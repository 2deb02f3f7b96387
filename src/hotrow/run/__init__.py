"""One TOML file becomes a run: build, train, save, resume.

Knows configuration, data sources and folders of runs. Does not know screens.
"""
