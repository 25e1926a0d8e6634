"""The small DeepSeek-V3-architecture byte language model that the package ships.

Only paths are resolved here: importing this package loads neither torch nor transformers.
"""

from importlib.resources import files
from pathlib import Path

__all__ = ["model_dir"]


def model_dir() -> Path:
    """Return the folder of the embedded model, fit for ``AutoModelForCausalLM.from_pretrained``.

    The folder holds ``config.json``, ``generation_config.json``, ``model.safetensors`` (bf16) and a model card.
    Wheels are installed unpacked, so the folder is an ordinary one on disk.
    """
    return Path(str(files(__name__).joinpath("byte_lm")))
