"""Calling a traced step: signatures, taking arguments apart, putting results together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._pytree import register_pytree_node

import cg
from cg.backends.virtual.world import VirtualWorld
from cg.ir.types import Place
from cg.launch.world.world import use_world
from cg.tracer.errors import TraceError
from cg.tracer.record.session.inputs import InputError, InputSpec
from cg.tracer.record.session.signature import signature_of
from cg.tracer.record.trace import Trace
from cg.tracer.values.specs import TensorSpec
from cg.tracer.values.values import OBJECT

from .step_tools import Bench


class Batch(NamedTuple):
    tokens: Any
    labels: Any


class Pair:
    def __init__(self, one: Any, other: Any) -> None:
        self.both = one, other


register_pytree_node(Pair, lambda pair: (pair.both, None), lambda both, _: Pair(*both))

X = torch.ones(2, 3)
Y = torch.ones(2, dtype=torch.long)


def spec(fn: Any, *args: Any, **kwargs: Any) -> InputSpec:
    return Bench(2).trace(fn, *args, **kwargs).inputs


def flat(x: Any, y: Any = None, n: Any = 3) -> Any:
    return x


def test_values_come_in_the_order_of_parameters() -> None:
    inputs = spec(flat, Batch(X, {"k": Y}), n=4)
    assert inputs.names == ("x.tokens", "x.labels.k", "n")
    a, b = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
    assert inputs.flatten((Batch(a, {"k": b}),), {"n": 4}) == [a, b]
    assert spec(flat, X, Y).flatten((a, b), {}) == [a, b]


def test_parts_of_a_class_that_is_registered_without_names_go_by_their_numbers() -> None:
    inputs = spec(flat, [Pair(X, {"k": Y})])
    assert inputs.names == ("x.0", "x.1")
    assert inputs.flatten(([Pair(X, {"k": Y})],), {}) == [X, Y]


def test_arguments_may_be_given_by_name_or_by_position() -> None:
    inputs = spec(flat, X, y=Y)
    for args, kwargs in (((X, Y), {}), ((X,), {"y": Y}), ((), {"y": Y, "x": X})):
        assert [id(v) for v in inputs.flatten(args, kwargs)] == [id(X), id(Y)]

    def star(x: Any, *rest: Any, **more: Any) -> Any:
        return x

    inputs = spec(star, X, Y, 3, z=X, w=Y)
    found = inputs.flatten((X, Y, 3), {"w": Y, "z": X})
    assert [id(v) for v in found] == [id(X), id(Y), id(X), id(Y)]
    with pytest.raises(InputError, match=r"step\(\) was traced with z; give the same arguments"):
        inputs.flatten((X, Y, 3), {"w": Y})
    with pytest.raises(InputError, match=r"step\(\) was traced without v; give the same"):
        inputs.flatten((X, Y, 3), {"w": Y, "z": X, "v": X})
    with pytest.raises(InputError, match=r"step\(\) was traced for arguments of another structure"):
        inputs.flatten((X, Y, 3, 4), {"w": Y, "z": X})


def test_objects_may_be_anything() -> None:
    inputs = spec(flat, OBJECT, {"o": OBJECT})
    assert inputs.flatten(("word", {"o": [1, {"a": 2}]}), {}) == ["word", [1, {"a": 2}]]


def test_wrong_arguments_are_named() -> None:
    inputs = spec(flat, X, Batch(Y, 7))
    good = Batch(Y, 7)
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((), {}, r"step\(\): missing a required argument: 'x'"),
        ((X, good, 1, 2), {}, r"step\(\): too many positional arguments"),
        ((X, good), {"z": 1}, r"step\(\): got an unexpected keyword argument 'z'"),
        ((X,), {}, r"step\(\) was traced with y; give the same arguments, or lower it again"),
        ((X, good, 3), {}, r"step\(\) was traced without n; give the same arguments"),
        ((X, (Y, 7)), {}, r"step\(\) was traced for arguments of another structure: "),
        (
            (torch.ones(3, 2), good),
            {},
            r"x of step\(\) must be float32\[2,3\], .* is float32\[3,2\]",
        ),
        ((Y, good), {}, r"argument x of step\(\) must be float32\[2,3\], .* and is int64\[2\]"),
        ((X.double(), good), {}, r"must be float32\[2,3\], as when .* and is float64\[2,3\]"),
        (("text", good), {}, r"argument x of step\(\) must be float32\[2,3\], .* and is 'text'"),
        ((X, Batch(None, 7)), {}, r"argument y.tokens of step\(\) must be int64\[2\], .* is None"),
        ((X, Batch(Y, 8)), {}, r"y.labels of step\(\) is static: it was 7 .* and is 8 now"),
        ((X, Batch(Y, 7.0)), {}, r"y.labels of step\(\) is static: it was 7 .* and is 7.0 now"),
        (
            (X.clone().requires_grad_(), good),
            {},
            r"x of step\(\) requires a gradient.*x.detach\(\)",
        ),
    ]
    for args, kwargs, message in cases:
        with pytest.raises(InputError, match=message):
            inputs.flatten(args, kwargs)


def test_tensors_have_elements_and_a_place_for_each() -> None:
    inputs = spec(flat, X)
    with pytest.raises(InputError, match=r"x of step\(\) is a tensor of layout torch.sparse_coo"):
        inputs.flatten((X.to_sparse(),), {})
    with pytest.raises(InputError, match=r"x of step\(\) is on 'meta', where tensors have"):
        inputs.flatten((X.to("meta"),), {})


def test_a_call_that_fitted_changes_nothing_for_the_next() -> None:
    inputs = spec(flat, X, Y)
    given = [(X, Y), (X.t().clone().t(), Y), (torch.nn.Parameter(X, False), Y), (X, Y)]
    for args in given:
        found = inputs.flatten(args, {})
        assert [id(value) for value in found] == [id(arg) for arg in args]
    wrong: list[tuple[Any, ...]] = [(X,), (X, Y, 1), (Y, X), (X.to_sparse(), Y), (X, None), ()]
    wrong += [(X.to("meta"), Y), (torch.nn.Parameter(X), Y), (X.t(), Y), (X, Y[None])]
    for args in wrong:
        with pytest.raises(InputError, match=r"step\(\)"):
            inputs.flatten(args, {})
    assert inputs.flatten((X, Y), {}) == [X, Y]


class OnGPU(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cpu, is_meta, device = False, False, torch.device("cuda:0")  # type: ignore[assignment]


def test_a_rank_without_a_device_takes_tensors_of_the_host() -> None:
    elsewhere = torch.ones(2, 3).as_subclass(OnGPU)
    anywhere = spec(flat, X)
    assert anywhere.flatten((elsewhere,), {})[0] is elsewhere
    message = r"x of step\(\) is on 'cuda:0', and this rank works in .* pass x.cpu\(\)"
    with pytest.raises(InputError, match=message):
        replace(anywhere, host_only=True).flatten((elsewhere,), {})


class SimpleOptions:
    """Compares by identity."""

    def __init__(self, scale: int) -> None:
        self.scale = scale


@dataclass
class Plain:
    x: Any


@dataclass(frozen=True)
class Frozen:
    x: Any


@dataclass
class Registered:
    x: Any


torch.export.register_dataclass(Registered)


def test_dataclasses() -> None:
    inputs = spec(flat, Registered(OBJECT), Frozen(3))
    assert inputs.flatten((Registered("text"), Frozen(3)), {}) == ["text"]
    assert inputs.names == ("x.x", "y")
    advice = r"call torch.export.register_dataclass\({}\) once, and its fields are arguments"
    for given, why in (
        (Plain(OBJECT), "no pytree, and holds what is known only at run time.*"),
        (Plain(3), "not hashable.*"),
        (Frozen(OBJECT), "no pytree, and holds what is known only at run time.*"),
        (Frozen((1, Frozen([OBJECT]))), "no pytree, and holds what is known only at run time.*"),
    ):
        with pytest.raises(InputError, match=why + advice.format(type(given).__name__)):
            Bench(2).trace(flat, given)


def test_a_step_that_returns_a_dataclass() -> None:
    with pytest.raises(TraceError, match="returns a Frozen, a dataclass that is not") as caught:
        Bench(2).trace(Frozen, X)
    assert "torch.export.register_dataclass(Frozen)" in caught.value.remedy
    returned = Bench(2).trace(Registered, X).outputs
    made = returned.rebuild([Y])
    assert type(made) is Registered
    assert made.x is Y


def test_arguments_that_no_step_takes() -> None:
    cases: list[tuple[Any, str]] = [
        (np.ones(2), r"a numpy array as an argument; pass torch.from_numpy\(array\)"),
        ({1, 2}, r"takes \{1, 2\} as an argument, which is neither a tensor nor hashable"),
        (SimpleOptions(3), r"equal to itself however it changes, .* make it a frozen dataclass"),
        (torch.ones(2).to_sparse(), r"dense tensors only; pass tensor.to_dense\(\)"),
    ]
    for argument, message in cases:
        with pytest.raises(InputError, match=message):
            Bench(2).trace(flat, argument)
    for argument, message in cases[:3]:
        with pytest.raises(InputError, match=message):
            signature_of((argument,), {})
    with pytest.raises(
        InputError, match=r"argument x of step\(\): torch.float8_e4m3fnuz is not supported"
    ):
        Bench(2).trace(flat, torch.ones(2, dtype=torch.float8_e4m3fnuz))
    with pytest.raises(InputError, match="too many positional arguments"):
        Bench(2).trace(lambda x: x, X, X)


def test_only_types_of_examples_matter() -> None:
    examples = (TensorSpec(torch.float32, (2, 3)), torch.empty(2, 3, device="meta"))
    for example in examples:
        inputs = spec(flat, example)
        assert [id(v) for v in inputs.flatten((X,), {})] == [id(X)]


def test_signatures_tell_steps_apart() -> None:
    def key(*args: Any, **kwargs: Any) -> Any:
        found = signature_of(args, kwargs)
        assert hash(found) == hash(signature_of(args, kwargs))
        return found

    assert key(X, Y) == key(torch.zeros(2, 3), Y)
    assert key({"a": X}, [1, None]) == key({"a": X}, [1, None])
    different = [
        key(X),
        key(X, Y),
        key(X, X),
        key((X, Y)),
        key([X, Y]),
        key(X, y=Y),
        key(X.double()),
        key(X.clone().requires_grad_()),
        key(X.T),
        key(X, 1),
        key(X, 1.0),
        key(X, True),
        key(X, "1"),
        key(X, 0.0),
        key(X, -0.0),
        key(X, None),
        key(X, OBJECT),
    ]
    with torch.no_grad():
        different.append(key(X))
    assert len(set(different)) == len(different)


def test_results_are_put_together() -> None:
    def step(x: Any, y: Any) -> Any:
        return Batch({"x": x, "n": 3}, [y, None, x])

    trace = Bench(2).trace_at(step, (X, Y), inputs=Place.of(0), outputs=Place.of(1))
    assert trace.outputs.rebuild((1, 2, 3)) == Batch({"x": 1, "n": 3}, [2, None, 3])
    assert (trace.inputs.place, trace.outputs.place) == (Place.of(0), Place.of(1))
    assert trace.module.program.ops[-1].place == Place.of(1)
    single = Bench(2).trace(flat, X)
    assert single.outputs.rebuild((5,)) == 5
    constant = Bench(2).trace(lambda x: 3, X)
    assert constant.outputs.rebuild(()) == 3


def test_broken_guards_are_told() -> None:
    trace = Bench(2).trace(flat, X)
    trace.check_guards()
    broken = Trace(
        trace.module,
        trace.bodies,
        trace.constants,
        trace.inputs,
        trace.outputs,
        ((lambda: None, None), (lambda: "stage0.depth was 3 and is 4", (0,))),
        trace.instances,
    )
    with pytest.raises(RuntimeError, match=r"was 3 and is 4; step step was traced before that"):
        broken.check_guards()
    with pytest.raises(RuntimeError, match="was 3 and is 4"):
        broken.check_guards(0)
    broken.check_guards(1)  # whose actors are as they were
    assert len(broken.guards_of(1)) == 1


def test_ranks_are_named_by_on() -> None:
    for given, written in ((0, "0"), ([0, 1], "0, 1"), ("a", "0")):
        with pytest.raises(TypeError, match=rf"inputs=cg\.on\({written}\)\)$"):
            cg.trace(inputs=given)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"cg\.trace\(outputs=2\): outputs names ranks by cg\.on"):
        cg.trace(outputs=2)  # type: ignore[call-overload]


def test_the_parts_of_an_input_are_lowered_as_parts() -> None:
    with use_world(VirtualWorld(1)):
        for use in (lambda x: x.key, lambda x: x[0], lambda x: list(x)):
            with pytest.raises(cg.TraceError, match=r'lower\(\{"key": cg\.object\}\)'):
                cg.trace(lambda x, use=use: use(x)).lower(cg.object)
        step = cg.trace(lambda x: (x["a"], x["b"]))
        assert step.lower({"a": cg.object, "b": cg.object}).compile()({"a": 1, "b": 2}) == (1, 2)


def test_what_a_carry_holds_has_no_parts() -> None:
    with use_world(VirtualWorld(1)):
        carried = cg.carry([1, 2], on=0)
        with pytest.raises(cg.TraceError, match="an element of") as caught:
            cg.trace(lambda: carried.get()[0]).lower()
        assert caught.value.remedy == "do it in an actor's method that takes the object"
