"""Models to train. Ordinary modules: each takes its embedding as an argument."""

from hotrow.models.dlrm import DLRM

__all__ = ["DLRM"]
