"""Trained models and checkpoints on disk. Knows modules and collections; no runs."""

from hotrow.checkpoint.loading import Checkpoint, Loaded, load_checkpoint
from hotrow.checkpoint.model import SavedModel, load_model, save_model
from hotrow.checkpoint.saving import Save, begin_checkpoint, save_checkpoint

__all__ = [
    "Checkpoint",
    "Loaded",
    "Save",
    "SavedModel",
    "begin_checkpoint",
    "load_checkpoint",
    "load_model",
    "save_checkpoint",
    "save_model",
]
