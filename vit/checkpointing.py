"""The checkpoint of a training as a file that is replaced as a whole."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from tracker.common.files import write_atomic
from tracker.common.text import first_line


class AtomicCheckpoints(TorchCheckpointIO):
    """Write checkpoints beside the file that they replace, and rename them.

    Lightning's own writes them in the directory of temporary files. From another file system, moving them is a copy, which a kill
    can leave incomplete, and the earlier checkpoint is lost.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint completely or not at all."""
        content = io.BytesIO()
        torch.save(checkpoint, content)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(path), content.getbuffer())

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            ValueError: if it is damaged.
        """
        try:
            return super().load_checkpoint(path, *arguments, **options)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{path} can't be read ({first_line(error)}); remove it, and the same command trains from the beginning"
            ) from error
