"""Tries every classification model of the installed torchvision and records the outcome for `pd-profile --list-models`.

Each model is built with random weights, traced, and cut in the middle. The two stages run one after the other, as two
workers would; outputs in training and in evaluation, all gradients and all buffers are compared with those of the whole
model. The images are the smallest that the model itself takes.

    python benchmarks/try_models.py                 what the record lacks; may be stopped and started again
    python benchmarks/try_models.py --again vit_b_16 swin_t    these once more
    python benchmarks/try_models.py --again         all once more

On two cores it takes some minutes. The largest models need 12 GB of memory.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Iterator

import torch
import torchvision
from torch import Tensor, nn

from pd_format.errors import UserError
from pd_format.jsonfile import read_record, write_record
from pd_format.layers.chain import Chain, build_chain
from pd_format.layers.factory import build_model
from pd_format.layers.values import map_tensors, tensors_in
from pd_format.profile import InputSpec
from pd_profile.tried import FORMAT, RECORD, VERSION, TriedModel, TriedModels

MINIBATCH = 2
PIXELS = (64, 128, 224, 299)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="also what the record has")
    parser.add_argument("names", nargs="*", help="of models; default: all")
    options = parser.parse_args()
    names = torchvision.models.list_models(module=torchvision.models)
    done = {} if options.again and not options.names else _recorded()
    for name in options.names or names:
        if name in done and not options.again:
            continue
        start = time.monotonic()
        done[name] = tried = try_model(name)
        record = TriedModels(
            torch=torch.__version__,
            torchvision=torchvision.__version__,
            minibatch_size=MINIBATCH,
            models=tuple(done[each] for each in names if each in done),
        )
        write_record(RECORD, record)
        size = "x".join(map(str, tried.input_shape))
        print(f"{name:<20} {tried.result:<12} {size:<10} {tried.layers:>4} layers  {time.monotonic() - start:5.1f} s")
        if tried.reason:
            print(f"    {tried.reason}")
        gc.collect()


def _recorded() -> dict[str, TriedModel]:
    """What is known of the installed versions."""
    if not RECORD.exists():
        return {}
    record = read_record(RECORD, TriedModels, FORMAT, VERSION)
    same = (record.torch, record.torchvision) == (torch.__version__, torchvision.__version__)
    return {model.name: model for model in record.models} if same else {}


def try_model(name: str) -> TriedModel:
    """Build, trace, cut and compare one model."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Torchvision announces changes of its own defaults.
        model = build_model(f"torchvision.models:{name}", {})
    shape = _smallest_shape(model)
    try:
        chain = build_chain(model, [InputSpec(name="x", shape=(MINIBATCH, *shape), dtype="float32")])
    except UserError as error:
        return TriedModel(name=name, input_shape=shape, layers=0, cut=None, result="fails", reason=str(error))
    count = len(chain.layers)
    cut = min((layer for layer in range(count - 1) if chain.cuts[layer]), key=lambda layer: abs(layer - count // 2))
    try:
        compare(model, chain, cut, torch.randn(MINIBATCH, *shape))
    except AssertionError as error:
        result, reason = "fails", str(error)
    except torch.OutOfMemoryError as error:
        result, reason = "traced only", f"too little memory here: {error}"
    else:
        result, reason = "passes", None
    return TriedModel(
        name=name, input_shape=shape, layers=count, cut=chain.layers[cut].name, result=result, reason=reason
    )


def _smallest_shape(model: nn.Module) -> tuple[int, ...]:
    for pixels in PIXELS:
        try:
            with torch.no_grad():
                kept = [buffer.clone() for buffer in model.buffers()]
                model.train()(torch.zeros(MINIBATCH, 3, pixels, pixels))
                for buffer, value in zip(model.buffers(), kept, strict=True):
                    buffer.copy_(value)
        except (RuntimeError, ValueError, AssertionError):
            continue
        return 3, pixels, pixels
    raise RuntimeError(f"{type(model).__name__} takes none of {PIXELS} pixels")


def compare(model: nn.Module, chain: Chain, cut: int, images: Tensor) -> None:
    """Compare the two stages at a cut with the whole.

    Raises:
        AssertionError: naming what differs.
    """
    start = [buffer.clone() for buffer in model.buffers()]
    torch.manual_seed(1)
    output = model.train()(images)
    _loss(output).backward()
    expected = [each.detach() for each in tensors_in(output)]
    # Taken, not copied: the largest models fill a small machine's memory.
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        judged = [each.clone() for each in tensors_in(model.eval()(images))]
    for buffer, value in zip(model.buffers(), start, strict=True):
        buffer.copy_(value)
    del output

    first, second = chain.stage(0, cut).train(), chain.stage(cut + 1, len(chain.layers) - 1).train()
    torch.manual_seed(1)
    sent = first(images)
    received = map_tensors(lambda each: each.detach().clone().requires_grad_(each.requires_grad), sent)
    (output,) = second(*received)
    _equal(expected, list(tensors_in(output)), "outputs in training")
    _loss(output).backward()
    pairs = [(one, two.grad) for one, two in zip(tensors_in(sent), tensors_in(received), strict=True)]
    pairs = [(one, gradient) for one, gradient in pairs if one.requires_grad and gradient is not None]
    if pairs:
        torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
    for name, parameter in model.named_parameters():
        whole, split = gradients.pop(name), parameter.grad
        assert (whole is None) == (split is None), f"only one of whole and stages gives {name} a gradient"
        if whole is not None and split is not None:
            _equal([whole], [split], f"gradients of {name}")
        parameter.grad = None
    _equal(buffers, list(model.buffers()), "buffers")
    with torch.no_grad():
        (output,) = second.eval()(*first.eval()(images))
    _equal(judged, list(tensors_in(output)), "outputs in evaluation")


def _loss(output: object) -> Tensor:
    return sum(_weighted(output), torch.zeros(()))


def _weighted(output: object) -> Iterator[Tensor]:
    for each in tensors_in(output):
        yield (each * torch.linspace(-1, 1, each.numel()).view(each.shape)).sum()


def _equal(expected: list[Tensor], found: list[Tensor], what: str) -> None:
    assert len(expected) == len(found), f"{what}: {len(found)} tensors instead of {len(expected)}"
    for one, other in zip(expected, found, strict=True):
        if not torch.equal(one, other):
            raise AssertionError(f"{what} differ by up to {float((one - other).detach().abs().max()):.3g}")


if __name__ == "__main__":
    main()
