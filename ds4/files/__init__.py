"""Model files: GGUF and safetensors, parsed by ds4 itself with every length checked (DESIGN section 7).

with open_checkpoint("model.gguf") as checkpoint:
    checkpoint.architecture, checkpoint.metadata, checkpoint.tensors["token_embd.weight"].shape
"""

from ds4.files.base import Tensor
from ds4.files.checkpoint import Checkpoint, open_checkpoint, open_config

__all__ = ["Checkpoint", "Tensor", "open_checkpoint", "open_config"]
