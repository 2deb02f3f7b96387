"""Models to train. Ordinary modules: each takes its embedding as an argument."""

from torch import nn

from hotrow.models.dcnv2 import DCNv2
from hotrow.models.deepfm import DeepFM
from hotrow.models.dlrm import DLRM
from hotrow.models.tbsm import TBSM

# By the names that run files give them.
MODELS: dict[str, type[nn.Module]] = {
    "dlrm": DLRM,
    "dcnv2": DCNv2,
    "deepfm": DeepFM,
    "tbsm": TBSM,
}

__all__ = ["DLRM", "MODELS", "TBSM", "DCNv2", "DeepFM"]
