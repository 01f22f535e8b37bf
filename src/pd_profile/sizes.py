"""What autograd keeps of each layer's forward pass for the backward pass (design, section 1: `stash_bytes`).

A pipeline holds this once for each minibatch in flight, so it decides how deep a stage can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pd_format.errors import UserError
from pd_format.layers.chain import Chain
from pd_format.layers.values import storage_key
from pd_profile.steps import Scope, untouched

__all__ = ["out_of_memory", "stash_of"]


def stash_of(
    model: nn.Module, chain: Chain, inputs: Sequence[Tensor], scope: Scope = nullcontext
) -> tuple[list[int], Any]:
    """Bytes that autograd saves, a layer, and the model's output.

    Distinct storages count, each whole and at the first layer that saves it; parameters and buffers, which are
    there anyway, do not; an input of the model does, and so do the copies that autocast (`scope`) makes of parameters,
    since each minibatch in flight has its own. It is one forward pass in the model's own mode, which leaves no hook
    behind and the model's buffers as they were.

    Raises:
        UserError: the model does not run on these inputs, or the device has too little memory.
    """
    own = {storage_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
    # Held until the end, so that no key is used twice.
    saved: dict[int, Tensor] = {}
    sizes = [0] * len(chain.layers)
    layer = 0

    def pack(tensor: Tensor) -> Tensor:
        # A saved result of a layer must not hold its own graph: that would be a cycle that nobody frees.
        bare = tensor.detach()
        key = storage_key(bare)
        if key not in own and key not in saved:
            saved[key] = bare
            sizes[min(layer, len(sizes) - 1)] += bare.untyped_storage().nbytes()
        return bare

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with untouched(model), hooks, scope():
        walk = chain.walk(inputs)
        try:
            while True:
                layer = next(walk)[0] + 1
        except StopIteration as stop:
            return sizes, stop.value
        except UserError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            raise UserError(_failure(chain, layer, inputs, error)) from error


def out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the host, ran out of memory."""
    return isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def _failure(chain: Chain, layer: int, inputs: Sequence[Tensor], error: Exception) -> str:
    shapes = " and ".join("x".join(map(str, tensor.shape)) for tensor in inputs)
    place = f"in layer {layer} ({chain.layers[layer].name})" if layer < len(chain.layers) else "after its last layer"
    return (
        f"The model fails {place} on input of shape {shapes}: {str(error).strip() or type(error).__name__}\n"
        "Check the shape of a sample (--input-shape) and --minibatch-size."
    )
