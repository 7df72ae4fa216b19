"""What a target cannot run goes to the host, with right numbers, counted and explained."""

from __future__ import annotations

import inspect
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import npu_iree
from either import LOCAL_FIRST
from lowering.errors import FlagError
from npu_iree import NpuIreeError, OptionError, StageError, UnsupportedOpError
from tolerances import assert_same


@pytest.fixture(params=LOCAL_FIRST)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


BAD_FLAGS = ["--iree-hal-target-backends=nonsense"]


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="npu_iree", options=options)


def error_of(function: Callable[..., Any], *args: Any, **options: Any) -> NpuIreeError:
    """Compile and call; return our error from within Dynamo's."""
    with pytest.raises(BackendCompilerFailed) as raised:
        compiled(function, **options)(*args)
    inner = raised.value.inner_exception
    assert isinstance(inner, NpuIreeError)
    return inner


def inverse(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x) + torch.eye(4) * 9
    return torch.linalg.inv(y) @ x


def mixing(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return torch.fft.fft(torch.fft.fft(y, dim=-1), dim=-2).real + x


def middle(x: torch.Tensor) -> Any:
    y = x.exp()
    values, indices = torch.median(y, dim=1)
    return values * 2, indices + 1, torch.median(y) - y


def all_of_them(x: torch.Tensor) -> Any:
    a = torch.linalg.inv(x + torch.eye(4) * 9)
    b = torch.median(x * 2)
    return a + b, torch.fft.fft(x + 1, dim=0).real


def add_mul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x + y) * y


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("function", [inverse, mixing, middle, all_of_them])
def test_unsupported_ops_give_eagers_numbers(
    function: Callable[..., Any], target: str, counts: Counter[str]
) -> None:
    run = compiled(function, target=target)
    for scale in (1, 2):
        assert_same(run(X * scale), function(X * scale))
    assert counts["host_ops"] >= 1
    assert counts["regions"] >= 1
    assert counts["graphs"] == 1


def test_a_graph_without_fallback_counts_no_host_ops(target: str, counts: Counter[str]) -> None:
    assert_same(compiled(add_mul, target=target, fallback="error")(X, X), add_mul(X, X))
    assert (counts["host_ops"], counts["regions"]) == (0, 1)


def test_gradients_flow_through_host_ops(target: str, counts: Counter[str]) -> None:
    grads = []
    for call in (compiled(inverse, target=target), inverse):
        x = X.clone().requires_grad_()
        call(x).sum().backward()
        grads.append(x.grad)
    assert_same(*grads)
    assert counts["host_ops"] >= 2


def test_fallback_error_lists_every_op_with_its_line(target: str, counts: Counter[str]) -> None:
    error = error_of(all_of_them, X, target=target, fallback="error")
    assert isinstance(error, UnsupportedOpError)
    assert error.target == target
    lines, first = inspect.getsourcelines(all_of_them)
    for word, text in (("inv", "linalg.inv"), ("median", "torch.median"), ("fft", "fft.fft")):
        number = first + next(i for i, line in enumerate(lines) if text in line)
        ops = [op for op in error.ops if op.where.startswith(f"{__file__}:{number} in all_of_them")]
        assert any(word in op.op for op in ops), (word, error.ops)
        assert all(op.reason and text in op.code for op in ops)
    for op in error.ops:
        assert op.op in str(error)
        assert op.where in str(error)
    assert counts["compiles"] == 0


def test_disabled_ops_are_no_error_for_fallback_error(counts: Counter[str]) -> None:
    run = compiled(add_mul, disabled_ops=["add"], fallback="error")
    assert_same(run(X, X), add_mul(X, X))
    assert counts["host_ops"] == 1


@pytest.mark.parametrize(
    "name", ["aten.add.Tensor", "aten.add", "add", torch.ops.aten.add.Tensor, torch.ops.aten.add]
)
def test_an_op_is_disabled_by_each_of_its_names(
    name: Any, target: str, counts: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = compiled(add_mul, target=target, disabled_ops=[name])
    assert_same(run(X, X + 1), add_mul(X, X + 1))
    assert counts["host_ops"] == 1
    assert counts["regions"] == 1


def test_another_overload_stays_on_the_device(counts: Counter[str]) -> None:
    assert_same(compiled(add_mul, disabled_ops=["aten.add.Scalar"])(X, X), add_mul(X, X))
    assert counts["host_ops"] == 0


def test_everything_disabled_runs_on_the_host_alone(counts: Counter[str]) -> None:
    assert_same(compiled(add_mul, disabled_ops=["add", "mul", "relu"])(X, X), add_mul(X, X))
    assert (counts["host_ops"], counts["regions"], counts["compiles"]) == (3, 0, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"falback": "error"}, "'fallback'"),
        ({"disabled_op": []}, "'disabled_ops'"),
        ({"target": "npu-locl"}, "'npu-local'"),
        ({"target": "npu-virtul"}, "'npu-virtual'"),
        ({"target": 3}, "target"),
        ({"fallback": "errr"}, "'error'"),
        ({"fallback": True}, "'fallback'"),
        ({"disabled_ops": ["aten.addd.Tensor"]}, "'add'"),
        ({"disabled_ops": ["softmx"]}, "'softmax'"),
        ({"disabled_ops": ["aten.add.Tensr"]}, "'Tensor'"),
        ({"disabled_ops": ["nonsense.add"]}, "nonsense"),
        ({"disabled_ops": ["aten."]}, "'aten.' is no op; give a name such as 'aten.relu'"),
        ({"disabled_ops": ["aten.relu.overloads"]}, "aten.relu.overloads"),
        ({"disabled_ops": ["aten.relu.default.tags"]}, "aten.relu.default.tags"),
        ({"disabled_ops": ["aten.__doc__"]}, "aten.__doc__"),
        ({"disabled_ops": [""]}, "'' is no op; give a name such as"),
        ({"disabled_ops": ["..."]}, "'...' is no op; give a name such as"),
        ({"disabled_ops": "add"}, "list"),
        ({"disabled_ops": [3]}, "3"),
        ({"disabled_ops": None}, "disabled_ops"),
        ({"keep_ops": ["gelo"]}, "'gelu'"),
        ({"flags": "--x"}, "list"),
        ({"flags": ["x"]}, "--"),
        ({"flags": ["--iree-execution-model=async-internal"]}, "=async-external"),
        ({"flags": ["--iree-input-demote-f64-to-f32"]}, "f64-to-f32=false"),
        ({"compile_memory_limit_bytes": 2**63}, f"up to {2**63 - 1}, not"),
        ({"compile_memory_limit_bytes": math.inf}, f"up to {2**63 - 1}, not inf"),
        ({"bind_weights": 1}, "True or False"),
        ({"decompositions": {"aten.gelu": None}}, "overload"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_with_the_near_one(options: dict[str, Any], said: str) -> None:
    error = error_of(add_mul, X, X, **options)
    assert isinstance(error, OptionError)
    assert said in str(error)


def test_options_that_are_no_dict_are_refused() -> None:
    with pytest.raises(BackendCompilerFailed, match=r"a dict of values by name, not \[1\]"):
        torch.compile(add_mul, backend="npu_iree", options=[1])(X, X)
    with pytest.raises(OptionError, match=r"not \[1\]"):
        npu_iree.explain(add_mul, X, X, options=[1])


def test_two_models_with_different_options_do_not_influence_each_other(
    counts: Counter[str],
) -> None:
    runs = [
        (compiled(add_mul), 0),
        (compiled(add_mul, disabled_ops=["add"]), 1),
        (compiled(add_mul, target="npu-virtual", disabled_ops=["mul", "add"]), 2),
        (compiled(add_mul, fallback="error"), 0),
    ]
    for run, host_ops in runs:
        counts.clear()
        assert_same(run(X, X + 1), add_mul(X, X + 1))
        assert counts["host_ops"] == host_ops
    counts.clear()
    for run, _ in reversed(runs):
        assert_same(run(X, X * 2), add_mul(X, X * 2))
    assert not counts


def test_options_of_an_inner_dict_are_taken_when_compile_is_called() -> None:
    options: dict[str, Any] = {"disabled_ops": ["add"]}
    run = torch.compile(add_mul, backend="npu_iree", options=options)
    assert_same(run(X, X), add_mul(X, X))
    assert options == {"disabled_ops": ["add"]}


@pytest.mark.slow
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("disabled", [pytest.param([], marks=pytest.mark.sweep), ["mul"]])
def test_four_threads_share_one_compiled_model(
    disabled: list[str], warm: bool, target: str, counts: Counter[str]
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(x) * y + x

    run = compiled(function, target=target, disabled_ops=disabled)
    if warm:
        with torch.no_grad():
            run(X, X + 1)
    start, errors = threading.Barrier(4), []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        start.wait()
        try:
            with torch.no_grad():
                for _ in range(25):
                    x, y = torch.randn(2, 4, 4, generator=generator)
                    assert_same(run(x, y), function(x, y))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert counts["graphs"] == 1 or not warm  # Dynamo lets first calls compile side by side


def test_a_region_that_the_compiler_refuses_goes_to_the_host_with_one_warning(
    target: str, counts: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        run = compiled(add_mul, target=target, flags=BAD_FLAGS)
        for scale in (1, 2):
            assert_same(run(X * scale, X), add_mul(X * scale, X))
    assert (counts["host_ops"], counts["regions"]) == (3, 0)
    ours = [r for r in caplog.records if r.name.startswith(("npu_iree", "lowering"))]
    assert [r.levelname for r in ours if r.levelno >= logging.WARNING] == ["WARNING"]


def test_what_would_crash_in_pytorchs_kernel_is_an_error() -> None:
    lstm = torch.nn.LSTM(4, 8)
    with torch._dynamo.config.patch(allow_rnn=True):
        y, _ = compiled(lstm)(torch.randn(3, 2, 4))
    with pytest.raises(UnsupportedOpError, match="allow_rnn = False"):
        y.sum().backward()


def test_a_refused_op_takes_no_other_op_to_the_host(counts: Counter[str]) -> None:
    def function(x: torch.Tensor, z: torch.Tensor) -> Any:
        return torch.relu(x) @ x, z + z

    z = torch.complex(X, X)
    assert_same(compiled(function)(X, z), function(X, z))
    assert counts["host_ops"] <= 1
    assert counts["regions"] >= 1


def test_the_first_call_of_a_complex_op_on_the_host_is_as_right_as_the_second() -> None:
    """AOTAutograd's mode is active in a first call; PyTorch's kernel of this op is wrong in it."""
    z = torch.complex(X, X.flip(0) + 1)
    run = compiled(torch.linalg.pinv)
    for _ in range(2):
        assert_same(run(z), torch.linalg.pinv(z))


def test_fallback_error_raises_what_the_compiler_said() -> None:
    error = error_of(add_mul, X, X, flags=BAD_FLAGS, fallback="error")
    assert isinstance(error, StageError)
    assert error.stage == "linalg-to-flow"
    assert "nonsense" in error.diagnostics


REFUSED_FLAGS = {
    "--iree-no-such-flag": "option not found: iree-no-such-flag (given: ",
    "--iree-llvmcpu-target-cpu=nonsense": "nonsense: there is no such CPU. There are",
    "--iree-opt-level=O9": "option parse error for: iree-opt-level=O9 (given: ",
}


@pytest.mark.parametrize("fallback", ["host", "error"])
def test_a_flag_that_the_compiler_refuses_is_an_error_and_no_ops_fault(
    fallback: str, counts: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    for flag, told in REFUSED_FLAGS.items():
        with caplog.at_level(logging.INFO, logger="lowering.pipeline"):
            error = error_of(add_mul, X, X, flags=[flag], fallback=fallback)
        assert isinstance(error, FlagError), flag
        assert str(error).startswith("iree-compile refuses a flag: ")
        assert told in str(error)
        assert (counts["healed_ops"], caplog.messages) == (0, []), f"{flag}: no other set is tried"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to(torch.int8) @ x.to(torch.int8),
        lambda x: x.to(torch.int8) // 3,
    ],
    ids=["product", "quotient"],
)
def test_a_native_crash_of_the_compiler_does_not_take_the_process(
    function: Callable[..., Any],
) -> None:
    x = torch.arange(9.0).view(3, 3)
    assert_same(compiled(function)(x), function(x))


def test_the_compiler_writes_nothing_to_the_screen(capfd: pytest.CaptureFixture[str]) -> None:
    x = X.double()
    assert_same(compiled(torch.tanh)(x), torch.tanh(x))
    assert capfd.readouterr() == ("", "")


def test_tensors_on_other_devices_are_eagers_and_told(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.empty(3, 4, device="meta")
    with caplog.at_level(logging.WARNING):
        result = compiled(add_mul)(x, x)
    assert (result.device.type, result.shape) == ("meta", x.shape)
    assert "runs in eager: its inputs are on meta" in caplog.text
    assert "its inputs are on meta" in str(error_of(add_mul, x, x, fallback="error"))


def test_explaining_takes_no_places_of_what_is_compiled(counts: Counter[str]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    for size in range(2, 14):  # Dynamo keeps eight graphs of a function
        assert len(npu_iree.explain(function, torch.ones(3, size)).graphs) == 1
    assert counts["graphs"] == 0
    torch.compile(function, backend="npu_iree")(torch.ones(3, 4))
    assert counts["graphs"] == 1
