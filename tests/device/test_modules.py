"""Modules move to "npu" and back, and their parameters stay the objects that they were."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn

from tolerances import assert_same

NPU = "npu"


def test_a_module_that_moves_keeps_its_parameters_tied_and_known_to_optimizers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.to(NPU)
    assert model[1].weight is model[0].weight
    before = model[0].weight.detach().clone()
    model(torch.ones(4, device=NPU)).sum().backward()
    optimizer.step()
    assert (model[1].weight - before).abs().sum().item() > 0
    assert model.to("cpu")[0].weight.device.type == "cpu"


def test_a_module_is_saved_by_safetensors_with_what_is_tied(tmp_path: Path) -> None:
    whole = torch.arange(6.0, device=NPU)
    begin = whole.untyped_storage().data_ptr()
    assert [whole[i:].data_ptr() for i in (0, 1, 6)] == [begin, begin + 4, 0]
    saved, loaded = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    for model in (saved, loaded):
        model[1].weight = model[0].weight
        model.to(NPU)
    save_model(saved, tmp_path / "model.safetensors")
    assert load_model(loaded, tmp_path / "model.safetensors", device=NPU) == (set(), [])
    assert_same([p.cpu() for p in loaded.parameters()], [p.cpu() for p in saved.parameters()])


class Scale(nn.Parameter):
    """A parameter of a class of its own."""


def test_a_parameter_that_moves_keeps_its_class_its_attributes_and_its_hooks() -> None:
    found = []
    for where in ("cpu", NPU):
        net: Any = nn.Linear(3, 2)
        net.bias = Scale(torch.ones(2))
        net.bias.is_decayed = False
        called: list[torch.Tensor] = []
        net.weight.register_hook(lambda grad: grad * 0)
        net.bias.register_post_accumulate_grad_hook(called.append)
        net.to(where)
        net.weight.register_hook(lambda grad: grad + 2)
        net(torch.ones(4, 3, device=where)).sum().backward()
        assert type(net.bias) is Scale
        assert not net.bias.is_decayed
        assert len(called) == 1
        assert called[0] is net.bias
        found.append(net.weight.grad.tolist())
    assert found == [[[2] * 3] * 2] * 2


def test_a_module_that_is_on_the_device_in_part_keeps_all_of_its_parameters() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    net[1].register_parameter("again", net[1].weight_ih_l0)
    net[1].bias_hh_l0.grad = gradient = torch.ones(8)
    weak = weakref.ref(net[1].bias_hh_l0)
    had = list(net.parameters())
    net[0].to(NPU)
    net.to(NPU)
    assert all(one is other for one, other in zip(had, net.parameters(), strict=True))
    assert {p.device.type for p in had} == {NPU}
    assert net[1].again is net[1].weight_ih_l0
    assert weak() is net[1].bias_hh_l0
    assert net[1].bias_hh_l0.grad is gradient
    assert gradient.tolist() == [1] * 8


def test_modules_whose_parameters_are_not_there_yet_convert_and_move() -> None:
    net = nn.LazyLinear(3).double().to(NPU)
    result = net(torch.ones(2, 4, dtype=torch.float64, device=NPU))
    assert result.shape == (2, 3)
    assert result.device.type == NPU


def test_what_is_applied_to_a_module_is_called_with_its_tensors_alone() -> None:
    seen: list[tuple[int, ...]] = []

    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tensor.shape))
        return tensor * 2

    nn.Linear(2, 3)._apply(doubled)
    assert seen == [(3, 2), (3,)]


def test_a_module_compiled_on_the_cpu_moves() -> None:
    net = nn.Linear(2, 2)
    with torch.no_grad():
        torch.compile(net, backend="eager")(torch.ones(1, 2))
    assert net.to(NPU).weight.device.type == NPU


def test_a_gradient_for_a_parameter_that_has_moved_is_refused_and_others_are_right() -> None:
    net, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    net.weight.requires_grad_(False)
    expected = net.weight.sum(0)
    sums, frozen = net.bias + 1, x @ net.weight.t()
    net.to(NPU)
    with pytest.raises(RuntimeError, match="whose module has moved since"):
        sums.sum().backward()
    frozen.sum().backward()
    assert x.grad is not None
    assert_same(x.grad[0], expected)


@pytest.mark.filterwarnings("ignore:.*_norm:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_module_of_the_old_norms_moves(norm: Callable[[nn.Module], nn.Module]) -> None:
    layer = norm(nn.Linear(4, 3))
    x = torch.randn(2, 4)
    layer(x)
    expected = layer.eval()(x).detach()
    assert_same(layer.to(NPU)(x.to(NPU)).detach().cpu(), expected)


def test_a_module_moves_whatever_holds_its_parameters_and_trains_on() -> None:
    net, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2)
    kept = net(x.requires_grad_()).sum()
    (expected,) = torch.autograd.grad(kept, x, retain_graph=True)
    with torch.no_grad():
        row = net[0].weight[0]
    (gradient,) = torch.autograd.grad(kept, net[0].weight, create_graph=True)
    net[0].weight.grad = gradient
    net.to(NPU)
    assert (row.device.type, gradient.device.type) == ("cpu", "cpu")
    assert net[0].weight.grad.is_leaf
    assert_same(net[0].weight.grad.cpu(), gradient.detach())
    assert_same(torch.autograd.grad(kept, x, retain_graph=True)[0], expected)
    with pytest.raises(RuntimeError, match="whose module has moved since"):
        kept.backward()
    late = net[0].weight.view(-1)
    net.cpu()(x).sum().backward()
    with pytest.raises(RuntimeError, match="whose module has moved since"):
        late.backward(torch.ones(4, device=NPU))
    assert_same(net[0].weight.grad, 2 * gradient.detach())
