"""Names, options and switches of passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from cg.ir.ops.module import Module
from cg.ir.phases import Phase
from cg.passes.base import OptionError, Pass
from cg.passes.manager import registry
from cg.passes.manager.registry import (
    Switches,
    UnknownPassError,
    parse_pipeline,
    parse_switches,
    register,
)
from cg.passes.placement.insert_transfers import InsertTransfers


@dataclass(frozen=True)
class Probe(Pass):
    """Does nothing."""

    count: int = 1
    ratio: float = 0.5
    eager: bool = True
    label: str = "a"
    limit: int | None = None
    object: tuple[int, ...] = ()

    name: ClassVar[str] = "probe"
    requires: ClassVar[tuple[Phase, ...]] = (Phase.TRACED,)
    optional: ClassVar[bool] = True

    def run(self, module: Module) -> bool:
        return False


@pytest.fixture(autouse=True)
def with_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry with one more pass."""
    monkeypatch.setattr(registry, "_PASSES", dict(registry._PASSES))
    register(Probe)


def test_a_pipeline_is_read_with_its_options() -> None:
    text = "dce,insert-transfers{broadcast_from=5},probe{count=2,eager=false,limit=3,label=b}"
    pipeline = parse_pipeline(text)
    assert [pass_.name for pass_ in pipeline] == ["dce", "insert-transfers", "probe"]
    assert pipeline[1] == InsertTransfers(broadcast_from=5)
    assert pipeline[2] == Probe(count=2, eager=False, limit=3, label="b")


@pytest.mark.parametrize(
    ("text", "pass_"),
    [
        ("probe", Probe()),
        (" probe { ratio = 2 } ", Probe(ratio=2.0)),
        ("probe{limit=none}", Probe()),
        ("probe{eager=true}", Probe()),
        ("probe{}", Probe()),
    ],
)
def test_options_have_types(text: str, pass_: Pass) -> None:
    assert parse_pipeline(text) == (pass_,)


def test_what_is_written_is_read_back() -> None:
    pipeline = (Probe(count=3, eager=False, limit=4), Probe(), InsertTransfers(7))
    text = ",".join(map(str, pipeline))
    assert text == "probe{count=3,eager=false,limit=4},probe,insert-transfers{broadcast_from=7}"
    assert parse_pipeline(text) == pipeline
    assert parse_pipeline("") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("probe{cuont=2}", "pass 'probe' has no option 'cuont'; its options: count, eager"),
        ("probe{count=two}", "option 'count' of pass 'probe' is of type int, not 'two'"),
        ("probe{eager=1}", "option 'eager' of pass 'probe' is of type bool, not '1'"),
        ("probe{object=1}", "option 'object' of pass 'probe' has no text form; give it in Python"),
        ("probe{count}", "cannot read option 'count' of pass 'probe'; write option=value"),
        ("probe{count=1,count=2}", "option 'count' of pass 'probe' is given twice"),
        ("probe{count=1", "cannot read the pipeline at 'probe{count=1'; write pass,pass{option="),
        ("dce,,dce", "cannot read the pipeline at ',dce'"),
    ],
)
def test_wrong_options_say_what_is_right(text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_pipeline(text)
    assert message in str(caught.value)


def test_an_unknown_pass_lists_those_there_are() -> None:
    with pytest.raises(
        UnknownPassError, match=r"there is no pass 'dec'; the passes are .*cse, dce"
    ):
        parse_pipeline("dec")


def test_every_pass_says_what_it_does_with_ir() -> None:
    shows = dict.fromkeys(("check-types", "check-deadlock", "check-races"), "Refused")
    for name in registry.names():
        if name == "probe":
            continue
        text = registry.documentation(name)
        assert registry.summary(name).endswith("."), name
        assert "::\n\n" in text, f"'{name}' shows no IR"
        assert shows.get(name, "Before::") in text, f"'{name}' does not show the IR before"


def test_two_passes_of_one_name_and_bad_names_are_refused() -> None:
    @dataclass(frozen=True)
    class Bad(Probe):
        name: ClassVar[str] = "Bad_Name"

    with pytest.raises(ValueError, match="two passes are called 'probe'"):
        register(Probe)
    with pytest.raises(ValueError, match="'Bad_Name' is no name for a pass; write it in kebab"):
        register(Bad)


def test_switches_leave_out() -> None:
    pipeline = (Probe(), InsertTransfers())
    assert Switches().apply(pipeline) == pipeline
    assert parse_switches("-probe").apply(pipeline) == (InsertTransfers(),)
    assert parse_switches(" -probe , +cse").apply(pipeline) == (InsertTransfers(),)
    assert parse_switches("+probe,-cse").apply(pipeline) == pipeline
    assert parse_switches("") == Switches()


def test_later_switches_decide() -> None:
    both = parse_switches("-probe,-cse").then(parse_switches("+probe,-dce"))
    assert (both.on, both.off) == ({"probe"}, {"cse", "dce"})
    assert parse_switches("+probe").then(parse_switches("-probe")).off == {"probe"}


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("probe", OptionError, r"switch 'probe' has no sign; write \+probe or -probe"),
        ("-prob", UnknownPassError, "there is no pass 'prob'; the passes are"),
        (
            "-differentiate",
            OptionError,
            "'differentiate' cannot be switched off: .* are .*cse, dce",
        ),
        ("-dce,+dce", OptionError, "pass 'dce' is switched both on and off"),
        ("-", UnknownPassError, "there is no pass ''"),
    ],
)
def test_wrong_switches_say_what_is_right(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_switches(text)


def test_options_are_described_with_their_defaults() -> None:
    assert InsertTransfers.describe_options() == "{broadcast_from=3}"
    assert Probe.describe_options().startswith(
        "{count=1, ratio=0.5, eager=true, label=a, limit=none"
    )
    assert registry.lookup("dce").describe_options() == ""
