"""Trained models on disk. Knows modules and collections; nothing of runs or data."""

from hotrow.checkpoint.model import SavedModel, load_model, save_model

__all__ = ["SavedModel", "load_model", "save_model"]
