"""The chain: its layers, what crosses, where a cut may be, and what tracing leaves behind."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torchvision
from torch import Tensor, nn

import kit
from pd_format.errors import UserError
from pd_format.layers.chain import Chain, build_chain
from pd_format.layers.fingerprint import compare_fingerprints

X = torch.randn(5, 16)


def chain_of(model: nn.Module, **inputs: Tensor) -> Chain:
    return build_chain(model, kit.specs(**(inputs or {"x": X})))


def test_layers_are_named_by_module_or_function_and_bear_their_parameters() -> None:
    chain = chain_of(kit.K2())
    assert [layer.name for layer in chain.layers] == ["a", "tanh", "b", "tanh:2", "c", "add", "d"]
    assert chain.layers[0].op == "Linear(in_features=16, out_features=16, bias=True)"
    assert chain.layers[1].op == "tanh()"
    assert chain.layers[6].parameters == ("d.weight", "d.bias")
    assert chain.parameter_bytes(6) == 4 * (16 * 4 + 4)


def test_vgg16_has_forty_layers_in_the_order_in_which_they_run() -> None:
    with torch.device("meta"):
        model = torchvision.models.vgg16()
    chain = chain_of(model, x=torch.empty(64, 3, 224, 224, device="meta"))
    assert len(chain.layers) == 40
    assert [layer.name for layer in chain.layers[-9:-6]] == ["avgpool", "flatten", "classifier.0"][-9:]
    assert chain.layers[32].op == "flatten(1)"
    assert chain.crossing_bytes(0) == 64 * 64 * 224 * 224 * 4
    assert chain.crossing_bytes(39) == 0
    assert sum(chain.parameter_bytes(index) for index in range(40)) == 138_357_544 * 4


def test_what_crosses_counts_skips_and_inputs_used_late() -> None:
    chain = chain_of(kit.K2())
    assert chain.crossing(0) == ("a",)
    assert chain.crossing(2) == ("a", "b")
    assert chain.crossing_bytes(2) == 2 * 5 * 16 * 4
    late = chain_of(kit.K6(), x=X, idx=torch.arange(5))
    assert late.crossing(0) == ("x", "idx", "a")
    assert late.crossing_bytes(0) == 5 * 16 * 4 + 5 * 8 + 5 * 16 * 4
    assert late.crossing(len(late.layers) - 1) == ()


def test_a_tensor_changed_in_place_crosses_once_although_it_has_two_names() -> None:
    chain = chain_of(kit.K5())
    assert chain.crossing(0) == ("a",)
    assert chain.crossing(1) == ("r",)
    assert chain.crossing_bytes(1) == 5 * 16 * 4


class _Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.size(0)
        return self.b(self.a(x).view(rows, -1))


def test_a_size_crosses_as_a_number_and_not_as_the_tensor_that_it_is_of() -> None:
    chain = chain_of(_Sized(), x=torch.randn(2, 3, 8, 8))
    assert [layer.name for layer in chain.layers] == ["a", "view", "b"]
    assert chain.crossing(0) == ("size", "a")
    assert chain.crossing_bytes(0) == 2 * 4 * 36 * 4
    assert chain.specialised == ()


def test_tied_weights_are_refused_with_both_names() -> None:
    chain = chain_of(kit.K3(), ids=torch.zeros(2, 3, dtype=torch.int64))
    assert chain.cuts == (False, False, False, True)
    assert len(chain.notes) == 1
    with pytest.raises(UserError, match=r"'e' and 'o'.*e\.weight, o\.weight.*Plan again"):
        chain.stage(0, 1)
    assert chain.state_names["o.weight"] == "e.weight"
    assert sum(chain.parameter_bytes(index) for index in range(4)) == (50 * 16 + 16 * 16 + 16) * 4


def test_a_module_used_twice_stays_in_one_stage_under_both_names() -> None:
    chain = chain_of(kit.K10())
    assert chain.cuts == (False, False, True, True)
    with pytest.raises(UserError, match=r"a\.weight, alias\.weight"):
        chain.stage(1, 3)
    assert chain.state_names["alias.bias"] == "a.bias"
    assert chain.layers[2].name == "a:2"
    assert chain.layers[2].parameters == ()


def test_parameters_that_share_memory_are_tied_too() -> None:
    model = kit.K2()
    model.c.weight = nn.Parameter(model.a.weight.data)
    chain = chain_of(model)
    assert chain.cuts == (False, False, False, False, True, True, True)


class _Counter(nn.Module):
    """A buffer written in one place and read in another, and one that is only read."""

    def __init__(self, write: bool) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("seen", torch.zeros(()))
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x + self.seen)
        if self.write:
            self.seen.add_(1)
        return self.b(h) * self.seen


def test_a_buffer_that_is_written_ties_its_users_and_one_that_is_read_does_not() -> None:
    assert chain_of(_Counter(False)).cuts[:-1] == (True, True, True)
    written = chain_of(_Counter(True))
    assert not any(written.cuts[:-1])
    model = _Counter(False)
    kit.assert_split_equals_whole(model, chain_of(model), [0, 1, 2], [X])


class _Alias(nn.Module):
    """Two names of one memory, one of them changed later on."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        view = h.view(-1, 8)
        k = self.b(x)
        h.add_(1.0)
        return k + view.sum() + h.sum()


def test_a_cut_between_an_alias_and_its_later_change_is_not_legal() -> None:
    model = _Alias()
    chain = chain_of(model)
    assert [layer.name for layer in chain.layers][:4] == ["a", "view", "b", "add_"]
    assert chain.cuts[:4] == (True, False, False, True)
    with pytest.raises(UserError, match="share memory"):
        chain.stage(0, 1)
    for cut in (0, 3):
        kit.assert_split_equals_whole(model, chain, [cut], [X])


class _Unready(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.pack(self.a(x))
        return self.b(torch.tanh(x) + _unpack(packed))

    def pack(self, h: Tensor) -> object:
        return _pack(h)


class _Pack:
    def __init__(self, h: Tensor) -> None:
        self.h = h


def _pack(h: Tensor) -> _Pack:
    return _Pack(h)


def _unpack(packed: _Pack) -> Tensor:
    return packed.h


torch.fx.wrap("_pack")
torch.fx.wrap("_unpack")


def test_no_cut_where_something_of_another_kind_would_cross() -> None:
    model = _Unready()
    chain = chain_of(model)
    names = [layer.name for layer in chain.layers]
    assert names[:2] == ["a", "tanh"]
    assert chain.cuts[:3] == (False, False, True)
    assert any("_Pack" in note for note in chain.notes)
    kit.assert_split_equals_whole(model, chain, [2], [X])


class _Branching(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        if h.sum() > 0:
            return torch.relu(h)
        return -h


def test_a_submodule_that_cannot_be_traced_becomes_one_layer_and_a_note_says_why() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(_Branching(), nn.Tanh()), nn.Linear(16, 4))
    chain = chain_of(model)
    assert [layer.name for layer in chain.layers] == ["0", "1.0", "1.1", "2"]
    (note,) = chain.notes
    assert note.startswith("1.0 (_Branching) stays one layer: it needs the value of the tensor")
    assert "depends on the data" in note
    line = _line_of("if h.sum() > 0:")
    assert f"{__file__}:{line}" in note
    kit.assert_split_equals_whole(model, chain, [0, 1, 2], [X])


def _line_of(text: str) -> int:
    with open(__file__, encoding="utf-8") as file:
        return next(number for number, line in enumerate(file, 1) if line.strip() == text)


def test_a_model_whose_own_forward_cannot_be_traced_is_refused_with_the_way_forward() -> None:
    with pytest.raises(UserError) as caught:
        chain_of(kit.K8())
    text = str(caught.value)
    assert "K8 cannot be split into layers" in text
    assert f"{kit.__file__}:" in text
    assert "depends on the data" in text
    assert "Move that code into a submodule" in text


class _Reads(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.n, self.a = width, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != self.n:
            raise ValueError(f"expected {self.n} columns")
        assert x.dim() == len(x.shape) == 2
        assert isinstance(x, torch.Tensor)
        for index in range(x.shape[1] // 8):
            x = x + index
        if x.dtype == torch.float32 and not x.is_cuda:
            x = self.a(x)
        return x


def test_sizes_and_types_may_steer_the_code_and_are_reported() -> None:
    chain = chain_of(_Reads(16))
    assert [layer.name for layer in chain.layers] == ["add", "add:2", "a"]
    assert chain.specialised == ("x.shape[1] != 16 is False", "x.shape[1] // 8 is 2")


class _Batch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[index] for index in range(x.shape[0])])


def test_code_that_depends_on_the_minibatch_size_stays_one_layer() -> None:
    model = nn.Sequential(nn.Linear(16, 4), _Batch())
    chain = chain_of(model)
    assert [layer.name for layer in chain.layers] == ["0", "1"]
    assert "depends on the minibatch size" in chain.notes[0]
    kit.assert_split_equals_whole(model, chain, [0], [torch.randn(3, 16)])


class _Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 4)
        self.register_buffer("start", torch.zeros(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.start


def test_a_model_for_one_minibatch_size_only_is_split_and_the_size_reported() -> None:
    chain = chain_of(_Fixed())
    assert "the minibatch size is 5" in chain.specialised


def test_inputs_that_the_model_fails_on_are_refused_with_the_place() -> None:
    with pytest.raises(UserError, match=r"K2 fails on the inputs x \(5, 15\).* in layer a: RuntimeError"):
        chain_of(kit.K2(), x=torch.zeros(5, 15))


def test_inputs_and_the_parameters_of_forward_must_fit() -> None:
    with pytest.raises(UserError, match="forward needs idx"):
        chain_of(kit.K6(), x=X)
    with pytest.raises(UserError, match="takes 1: x"):
        chain_of(kit.K2(), x=X, y=X)
    by_position = chain_of(kit.K6(), image=X, label=torch.arange(5))
    assert by_position.crossing(0) == ("image", "label", "a")
    by_name = chain_of(kit.K6(), idx=torch.arange(5), x=X)
    assert by_name.stage(0, 0).inputs == ("idx", "x")


class _Frozen(nn.Module):
    """Keeps its BatchNorm in eval mode, as fine-tuning code does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def train(self, mode: bool = True) -> _Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)))


def test_modules_that_stay_in_eval_mode_do_so_in_a_stage() -> None:
    model = _Frozen().eval()
    chain = chain_of(model)
    stage = chain.stage(1, 2)
    assert not stage.training
    stage.train()
    assert stage.training
    assert not model.norm.training
    kit.assert_split_equals_whole(model, chain, [0, 1], [X])


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(kit.K4(), nn.Linear(4, 4), nn.LSTM(4, 4), _Pick())
    model[0][1].eval()
    model.train(False)
    model[1].train()
    before = [(module, dict(module.__dict__), module.training) for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    x = torch.randn(5, 3, 8, 8)
    generator = torch.get_rng_state()
    functions = (torch.zeros, torch.autograd.Function.apply, nn.Module.__call__)
    chain_of(model, x=x)
    assert torch.equal(generator, torch.get_rng_state())
    assert functions == (torch.zeros, torch.autograd.Function.apply, nn.Module.__call__)
    for module, attributes, training in before:
        assert module.training == training
        assert module.__dict__.keys() == attributes.keys()
        assert all(module.__dict__[key] is value for key, value in attributes.items())
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])
    assert all(each.device.type == "cpu" for each in model[2]._flat_weights)


class _Pick(nn.Module):
    def forward(self, pair: tuple[Tensor, object]) -> Tensor:
        return pair[0]


def test_a_stage_keeps_the_original_names_and_nothing_else_of_the_model() -> None:
    model = torchvision.models.resnet18(num_classes=10)
    chain = chain_of(model, x=torch.randn(2, 3, 32, 32))
    end = next(index for index, layer in enumerate(chain.layers) if layer.name == "layer1.0.bn1")
    stage = chain.stage(0, end)
    names = dict(stage.named_parameters())
    assert list(names) == [
        "conv1.weight",
        "bn1.weight",
        "bn1.bias",
        "layer1.0.conv1.weight",
        "layer1.0.bn1.weight",
        "layer1.0.bn1.bias",
    ]
    assert names["layer1.0.conv1.weight"] is model.layer1[0].conv1.weight
    assert set(stage.state_dict()) < set(model.state_dict())
    other, model_alive = weakref.ref(model.fc.weight), weakref.ref(model)
    del model, chain
    gc.collect()
    assert other() is None
    assert model_alive() is None
    x = torch.randn(2, 3, 32, 32)
    new = {name: torch.zeros_like(value) for name, value in stage.named_parameters()}
    assert all(not each.any() for each in torch.func.functional_call(stage, new, (x,)))


class _Direct(nn.Module):
    """Parameters of its own, a list of them, one that no layer uses, and a module read for its dtype only."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(16))
        self.idle = nn.Parameter(torch.randn(3))
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))])
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)
        self.offset = torch.ones(16)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.b.weight.dtype) + self.token
        for scale in self.scales:
            x = x * scale
        return self.b(self.a(x * self.frozen + self.offset))


def test_parameters_used_directly_belong_to_their_layers() -> None:
    model = _Direct()
    chain = chain_of(model)
    assert all(chain.cuts)
    owned = {name for layer in chain.layers for name in layer.parameters}
    assert owned == {name for name, _ in model.named_parameters()}
    assert any("idle" in note for note in chain.notes)
    frozen = next(index for index, layer in enumerate(chain.layers) if "frozen" in layer.parameters)
    assert (chain.parameter_bytes(frozen), chain.trainable_bytes(frozen)) == (64, 0)
    cuts = list(range(len(chain.layers) - 1))
    kit.assert_split_equals_whole(model, chain, cuts, [X])
    ends = [*cuts, cuts[-1] + 1]
    stages = [chain.stage(index, index) for index in ends]
    assert {name for stage in stages for name in stage.state_dict()} == set(model.state_dict())


def test_a_walk_runs_the_whole_model_and_yields_each_layer() -> None:
    torch.manual_seed(0)
    model = torchvision.models.googlenet(num_classes=10, init_weights=False)
    x = torch.randn(2, 3, 64, 64)
    chain = chain_of(model, x=x)
    for mode in (True, False):
        model.train(mode)
        torch.manual_seed(3)
        expected = list(kit.tensors(model(x)))
        torch.manual_seed(3)
        walk = chain.walk([x])
        seen = []
        while True:
            try:
                index, values = next(walk)
            except StopIteration as end:
                output = end.value
                break
            seen.append(index)
            assert isinstance(values, list)
        assert seen == list(range(len(chain.layers)))
        found = list(kit.tensors(output))
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_output_structure_tells_the_number_of_classes() -> None:
    chain = chain_of(kit.K6(), x=X, idx=torch.arange(5))
    assert isinstance(chain.output, dict)
    assert chain.output["logits"].shape == (5, 4)
    assert chain.output["aux"].is_meta


def test_a_stage_can_be_copied() -> None:
    chain = chain_of(kit.K1())
    stage = chain.stage(0, 2)
    twin = copy.deepcopy(stage)
    (before,) = stage(X)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(stage(X)[0], before)
    assert not twin(X)[0].any()


def test_no_stage_outside_the_chain() -> None:
    with pytest.raises(UserError, match="the model has 0 to 4"):
        chain_of(kit.K1()).stage(2, 5)


class _Net(nn.Module):
    def __init__(self, width: int = 8, name: str = "b", extra: bool = False, factor: float = 2.0) -> None:
        super().__init__()
        self.a = nn.Linear(16, width)
        self.add_module(name, nn.Linear(width, 4))
        self.name, self.extra, self.factor = name, extra, factor

    def forward(self, x: Tensor) -> Tensor:
        x = self.get_submodule(self.name)(torch.relu(self.a(x)) * self.factor)
        return torch.tanh(x) if self.extra else x


def test_a_fingerprint_tells_models_apart_and_where() -> None:
    chain = chain_of(_Net())
    assert chain.fingerprint == chain_of(_Net()).fingerprint
    assert chain.fingerprint == chain_of(_Net(), x=torch.randn(7, 16)).fingerprint
    assert len(chain.fingerprint) == 16 + 1 + 4 * 4
    assert compare_fingerprints(chain.fingerprint, chain.fingerprint, chain.layers) == ""
    for other, where in (
        (_Net(width=9), "number 1, 'a', here Linear(in_features=16, out_features=9"),
        (_Net(name="c"), "number 4, 'c'"),
        (_Net(factor=3.0), "number 3, 'mul', here mul(3.0)"),
        (_Net(extra=True), "layer 5, 'tanh', is new here. The file's model has 4 layers, this one 5."),
        (_Net().to(torch.bfloat16).float().double(), "number 1, 'a'"),
    ):
        x = X.double() if where.endswith("'a'") else X
        found = chain_of(other, x=x)
        text = compare_fingerprints(chain.fingerprint, found.fingerprint, found.layers)
        assert where in text, text
    longer = chain_of(_Net(extra=True))
    assert "missing here" in compare_fingerprints(longer.fingerprint, chain.fingerprint, chain.layers)
    assert "another form" in compare_fingerprints("abc", chain.fingerprint, chain.layers)


class _Late(nn.Module):
    """Asks for sizes, and for parts of a tuple, long after the tensors were made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        best = self.a(x).max(1)
        h = torch.tanh(self.b(x))
        return self.c(h + best.values.unsqueeze(1)).view(x.shape[0], -1)


def test_what_is_asked_late_is_taken_early_so_that_little_crosses() -> None:
    model = _Late()
    chain = chain_of(model)
    assert all(chain.cuts)
    assert len(chain.crossing(3)) == 3
    assert chain.crossing_bytes(3) == (5 + 5 * 16) * 4
    kit.assert_split_equals_whole(model, chain, list(range(len(chain.layers) - 1)), [X])


class _Device(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        known = {torch.float32: 1.0, torch.float64: 2.0}
        device = x.device
        h = self.a(x)
        if device.type == "cpu" and device == torch.device("cpu") and str(device) == "cpu":
            h = h * known[x.dtype]
            h = h + torch.arange(16, device=device)
        return self.b(h) + torch.ones(4, device=device)


def test_the_device_is_the_real_one_and_never_crosses() -> None:
    model = _Device()
    chain = chain_of(model)
    assert [layer.name for layer in chain.layers] == ["a", "mul", "arange", "add", "b", "ones", "add:2"]
    assert [len(chain.crossing(index)) for index in range(7)] == [1, 1, 2, 1, 1, 2, 0]
    kit.assert_split_equals_whole(model, chain, list(range(6)), [X])


class _Makes(nn.Module):
    """Makes tensors from sizes, random ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows, h = x.shape[0], self.a(x)
        made = torch.zeros(rows, 3).sum() + torch.full((rows, 2), 0.5).sum() + x.new_ones(rows, 16)
        h = torch.reshape(torch.reshape(h, (rows, 4, -1)), [rows, 16]) + torch.arange(rows).unsqueeze(1)
        return self.b(h) + made + torch.rand(rows, 1) + torch.randn(1) + torch.rand_like(h)


def test_tensors_made_in_the_forward_are_made_anew_for_each_minibatch() -> None:
    model = _Makes()
    chain = chain_of(model)
    assert chain.specialised == ()
    cuts = [index for index, cut in enumerate(chain.cuts[:-1]) if cut]
    assert len(cuts) == len(chain.layers) - 1
    for rows in (5, 2):
        kit.assert_split_equals_whole(model, chain, cuts, [torch.randn(rows, 16)])


class _Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


def test_a_module_that_assigns_its_buffers_stays_whole() -> None:
    model = nn.Sequential(_Keeps(), nn.Linear(16, 4))
    chain = chain_of(model)
    assert [layer.name for layer in chain.layers] == ["0", "1"]
    assert "its forward assigns self.mean" in chain.notes[0]
    assert model[0].mean.device.type == "cpu"
    with pytest.raises(UserError, match=r"the forward of _Keeps assigns self\.mean"):
        chain_of(_Keeps())


def test_naming_a_device_still_works_after_a_trace() -> None:
    from torch.utils import _device

    # As in a program that has not named a device before.
    _device._device_constructors.cache_clear()
    chain_of(_Makes())
    with torch.device("meta"):
        assert torch.zeros(1).is_meta
        assert torch.randn(1).is_meta
