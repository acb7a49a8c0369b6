"""The weights in a checkpoint's files, found by parameter and read in pieces, in whichever form the run kept them."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from torchround.checkpoint.manifest import STATE_FILE, read_manifest
from torchround.engine.store.bundles import RESIDUAL, WEIGHTS
from torchround.hf.tensor_folder import HFError, StoredTensor, TensorFiles, read_header
from torchround.optim.split_weights import join


@dataclass(frozen=True)
class StoredSplitWeight(StoredTensor):
    """An fp32 weight whose upper and lower halves are two tensors of a checkpoint. It reads like a tensor of type F32.

    `begin` counts bytes of the fp32 weight, so a part of it is a copy with another `begin`.
    """

    upper: StoredTensor
    residual: StoredTensor

    def read_by(self, files: TensorFiles, start: int, nbytes: int) -> Tensor:
        """Return uint8 `[nbytes]` of the fp32 weight from byte `start` on. Both are multiples of 4."""
        start, nbytes = (self.begin + start) // 2, nbytes // 2
        # The next read overwrites what this one returned.
        upper = files.read(self.upper, start, nbytes).clone()
        residual = files.read(self.residual, start, nbytes)
        return join(upper.view(torch.bfloat16), residual.view(torch.int16)).view(torch.uint8)


def checkpoint_weights(checkpoint: Path) -> dict[str, StoredTensor]:
    """Find the authoritative weights (fp32 if trained) in the checkpoint's files, by parameter name.

    Raises `HFError` for a weight of a type that is not read or a residual that fits no weight, and `CheckpointError`.
    """
    found: dict[str, StoredTensor] = {}
    residuals: dict[str, StoredTensor] = {}
    # By the manifest: a file that it does not list has not been verified, and may be a link to another model.
    for file in sorted(read_manifest(checkpoint).files.keys() - {STATE_FILE}):
        for name, tensor in read_header(checkpoint / file).items():
            kind, _, parameter = name.partition("/")
            if kind == WEIGHTS:
                if tensor.dtype is None:
                    raise HFError(
                        f"{checkpoint}: {parameter} is of a type that is not read: {tensor.dtype_name}"
                    )
                found[parameter] = tensor
            elif kind == RESIDUAL:
                residuals[parameter] = tensor
    for parameter, residual in residuals.items():
        upper = found.get(parameter)
        if upper is None or (upper.shape, upper.dtype, residual.dtype) != (
            residual.shape,
            torch.bfloat16,
            torch.int16,
        ):
            raise HFError(f"{checkpoint}: {residual.name} fits no weight")
        whole = replace(upper, dtype_name="F32", begin=0, nbytes=2 * upper.nbytes)
        found[parameter] = StoredSplitWeight(**vars(whole), upper=upper, residual=residual)
    return found
