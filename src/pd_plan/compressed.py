"""What a compressed plan sends, for the cost model and the simulator (the sizes are `pd_format.compression`).

The solver compares ranges of layers, so that it needs sizes that add up: each layer has its share of full buckets.
The figures of a partition that has been chosen are those of its stages' own buckets; only under `powersgd`, and in
stages of few parameters, the two differ by more than rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pd_format.compression import Compression, crossing_bytes, linear_bytes, stage_bytes_after
from pd_format.errors import UserError
from pd_format.plan import Plan
from pd_format.profile import Profile
from pd_plan.cost import Chain, Partition
from pd_plan.depth import loads_of
from pd_plan.simulator import StageLoad

__all__ = ["as_sent", "check_compression", "compression_of", "loads_sent", "sent_chain"]


def compression_of(plan: Plan) -> Compression:
    """What a plan compresses."""
    return Compression.of(plan.compress_gradients, plan.compress_activations)


def check_compression(profile: Profile, compression: Compression, inference: bool) -> None:
    """Refuse what there would be nothing to compress for.

    Raises:
        UserError: saying why.
    """
    if compression.activations is not None and profile.precision != "fp32":
        raise UserError(
            f"the profile is of precision {profile.precision}, whose tensors cross a cut in 2 bytes an element "
            "already; compressing activations is for float32. Leave it out, or profile with --precision fp32."
        )
    if compression.gradients is not None and inference:
        raise UserError("inference has no gradients to compress; leave that out.")


def as_sent(profile: Profile, compression: Compression) -> Profile:
    """The profile with the sizes that cross the network instead of those in memory; itself without compression."""
    gradients, activations = compression
    if gradients is None and activations is None:
        return profile
    layers = []
    for layer in profile.layers:
        sizes = {}
        if activations is not None:
            sizes["activation_bytes"] = crossing_bytes(activations, layer.activation_bytes, profile.minibatch_size)
        if gradients is not None:
            sizes["trainable_bytes"] = linear_bytes(gradients, layer.trainable_bytes)
        layers.append(layer.model_copy(update=sizes))
    return profile.model_copy(update={"layers": tuple(layers)})


def sent_chain(chain: Chain, profile: Profile, partition: Partition, compression: Compression) -> Chain:
    """The chain of a profile `as_sent`, with what the stages of a partition send in their own buckets.

    Args:
        chain: of the profile as it is sent.
        profile: as it was measured.
        partition: whose stages alone the result is right for.
        compression: of the plan.
    """
    if compression.gradients is None:
        return chain
    sums = [0]
    for (first, end), replicas in zip(partition.ranges, partition.replicas, strict=True):
        whole = sum(layer.trainable_bytes for layer in profile.layers[first:end])
        # Between two cuts only the sum counts, so the stage's last layer gets all of it.
        sums += [sums[-1]] * (end - first - 1)
        sums.append(sums[-1] + stage_bytes_after(compression.gradients, whole, replicas))
    return replace(chain, weight_bytes=tuple(sums))


def loads_sent(
    profile: Profile, partition: Partition, compression: Compression, recompute: Sequence[bool] = ()
) -> list[StageLoad]:
    """`pd_plan.depth.loads_of` with what is sent.

    Args:
        profile: as it was measured.
        partition, recompute: as there.
        compression: of the plan.
    """
    layers = as_sent(profile, compression).layers
    loads = loads_of(layers, partition, recompute)
    chain = sent_chain(Chain.of(layers), profile, partition, compression)
    return [
        load._replace(weight_bytes=chain.weights(first, end))
        for load, (first, end) in zip(loads, partition.ranges, strict=True)
    ]
