"""A worker's own layers, taken from the whole model, the rest of which is dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pd_format.layers.chain import build_chain
from pd_format.layers.factory import build_model
from pd_format.layers.stage import StageModule
from pd_format.layers.task import Classification, classes_of, get_task, label_shape_of
from pd_format.layers.values import map_tensors
from pd_format.plan import Plan
from pd_format.versions import StageVersions, sets_needed
from pd_train.coverage import stage_ranges
from pd_train.initial import find_weights, load_weights

__all__ = ["BuiltStage", "build_stage", "made_up"]


@dataclass(frozen=True)
class BuiltStage:
    """One stage's module, and what must be remembered of the model that it came from."""

    module: StageModule
    parameters: list[nn.Parameter]
    """The trainable ones, contiguous, in a fixed order."""
    fingerprint: str
    """Of the whole model."""
    names: dict[int, str]
    """The model's own name of each of the stage's tensors, by the tensor's id."""
    state_names: dict[str, str]
    """Every key of the model's state dict, and the name of its tensor."""
    unused: dict[str, Tensor]
    """Tensors of the model that no layer uses; they stay as they were made."""
    classes: int | None
    """That the model tells apart; None where the loss is the user's own."""
    label_shape: tuple[int, ...]
    """Of one sample's labels; empty where it has one."""
    output: object
    """The structure of what the whole model returns in training, with tensors without data."""

    def naive_set(self, versions: StageVersions) -> list[nn.Parameter]:
        """Set 0 for naive pipelining, whose graphs all share the module's own parameters.

        Where one set is enough it shares their memory, so that updates reach the graphs at once, but not their version
        counter, by which autograd would notice.
        """
        one = sets_needed(versions) == 1
        return [nn.Parameter(own.data if one else own.data.clone()) for own in self.parameters]

    def held(self) -> set[str]:
        """The names of the stage's parameters and buffers."""
        return {self.names[id(each)] for each in [*self.module.parameters(), *self.module.buffers()]}

    def load(self, state: Mapping[str, Tensor], sets: Sequence[Sequence[Tensor]]) -> None:
        """Write over all that the stage holds.

        Args:
            state: tensors by their names, all of `held` and any of the unused ones.
            sets: of its trainable parameters.
        """
        with torch.no_grad():
            for tensor in [*self.module.parameters(), *self.module.buffers()]:
                tensor.copy_(state[self.names[id(tensor)]])
            for held in sets:
                for own, tensor in zip(self.parameters, held, strict=True):
                    tensor.copy_(state[self.names[id(own)]])
        self.unused.update({name: state[name].clone() for name in self.unused.keys() & state.keys()})

    def state(self, newest: Sequence[Tensor]) -> dict[str, Tensor]:
        """The stage's tensors by their names, with these as its trainable parameters."""
        # The module points to whichever set ran last, so what trains is told apart by name.
        state = {self.names[id(own)]: value for own, value in zip(self.parameters, newest, strict=True)}
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            if id(tensor) in self.names:
                state.setdefault(self.names[id(tensor)], tensor)
        return {name: tensor.detach().cpu() for name, tensor in state.items()}


def build_stage(plan: Plan, index: int, seed: int, device: torch.device, init_from: str | None = None) -> BuiltStage:
    """Build the plan's model as any worker builds it, and keep one stage.

    Args:
        plan: of the run.
        index: of the stage.
        seed: of the run.
        device: that the stage computes on.
        init_from: see `pd_train.initial.find_weights`; None for the weights that the model is built with.

    Raises:
        UserError: the model cannot be built, is not the plan's, or the weights to start from do not fit it.
    """
    weights = None if init_from is None else find_weights(init_from, plan.model.factory)
    torch.manual_seed(seed)
    model = build_model(plan.model.factory, plan.model.kwargs)
    chain = build_chain(model, plan.inputs)
    module = chain.stage(*stage_ranges(plan, chain)[index])
    used = {name for layer in chain.layers for name in (*layer.parameters, *layer.buffers)}
    unused = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if chain.state_names.get(name) == name and name not in used
    }
    if weights is not None:
        kept = {id(tensor) for tensor in [*module.parameters(), *module.buffers(), *unused.values()]}
        load_weights(weights, model, chain.state_names, kept)
    # As any training loop begins: a model's own `train` may leave parts in evaluation mode.
    module = module.to(device).train()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.data = parameter.data.contiguous()
    names = {
        id(tensor): chain.state_names.get(name, name)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    classifies = isinstance(get_task(plan.task), Classification)
    return BuiltStage(
        module=module,
        parameters=parameters,
        fingerprint=chain.fingerprint,
        names=names,
        state_names=chain.state_names,
        unused={name: tensor.detach().clone() for name, tensor in unused.items()},
        classes=classes_of(chain.output) if classifies else None,
        label_shape=label_shape_of(chain.output) if classifies else (),
        output=chain.output,
    )


def made_up(output: object) -> object:
    """An output of this structure with random numbers, for whoever wants to look at the form of one."""

    def fill(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor.dtype)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    return map_tensors(fill, output)
