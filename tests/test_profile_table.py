from __future__ import annotations

import pytest

from pd_format.profile import Device, InputSpec, LayerProfile, ModelSpec, Profile
from pd_profile.samples import Summary
from pd_profile.table import check_lines, readable_op, table_lines


def layer(name: str, op: str, forward: float, backward: float, std: float, activation: int, size: int) -> LayerProfile:
    return LayerProfile(
        name=name,
        op=op,
        forward_ms=forward,
        backward_ms=backward,
        forward_ms_std=std,
        activation_bytes=activation,
        parameter_bytes=size,
        trainable_bytes=size,
    )


def profile_of(*layers: LayerProfile) -> Profile:
    return Profile(
        model=ModelSpec(name="net", factory="net.py:net", fingerprint="f"),
        minibatch_size=4,
        inputs=(InputSpec(name="x", shape=(4, 1), dtype="float32"),),
        device=Device(kind="cpu", name="test"),
        minibatches=3,
        layers=layers,
    )


def test_table_shows_each_layer_and_the_totals() -> None:
    profile = profile_of(
        layer("conv", "Conv2d(1, 8, kernel_size=(3, 3))", 1.25, 2.5, 0.375, 12_800, 320),
        layer("relu", "relu", 0.5, 0.0, 0.0, 12_800, 0),
        layer("fc", "Linear(in_features=512, out_features=10)", 0.25, 0.5, 0.0, 0, 20_520_000),
    )
    assert table_lines(profile) == [
        "layer     op      forward  backward    ±  activation   params",
        "─────────────────────────────────────────────────────────────",
        "conv      Conv2d    1.250     2.500  10%     12.8 kB    320 B",
        "relu      relu      0.500     0.000   0%     12.8 kB      0 B",
        "fc        Linear    0.250     0.500   0%         0 B  20.5 MB",
        "─────────────────────────────────────────────────────────────",
        "3 layers            2.000     3.000                   20.5 MB",
        "Times are ms a minibatch; activation is all that crosses a cut after the layer.",
    ]


def test_long_names_lose_their_beginning_and_the_table_stays_within_the_width() -> None:
    profile = profile_of(
        *(
            layer(f"features.denseblock1.denselayer{n}.norm1", "ConvTranspose3dReLU()", 4000.0, 8000.0, 1, 5**14, 5**12)
            for n in range(3)
        )
    )
    lines = table_lines(profile, 80)
    assert max(map(len, lines)) <= 80
    assert "selayer2.norm1" in lines[4]
    assert "ConvTranspose…" in lines[4]
    assert "12000 " in lines[-2]
    assert max(map(len, table_lines(profile, 120))) <= 120
    assert "features.denseblock1.denselayer2.norm1" in table_lines(profile, 120)[4]


@pytest.mark.parametrize(
    ("op", "text"),
    [("Conv2d(3, 64, kernel_size=(3, 3))", "Conv2d"), ("torch.flatten(1)", "flatten"), ("add", "add")],
)
def test_op_is_shown_without_its_arguments(op: str, text: str) -> None:
    assert readable_op(op) == text


def summary_of(layers_ms: float, plain_ms: float) -> Summary:
    return Summary(3, (layers_ms,), (0.0,), (0.0,), (0.0,), plain_ms)


def test_check_compares_the_sum_with_the_plain_step() -> None:
    assert check_lines(summary_of(10.5, 10.0)) == [
        "The layers add up to 10.50 ms, an un-instrumented step takes 10.00 ms (+5.0%)."
    ]


@pytest.mark.parametrize("layers_ms", [8.9, 11.1])
def test_check_warns_beyond_ten_percent_either_way(layers_ms: float) -> None:
    lines = check_lines(summary_of(layers_ms, 10.0))
    assert lines[1].startswith("Warning: they differ by more than 10%, so the layers' times are doubtful.")


def test_check_warns_where_the_plain_step_took_no_time() -> None:
    assert len(check_lines(summary_of(1.0, 0.0))) == 2
    assert len(check_lines(summary_of(0.0, 0.0))) == 1
