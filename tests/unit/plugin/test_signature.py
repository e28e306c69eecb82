"""Which objects meet which contract, by signature and methods."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from buffer_rl.errors import ConfigError, PluginError
from buffer_rl.kinds.table import KINDS
from buffer_rl.plugin.calls import construct
from buffer_rl.plugin.registry import check_contract
from buffer_rl.plugin.signature import call_rollout, fitting_kinds, takes_evaluation
from buffer_rl.trainer.torch_trainer import TorchTrainer

FUNCTION_KINDS = [name for name, kind in KINDS.items() if not kind.constructed]
CLASS_KINDS = [name for name, kind in KINDS.items() if kind.constructed]


def make_function(kind: str, prefix: str = "def", drop: int = 0) -> Any:
    """A function with the arguments of a kind, less the last ``drop`` of them."""
    names = KINDS[kind].positional
    scope: dict[str, Any] = {}
    exec(f"{prefix} plugin({', '.join(names[: len(names) - drop])}): return None", scope)
    return scope["plugin"]


def make_class(kind: str, without: str = "") -> type:
    """A class with the constructor and the methods of a constructed kind, as loosely typed as possible."""
    row = KINDS[kind]
    names = {*row.methods, *row.attributes} - {without}
    body: dict[str, Any] = {name: lambda self, *args: None for name in names}
    scope: dict[str, Any] = {}
    exec(f"def __init__(self, {', '.join(row.positional)}): pass", scope)
    return type("Plugin", (), body | {"__init__": scope["__init__"]})


@pytest.mark.parametrize("kind", FUNCTION_KINDS)
def test_a_function_with_the_arguments_of_its_kind_is_accepted_and_one_with_fewer_is_not(kind: str) -> None:
    check_contract(kind, make_function(kind))
    with pytest.raises(PluginError, match="it cannot be called with"):
        check_contract(kind, make_function(kind, drop=2 if kind == "rollout" else 1 + KINDS[kind].optional))


def test_an_argument_that_a_kind_calls_optional_may_be_left_out() -> None:
    check_contract("all_samples_process", make_function("all_samples_process", drop=1))


@pytest.mark.parametrize("kind", FUNCTION_KINDS)
def test_async_is_accepted_exactly_where_the_kind_says_so(kind: str) -> None:
    function = make_function(kind, "async def")
    if KINDS[kind].may_be_async:
        check_contract(kind, function)
    else:
        with pytest.raises(PluginError, match=f"a {kind} cannot be async; found async plugin"):
            check_contract(kind, function)


@pytest.mark.parametrize("kind", CLASS_KINDS)
def test_a_class_needs_every_method_and_its_constructor(kind: str) -> None:
    check_contract(kind, make_class(kind))
    for method in (*KINDS[kind].methods, *KINDS[kind].attributes):
        with pytest.raises(PluginError, match=f"the class lacks {method}"):
            check_contract(kind, make_class(kind, without=method))
    with pytest.raises(PluginError, match="it cannot be constructed with"):
        check_contract(kind, type("Plugin", (make_class(kind),), {"__init__": lambda self, *, needed: None}))
    check_contract(kind, lambda *args: None)


def test_a_converter_of_the_earlier_contract_is_refused_with_what_to_derive_it_from() -> None:
    class Old:
        def __init__(self, args: Any) -> None: ...
        def to_trainer(self, name: str, tensor: Any) -> Iterator[Any]: ...
        def to_hf(self, name: str, tensor: Any) -> Iterator[Any]: ...

    with pytest.raises(PluginError, match="the class lacks load, export") as caught:
        check_contract("converter", Old)
    assert "derive the class from buffer_rl.trainer.converter.NameMap" in caught.value.hint
    with pytest.raises(PluginError, match=r"expected: an object with load, export\n.*derive the class from"):
        construct("converter", "mine:make", lambda args: Old(args), None)
    with pytest.raises(PluginError) as caught:
        check_contract("converter", make_class("converter", without="load"))
    assert caught.value.hint == ""


def test_a_trainer_of_the_earlier_contract_is_refused_though_it_derives_from_the_newest() -> None:
    class Old(TorchTrainer):
        def forward_backward(self, batch: Any) -> dict[str, float]:
            raise AssertionError("it is not called")

    class Older(TorchTrainer):
        def __init__(self, args: Any, rank: int, world_size: int) -> None: ...

    class Step(TorchTrainer):
        def optimizer_step(self) -> dict[str, float]:  # type: ignore[override]
            raise AssertionError("it is not called")

    for cls, what in ((Old, "of an earlier contract"), (Older, "cannot be constructed"), (Step, "cannot be called")):
        with pytest.raises(PluginError, match=what) as caught:
            check_contract("trainer", cls)
        assert "cls(args, rank, world_size, objective)" in caught.value.hint


def test_a_method_with_the_wrong_arguments_is_named() -> None:
    class Logger:
        def __init__(self, args: Any, run_dir: str) -> None: ...
        def log(self, metrics: Any) -> None: ...
        def close(self) -> None: ...

    with pytest.raises(PluginError, match=r"its method log cannot be called with \(metrics, step\)"):
        check_contract("logger", Logger)


def test_class_and_static_methods_count_without_self() -> None:
    class Logger:
        def __init__(self, args: Any, run_dir: str) -> None: ...
        @staticmethod
        def log(metrics: Any, step: int) -> None: ...
        @classmethod
        def close(cls) -> None: ...

    check_contract("logger", Logger)


def test_an_instance_an_abstract_class_and_an_async_factory_are_refused_where_a_class_is_due() -> None:
    class Abstract(abc.ABC):
        def __init__(self, args: Any) -> None:
            self.args = args

        @abc.abstractmethod
        def prepare(self, source: Any, version: int) -> Any: ...

    async def factory(args: Any) -> None: ...

    with pytest.raises(PluginError, match="the class is abstract: prepare"):
        check_contract("weight_transport", Abstract)
    with pytest.raises(PluginError, match="is not callable"):
        check_contract("weight_transport", make_class("weight_transport")(None))
    with pytest.raises(PluginError, match="it is async"):
        check_contract("weight_transport", factory)


def test_a_class_serves_as_rollout_if_its_instances_can_be_called() -> None:
    class Rollout:
        def __init__(self, args: Any) -> None: ...
        async def __call__(self, args: Any, rollout_id: int, buffer: Any, evaluation: bool = False) -> None: ...

    class Short(Rollout):
        async def __call__(self, args: Any, rollout_id: int) -> None: ...  # type: ignore[override]

    class Mute:
        def __init__(self, args: Any) -> None: ...

    class Greedy(Rollout):
        def __init__(self, args: Any, more: Any) -> None: ...

    check_contract("rollout", Rollout)
    with pytest.raises(PluginError, match="it cannot be called with"):
        check_contract("rollout", Short)
    with pytest.raises(PluginError, match="the class has no __call__"):
        check_contract("rollout", Mute)
    with pytest.raises(PluginError, match="it cannot be constructed with"):
        check_contract("rollout", Greedy)
    with pytest.raises(PluginError, match="it is a class"):
        check_contract("reward", type("Pair", (), {"__init__": lambda self, args, sample: None}))


def test_evaluation_goes_by_keyword_or_by_position() -> None:
    def keyword(args: Any, rollout_id: int, buffer: Any, *, evaluation: bool = False) -> Any:
        return (rollout_id, evaluation)

    def position(a: Any, b: int, c: Any, d: bool) -> Any:
        return (b, d)

    def without(args: Any, rollout_id: int, buffer: Any) -> None: ...

    for function in (keyword, position):
        check_contract("rollout", function)
        assert call_rollout(function, None, 3, None, True) == (3, True)
    with pytest.raises(PluginError, match="it cannot be called with"):
        check_contract("rollout", without)


def test_a_generate_function_may_take_evaluation() -> None:
    def without(args: Any, sample: Any, sampling_params: Any) -> None: ...
    def required(args: Any, sample: Any, sampling_params: Any, *, evaluation: bool) -> None: ...
    def by_position(args: Any, sample: Any, sampling_params: Any, evaluation: bool) -> None: ...
    def keywords(args: Any, sample: Any, sampling_params: Any, **kwargs: Any) -> None: ...
    def other(args: Any, sample: Any, sampling_params: Any, turns: int) -> None: ...

    for function in (without, required, by_position, keywords):
        check_contract("generate", function)
        assert takes_evaluation(function) == (function in (required, by_position))
    with pytest.raises(PluginError, match="it cannot be called with"):
        check_contract("generate", other)


def test_a_model_provider_takes_options_or_the_place_of_a_part() -> None:
    def part(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> None: ...
    def other(first: bool, last: bool) -> None: ...

    def with_more(pre_process: bool, post_process: bool, build: Any) -> None: ...

    check_contract("model_provider", part)
    check_contract("model_provider", with_more)
    assert fitting_kinds(part)[0] == "model_provider"
    with pytest.raises(PluginError, match=r"it cannot be called with \(args\)"):
        check_contract("model_provider", other)


def test_generators_are_refused() -> None:
    def lazy(args: Any, sample: Any) -> Iterator[float]:
        yield 1.0

    async def lazier(args: Any, sample: Any) -> AsyncIterator[float]:
        yield 1.0

    class Lazy:
        def __call__(self, args: Any, sample: Any) -> Iterator[float]:
            yield 1.0

    for obj in (lazy, lazier, Lazy()):
        with pytest.raises(PluginError, match="it is a generator"):
            check_contract("reward", obj)


def test_an_async_callable_object_counts_as_async() -> None:
    class Estimator:
        async def __call__(self, args: Any, batch: Any) -> None: ...

    check_contract("reward", Estimator())
    with pytest.raises(PluginError, match="cannot be async"):
        check_contract("advantage", Estimator())


def test_a_builtin_without_a_signature_is_accepted_and_a_required_keyword_is_not() -> None:
    check_contract("reward", max)

    def needs(args: Any, sample: Any, *, key: str) -> float:
        return 1.0

    with pytest.raises(PluginError, match="missing a required argument: 'key'"):
        check_contract("reward", needs)


def test_the_kind_is_guessed_by_the_names_of_the_arguments() -> None:
    for kind in FUNCTION_KINDS:
        same_names = [other for other in FUNCTION_KINDS if KINDS[other].positional == KINDS[kind].positional]
        assert fitting_kinds(make_function(kind))[: len(same_names)] == same_names
    assert fitting_kinds(lambda one, two: None)[0] == "reward"
    assert fitting_kinds(lambda sample: None) == []
    for kind in CLASS_KINDS:
        assert kind in fitting_kinds(make_class(kind))


def test_an_unknown_kind_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="there is no plugin kind"):
        check_contract("rewards", print)
