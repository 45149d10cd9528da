"""Check that a module is well formed in its phase."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from ..alike.alike_programs import AlikePrograms, alike_programs_of
from ..attributes import Stream
from ..ops import Call, Communication, CopyStart, Free, Op, Return, Value, Wait
from ..ops.module import Function, FunctionKind, Module, Program, Vjp
from ..ops.rules import CheckContext, Problem, check_ranks
from ..phases import Phase, has_futures, has_places
from ..text.diagnostics import Diagnostic, IRError
from ..types import FutureType, Mesh, Place, TensorType, UnitType, ValueType, is_on_host
from .alike_rules import check_variations
from .batch_rules import check_batches
from .body_rules import check_bodies
from .channel_rules import check_channel, check_channel_op, unmatched, unmatched_alike
from .graph_rules import check_graphs
from .layout_rules import check_mesh, check_op, check_signature, check_value
from .parameter_rules import check_parameters
from .reserve_rules import check_reserves
from .summand_rules import check_summands

_SHOWN = 20
"""The most ranks that a message lists."""


def verify_program(module: Module, program: Program) -> None:
    """Check the declarations of a scheduled module, and one of its programs.

    The rules between ranks are for `verify`: that messages have all their ends, for one.

    Raises:
        IRError: they break a rule.
    """
    problems = [*_declarations(module), *_ProgramChecker(module, program).check()]
    problems += _actors(module, (program,))
    if problems:
        raise IRError(*problems)


def verify(module: Module) -> None:
    """Check that a module keeps all rules of its phase.

    Raises:
        IRError: the module breaks a rule. There is a diagnostic for each declaration and each op
            that is wrong, with its first problem.
    """
    alike = alike_programs_of(module) if module.phase is Phase.SCHEDULED else None
    if alike is not None and next(_problems_of_alike(module, alike), None) is None:
        return
    problems = [*_declarations(module), *_programs(module)]
    for body in module.bodies.values():
        problems += _ProgramChecker(module, body).check()
    checkers = [_ProgramChecker(module, program) for program in module.programs]
    for checker in checkers:
        problems += checker.check()
    problems += check_bodies(module)
    problems += _actors(module, module.programs)
    if not problems and has_futures(module.phase):
        problems += unmatched(module)
    if not problems and any(checker.laid_out for checker in checkers):
        problems += check_summands(module.program, module.functions)
    stored = any(function.parameter is not None for function in module.functions.values())
    if not problems and stored and has_places(module.phase):
        problems += check_parameters(module.program, module.functions)
    if problems:
        raise IRError(*problems)


def _problems_of_alike(module: Module, alike: AlikePrograms) -> Iterator[Diagnostic]:
    """Problems of a scheduled module, none if there are none.

    Of programs that are alike, one is checked op by op, and of the others what tells them from it.
    If anything is wrong, the programs have to be checked one by one: these problems may name a
    rank that stands for others.
    """
    yield from _declarations(module)
    yield from _lacking(module, alike.ranks)
    for body in (*module.bodies.values(), *alike.representatives):
        yield from _ProgramChecker(module, body).check()
    yield from check_bodies(module)
    yield from _actors(module, alike.representatives)
    for group in alike.groups:
        yield from check_variations(module, group)
    yield from unmatched_alike(module, alike)


def _declarations(module: Module) -> Iterator[Diagnostic]:
    for name, mesh in module.meshes.items():
        if problem := check_mesh(name, mesh, module):
            yield Diagnostic(problem, help="rename it, or give it ranks of the world")
    for name, function in module.functions.items():
        if problem := _function(name, function) or check_signature(function, module.phase):
            yield Diagnostic(problem, loc=function.loc)
    for name, vjp in module.vjps.items():
        if problem := _vjp(name, vjp, module):
            yield Diagnostic(f"vjp @{name}: {problem}", help=_VJP_HELP)
    for id_, channel in module.channels.items():
        if id_ != channel.id:
            yield Diagnostic(f"channel {channel.id} is in the table as {id_}")
        elif problem := check_channel(channel, module):
            yield Diagnostic(problem)


def _function(name: str, function: Function) -> str | None:
    if name != function.name:
        return f"function @{function.name} is in the table as @{name}"
    if any(type_.place is not None for type_ in (*function.inputs, *function.outputs)):
        return f"function @{name} has a place in its signature; its calls say where it runs"
    for output, input_ in function.aliases:
        if not (0 <= output < len(function.outputs) and 0 <= input_ < len(function.inputs)):
            return f"function @{name} has the alias {output} -> {input_}, which is out of range"
    on_host = any(map(is_on_host, (*function.inputs, *function.outputs)))
    if on_host and function.kind is not FunctionKind.HOST:
        return f"function @{name} takes or returns what is in a host's memory; a call takes it back"
    if not _are_indices(function.offloads, len(function.outputs)):
        return f"offloads of function @{name} are not ascending indices of its outputs"
    return None


_VJP_HELP = (
    "forward returns the outputs, then the saved values; backward takes the saved values, then "
    "the cotangents of grad_outputs, and returns those of grad_inputs"
)


def _vjp(name: str, vjp: Vjp, module: Module) -> str | None:
    if name != vjp.name:
        return f"it is in the table as @{name}, but its name is @{vjp.name}"
    forward, backward = module.functions.get(vjp.forward), module.functions.get(vjp.backward)
    if forward is None or backward is None:
        missing = vjp.forward if forward is None else vjp.backward
        return f"the module does not declare its function @{missing}"
    saved = len(backward.inputs) - len(vjp.grad_outputs)
    outputs = len(forward.outputs) - saved
    if saved < 0 or outputs < 0:
        return (
            f"@{backward.name} takes {len(backward.inputs)} inputs, which do not split into "
            f"saved values of @{forward.name} and {len(vjp.grad_outputs)} cotangents"
        )
    if not _are_indices(vjp.grad_outputs, outputs):
        return f"grad_outputs are not ascending indices of its {outputs} outputs"
    if not _are_indices(vjp.grad_inputs, len(forward.inputs)):
        return f"grad_inputs are not ascending indices of its {len(forward.inputs)} inputs"
    cotangents = tuple(forward.outputs[index] for index in vjp.grad_outputs)
    if backward.inputs != forward.outputs[outputs:] + cotangents:
        return f"the inputs of @{backward.name} are not the saved values, then the cotangents"
    gradients = tuple(forward.inputs[index] for index in vjp.grad_inputs)
    if backward.outputs != gradients and (gradients or backward.outputs != (UnitType(),)):
        return f"the outputs of @{backward.name} are not the cotangents of grad_inputs"
    return _halves(vjp, backward, module)


def _halves(vjp: Vjp, backward: Function, module: Module) -> str | None:
    """The problem with the halves of a backward, if there is one."""
    names = [name for name in (vjp.input, vjp.weight) if name is not None]
    for name in names:
        if name not in module.functions:
            return f"the module does not declare its function @{name}"
    if vjp.weight is None:
        return "it has input, but no weight" if names or vjp.kept else None
    if not _are_indices(vjp.kept, len(backward.inputs)):
        return f"kept are not ascending indices of the {len(backward.inputs)} inputs of backward"
    left: tuple[ValueType, ...] = ()
    if vjp.input is not None:
        first, count = module.functions[vjp.input], len(vjp.grad_inputs)
        if first.inputs != backward.inputs:
            return f"@{first.name} does not take what @{backward.name} takes"
        if not count or first.outputs[:count] != backward.outputs:
            return f"the outputs of @{first.name} do not begin with the cotangents of grad_inputs"
        left = first.outputs[count:]
    elif vjp.grad_inputs:
        return "it has weight and grad_inputs, but no input"
    weight = module.functions[vjp.weight]
    if weight.inputs != tuple(backward.inputs[i] for i in vjp.kept) + left:
        return f"the inputs of @{weight.name} are not what is kept, then what input leaves to it"
    if weight.outputs != (UnitType(),):
        return f"@{weight.name} does not return unit"
    return None


def _are_indices(indices: tuple[int, ...], length: int) -> bool:
    return list(indices) == sorted(set(indices)) and all(0 <= i < length for i in indices)


def _programs(module: Module) -> Iterator[Diagnostic]:
    ranks = [program.rank for program in module.programs]
    if module.phase is not Phase.SCHEDULED:
        if ranks != [None]:
            yield Diagnostic(
                f"a module in phase {module.phase} has one program over all ranks, "
                f"this one has {len(ranks)} programs, of ranks {ranks}"
            )
        return
    yield from _lacking(module, ranks)


def _lacking(module: Module, ranks: Collection[int | None]) -> Iterator[Diagnostic]:
    """The problem that scheduled programs are not those of all ranks, one each."""
    present = set(ranks)
    lacking = (rank for rank in range(module.world) if rank not in present)
    missing = list(itertools.islice(lacking, _SHOWN))
    if missing or len(ranks) != module.world:
        more = ", and more" if len(missing) == _SHOWN else ""
        description = f"none for {missing}{more}" if missing else f"{len(ranks)}"
        yield Diagnostic(
            f"a scheduled module has one program for each of its {module.world} ranks, "
            f"this one has {description}"
        )


def _actors(module: Module, programs: Sequence[Program]) -> Iterator[Diagnostic]:
    """The calls on actors that are not where the actor lives."""
    first: dict[str, tuple[object, Program, Op]] = {}
    placed = has_places(module.phase)
    for program in programs:
        homes: dict[str, Place] = {}
        for op in program.ops:
            if not isinstance(op, Call):
                continue
            function = module.functions.get(op.fn.name)
            if function is None or function.actor is None:
                continue
            at = op.place if placed else homes.get(function.name)
            if at is None and not placed:
                at = homes[function.name] = _home(function, program)
            where, first_program, first_op = first.setdefault(function.actor, (at, program, op))
            if where is not at and where != at:
                yield Diagnostic(
                    f"a call on actor {function.actor} at {at}, which lives at {where}",
                    op,
                    program,
                    notes=(Diagnostic("an earlier call is here", first_op, first_program),),
                )


def _home(function: Function, program: Program) -> Place:
    """The place of a function's actor, as the program of a rank that calls the function sees it."""
    rank = program.rank or 0
    return Place(function.ranks) if rank in function.ranks else Place((rank,))


class _ProgramChecker:
    """Checks one program; tracks which values are defined, by which ops, and which are freed.

    Attributes:
        laid_out: whether any value so far has a layout, or is at a mesh.
    """

    def __init__(self, module: Module, program: Program) -> None:
        self._module = module
        self._program = program
        self._context = CheckContext(module, program)
        self._is_body = module.bodies.get(program.name) is program
        self._placed = has_places(module.phase) and not self._is_body
        self._defined: dict[str, Value] = {}
        self._makers: dict[Value, Op] = {}
        self._freed: set[Value] = set()
        self.laid_out = False
        self._ill: set[Value] = set()
        self._admitted: dict[type[Op], bool] = {}
        self._has_streams = any(op.stream is not None for op in program.ops)

    def check(self) -> Iterator[Diagnostic]:
        for value in self._program.params:
            try:
                self._define(value)
                if isinstance(value.type, FutureType):
                    raise Problem(f"parameter %{value.name} is a future")
                if is_on_host(value.type):
                    raise Problem(f"parameter %{value.name} is in the memory of a host")
            except Problem as problem:
                yield Diagnostic(problem.message, program=self._program, help=problem.help)
        for index, op in enumerate(self._program.ops):
            try:
                self._check_op(op, index)
            except Problem as problem:
                yield Diagnostic(problem.message, op, self._program, problem.value, problem.help)
        yield from check_batches(self._module, self._program)
        if self._module.phase is Phase.SCHEDULED:
            yield from check_graphs(self._module, self._program)
        yield from check_reserves(self._program)
        if not self._program.ops or not isinstance(self._program.ops[-1], Return):
            yield Diagnostic(
                "the program does not end in return",
                self._program.ops[-1] if self._program.ops else None,
                self._program,
                help="write return() even where nothing is returned",
            )

    def _check_op(self, op: Op, index: int) -> None:
        try:
            self._check_uses(op)
        finally:  # a wrong op still makes its results, so that their uses are no further errors
            for value in op.results:
                self._define(value)
                self._makers[value] = op
        phase = self._module.phase
        admitted = self._admitted.get(type(op))
        if admitted is None:
            admitted = self._admitted[type(op)] = phase in op.phases
        if not admitted:
            raise Problem(f"{op.opcode} in phase {phase}", op.remedy)
        if isinstance(op, Return) and index != len(self._program.ops) - 1:
            raise Problem("return is not the last op", "move it to the end")
        if self._ill and not self._ill.isdisjoint(op.operands):
            return  # reported where they are made
        if self.laid_out and not (self._is_body and isinstance(op, Return)):
            check_op(op, phase)  # except for returns of bodies, which have the function's layouts
        _check_memory(op, self._module.functions)
        op.check(self._context)
        if self._placed:
            op.check_places(self._context)
            op.check_operand_places(self._context)
        elif op.stream is not None:
            self._check_stream(op, op.stream)
        elif self._has_streams and isinstance(op, Communication):
            raise Problem(
                f"{op.opcode} has no stream, and other ops of its program have one",
                "without a stream it would wait for nothing; assign-streams chooses one",
            )
        if isinstance(op, Communication):
            check_channel_op(op, self._module, self._program.rank)
        if isinstance(op, Free):
            self._freed.add(op.operands[0])

    def _define(self, value: Value) -> None:
        if value.name in self._defined:
            raise Problem(f"%{value.name} is defined twice", "give it another name", value)
        self._defined[value.name] = value
        _check_value_place(value, self._module, self._is_body)
        type_ = value.type
        inner = type_.value if type(type_) is FutureType else type_
        if (type(inner) is TensorType and inner.layout is not None) or type(inner.place) is Mesh:
            self.laid_out = True
            self._ill.add(value)
            check_value(value, self._module)
            self._ill.remove(value)

    def _check_uses(self, op: Op) -> None:
        takes_futures = isinstance(op, Wait)
        for value in op.operands:
            if self._defined.get(value.name) is not value:
                raise Problem(
                    f"%{value.name} is used before it is defined",
                    "an operand is a parameter, or the result of an earlier op",
                    value,
                )
            if not takes_futures and isinstance(value.type, FutureType):
                raise Problem(
                    f"{op.opcode} takes %{value.name}, which is only promised yet",
                    f"wait for it first: %x = wait(%{value.name}) : {value.type.value}",
                    value,
                )
            if value in self._freed:
                raise Problem(f"%{value.name} is used after it was freed", "", value)

    def _check_stream(self, op: Op, stream: Stream) -> None:
        """Check that the op may be on its stream, and that its operands are available there."""
        if stream not in op.streams:
            streams = " or ".join(sorted(choice.value for choice in op.streams))
            raise Problem(
                f"{op.opcode} is on stream {stream.value}",
                f"it may be on {streams}; assign-streams chooses",
            )
        if isinstance(op, Wait):
            return
        for value in op.operands:
            maker = self._makers.get(value)
            if maker is None or maker.stream is None or maker.stream is stream:
                continue
            raise Problem(
                f"%{value.name} is made on stream {maker.stream.value}, "
                f"but {op.opcode} runs on stream {stream.value}",
                f"wait for it: %x = wait(%{value.name}) {{stream = {stream.value}}}",
                value,
            )


_OF_HOSTS = (CopyStart, Wait, Free)
"""The ops that have to do with tensors in the memory of a host."""


def _check_memory(op: Op, functions: Mapping[str, Function]) -> None:
    """Check that only copies between memories, and what hands these over, name a host's memory."""
    if isinstance(op, _OF_HOSTS):
        return
    function = functions.get(op.fn.name) if isinstance(op, Call) else None
    if function is not None and function.kind is FunctionKind.HOST:
        return
    for value in (*op.operands, *op.results):
        if is_on_host(value.type):
            raise Problem(
                f"{op.opcode} works on the rank's own memory, %{value.name} is in the host's",
                "a copy_start brings it back",
                value,
            )


def _check_value_place(value: Value, module: Module, is_body: bool) -> None:
    """Check that a type has a place, with ranks of the world, exactly if it needs one.

    Types need places in programs over all ranks, and have none in bodies and scheduled programs.
    """
    place = value.type.place
    if is_body:
        if place is not None:
            raise Problem(
                f"the type of %{value.name} has a place, in the body of a function",
                "a body runs where its function is called; leave the place out",
                value,
            )
    elif has_places(module.phase):
        if place is None:
            raise Problem(
                f"the type of %{value.name} has no place",
                f"say where it is, as in {value.type}@0",
                value,
            )
        check_ranks(place, module, f"%{value.name}", value)
    elif place is not None:
        raise Problem(
            f"the type of %{value.name} has a place, in a scheduled program",
            "a scheduled program is of one rank; leave the place out",
            value,
        )
