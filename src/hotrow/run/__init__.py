"""A run described by one TOML file: its settings, and the parts built from them."""
