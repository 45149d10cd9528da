"""Bind a rank's program: choose for each op its registers, body or port, and instruction.

Everything that can be decided before the program runs is decided here, once, including which ops
need no instruction at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor

from ...ir.ops import (
    Alloc,
    Assemble,
    Call,
    Collective,
    Constant,
    Copy,
    CopyStart,
    Free,
    Op,
    Recv,
    Reserve,
    Return,
    Send,
    Slice,
    Value,
    View,
    Wait,
)
from ...ir.ops.module import Channel, Function, FunctionKind
from ...ir.text.diagnostics import Diagnostic
from ...ir.types import FutureType, TensorType, UnitType, ValueType
from ..base import (
    Body,
    Boxed,
    BoxedBody,
    Communicator,
    CopyingPort,
    GraphBody,
    Port,
    ReleasingPort,
)
from ..dtypes import TORCH_DTYPES, describe
from ..errors import BindError
from . import builtins, instructions
from .code import Code
from .instruction_info import CLEAR, KEEP, InstructionInfo, Role
from .instructions import Instruction
from .linked import LinkedProgram
from .random import seeded
from .registers import RegisterLayout, given_away, lay_out
from .tensor_regions import assembling, reserving, taking
from .ticket_locks import Tickets, locked_ops
from .type_checks import checked, expected_tensors, misfit
from .value_copies import HostCopyPort, duplicate_object


class Binder:
    """Binds one program; `bind` does it all.

    Args:
        linked: the program, and what it runs with.
        tickets: the tickets of a program that may have several executions in flight; None for a
            program that runs alone on its actors.
        target: the device of tensors; None for the host.
    """

    def __init__(
        self,
        linked: LinkedProgram,
        tickets: Tickets | None = None,
        target: torch.device | None = None,
    ) -> None:
        self._tickets = tickets
        self._target = target
        self._program = linked.program
        self._module = linked.module
        self._bodies = linked.bodies
        self._constants = linked.constants
        self._communicators = linked.communicators
        self._seed = linked.seed
        self._code = code = Code(tickets=tickets)
        self._execution = lambda: code.execution
        self._ports: dict[Value, Port] = {}
        self._indices: dict[Value, int] = {}
        self._known_bodies: dict[str, Body | None] = {}
        self._boxed: dict[str, Boxed] = {}
        self._releasing: dict[type[Port], bool] = {}
        self._copies: dict[int, int] = {}
        self._returned: frozenset[Value] = frozenset()
        self._at = 0
        self._layout: RegisterLayout

    def bind(self) -> Code:
        """The program's instructions.

        Raises:
            BindError: something that the program needs is missing or does not fit.
        """
        self._check_functions()
        self._layout = lay_out(self._program, self._module)
        code = self._code
        code.registers = [None] * self._layout.size
        code.template = [None] * self._layout.size
        arena = self._make_arena()
        acquires, releases = self._make_locks()
        if self._tickets is not None:
            returns = (op for op in self._program.ops if isinstance(op, Return))
            self._returned = frozenset(value for op in returns for value in op.operands)
        for index, op in enumerate(self._program.ops):
            self._at = index
            for acquire in acquires.get(index, ()):
                self._emit(acquire, KEEP)
            self._bind_op(op, arena)
            for release in releases.get(index, ()):
                self._emit(release, KEEP)
        self._finish()
        return code

    def _bind_op(self, op: Op, arena: Tensor) -> None:
        if isinstance(op, Alloc):
            self._bind_alloc(op, arena)
        elif isinstance(op, Collective):
            self._bind_collective(op)
        elif type(op) in _BINDERS:
            _BINDERS[type(op)](self, op)
        else:
            self._fail(op, f"no backend runs `{op.opcode}`", "compile the step first")

    def _fail(self, op: Op, message: str, help_: str = "") -> NoReturn:
        raise BindError(Diagnostic(message, op, self._program, help=help_).render())

    def _emit(
        self, instruction: Instruction, info: InstructionInfo, awaited: int | None = None
    ) -> None:
        self._code.instructions.append(instruction)
        self._code.infos.append(info._replace(op=self._at, awaited=awaited))

    def _register(self, value: Value) -> int:
        return self._layout.registers[value]

    def _check_functions(self) -> None:
        for op in self._program.ops:
            if isinstance(op, Call) and op.fn.name not in self._module.functions:
                self._fail(op, f"the module declares no function @{op.fn.name}")

    def _make_locks(self) -> tuple[dict[int, list[Instruction]], dict[int, list[Instruction]]]:
        """The instructions that acquire locks ahead of ops, and release them behind ops, by op."""
        acquires: dict[int, list[Instruction]] = {}
        releases: dict[int, list[Instruction]] = {}
        if self._tickets is not None:
            registers, functions = self._layout.registers, self._module.functions
            for name, ops in locked_ops(self._program, functions, registers).items():
                acquire, release = self._tickets.acquire_and_release(name)
                acquires.setdefault(ops[0], []).append(acquire)
                releases.setdefault(ops[-1], []).append(release)
        return acquires, releases

    def _make_arena(self) -> Tensor:
        ends = [
            op.offset + op.result.type.nbytes
            for op in self._program.ops
            if isinstance(op, Alloc) and isinstance(op.result.type, TensorType)
        ]
        return torch.empty(max(ends, default=0), dtype=torch.uint8, device=self._target)

    # -- values -----------------------------------------------------------------------------

    def _bind_alloc(self, op: Alloc, arena: Tensor) -> None:
        type_ = op.result.type
        if not isinstance(type_, TensorType):
            self._fail(op, f"`alloc` makes tensors, not {type_}")
        if op.offset % type_.dtype.itemsize:
            self._fail(op, f"offset {op.offset} is not a multiple of {type_.dtype.itemsize} bytes")
        part = arena.narrow(0, op.offset, type_.nbytes)
        buffer = part.view(TORCH_DTYPES[type_.dtype]).view(type_.shape)
        self._code.template[self._register(op.result)] = buffer

    def _bind_constant(self, op: Constant) -> None:
        register, type_ = self._register(op.result), op.result.type
        if op.ref is not None:
            if op.ref.name not in self._constants:
                self._fail(op, f"there is no constant @{op.ref.name}")
            value = self._constants[op.ref.name]
            if misfit([value], expected_tensors([type_])) is not None:
                self._fail(op, f"constant @{op.ref.name} is {describe(value)}, not {type_}")
            self._code.template[register] = value
            return
        if not isinstance(type_, TensorType):
            self._fail(op, f"`fill` makes tensors, not {type_}")
        assert op.fill is not None
        make = instructions.filled(type_, op.fill, self._target)
        if op.result in self._layout.escaping:
            # A user may change it, or keep it: each execution gets its own.
            info = InstructionInfo(Role.COMPUTE, (), (register,))
            self._emit(instructions.store(self._code.registers, register, make), info)
        else:
            self._code.template[register] = make()

    def _bind_view(self, op: View) -> None:
        source, target = self._register(op.operands[0]), self._register(op.result)
        self._emit(
            instructions.view(self._code.registers, source, target, op.dim, op.start, op.length),
            InstructionInfo(Role.COMPUTE, (source,), (target,)),
        )

    def _bind_copy(self, op: Copy) -> None:
        source, target = self._register(op.operands[0]), self._register(op.result)
        if op.buffer is None:
            copy = _duplicate(op.result)
            run = instructions.apply(self._code.registers, source, target, copy)
            sources: tuple[int, ...] = (source,)
        else:
            buffer = self._register(op.buffer)
            run = instructions.copy_into(self._code.registers, source, buffer, target)
            sources = (source, buffer)
        self._emit(run, InstructionInfo(Role.COMPUTE, sources, (target,)))

    def _bind_slice(self, op: Slice) -> None:
        source, target = self._register(op.operands[0]), self._register(op.result)
        type_ = op.operands[0].type
        assert isinstance(type_, TensorType), "a slice is of a tensor"
        self._emit(
            instructions.apply(
                self._code.registers, source, target, taking(op.region, type_.shape)
            ),
            InstructionInfo(Role.COMPUTE, (source,), (target,)),
        )

    def _bind_reserve(self, op: Reserve) -> None:
        targets = tuple(map(self._register, op.results))
        type_ = op.results[0].type
        assert isinstance(type_, TensorType), "storage is reserved for a tensor"
        reserve = reserving(type_, op.regions, self._target)
        self._emit(
            instructions.store_all(self._code.registers, targets, reserve),
            InstructionInfo(Role.COMPUTE, (), targets),
        )

    def _bind_assemble(self, op: Assemble) -> None:
        sources, target = tuple(map(self._register, op.operands)), self._register(op.result)
        if op.is_in_place:
            # An instruction of its own, as an error may stand for any of the parts.
            run = instructions.move(self._code.registers, sources[0], target)
        else:
            type_ = op.result.type
            assert isinstance(type_, TensorType), "an assemble makes a tensor"
            assemble = assembling(type_, op.regions, self._target)
            run = instructions.gathered(self._code.registers, sources, target, assemble)
        self._emit(run, InstructionInfo(Role.COMPUTE, sources, (target,)))

    # -- calls ------------------------------------------------------------------------------

    def _bind_call(self, op: Call) -> None:
        function = self._module.functions[op.fn.name]
        if function.name not in self._known_bodies:
            self._known_bodies[function.name] = self._body(function)
            of_graph = self._bodies.get(function.body_name)
            if function.kind is FunctionKind.GRAPH and isinstance(of_graph, BoxedBody):
                self._boxed[function.name] = of_graph.run_boxed
        body = self._known_bodies[function.name]
        if body is None:
            owner = f"; actor {function.actor} must live on this rank" if function.actor else ""
            self._fail(op, f"there is no body for @{function.body_name}{owner}")
        if (len(op.operands), len(op.results)) != (len(function.inputs), len(function.outputs)):
            self._fail(
                op,
                f"@{function.name} takes {len(function.inputs)} values and returns "
                f"{len(function.outputs)}",
            )
        body = self._adapted(body, function)
        if op.key is not None:
            body = self._seeded(body, op.key)
        inputs = [self._register(value) for value in op.operands]
        outputs = [self._register(value) for value in op.results]
        boxed = self._boxed.get(function.name) if op.key is None else None
        emptied = given_away(self._program, self._layout, self._at) if boxed is not None else ()
        if boxed is not None and emptied:
            run = instructions.call_boxed(boxed, self._code.registers, inputs, outputs, emptied)
        else:
            run = instructions.call(body, self._code.registers, inputs, outputs)
        targets = list(outputs)
        for value in op.results if function.kind is FunctionKind.OPAQUE else ():
            if value in self._returned:
                target, copy = self._copied(value)
                run = instructions.both(run, copy)
                self._copies[self._register(value)] = target
                targets.append(target)
        info = InstructionInfo(Role.COMPUTE, tuple(inputs), tuple(targets), function=function)
        self._emit(run, info)

    def _body(self, function: Function) -> Body | None:
        """The Python that a call of a function runs; None if this rank has none."""
        if function.kind is FunctionKind.BUILTIN:
            return builtins.implementation(function)
        body = self._bodies.get(function.body_name)
        return body.run if isinstance(body, GraphBody) else body

    def _adapted(self, body: Body, function: Function) -> Body:
        """The body that a call runs; the results of an opaque one are checked."""
        return checked(body, function) if function.kind is FunctionKind.OPAQUE else body

    def _seeded(self, body: Body, key: int) -> Body:
        """A body that draws random numbers, with the generator seeded for each call."""
        return seeded(body, self._seed, key, self._execution)

    # -- communication ----------------------------------------------------------------------

    def _channel(self, op: Send | Recv | Collective) -> tuple[Channel, Communicator]:
        channel = None if op.chan is None else self._module.channels.get(op.chan)
        if channel is None:
            self._fail(op, f"the module declares no channel {op.chan}")
        communicator = self._communicators.get(channel.id)
        if communicator is None:
            self._fail(op, f"no communicator serves channel {channel.id}")
        return channel, communicator

    def _bind_send(self, op: Send) -> None:
        channel, communicator = self._channel(op)
        type_ = op.operands[0].type
        assert not isinstance(type_, FutureType)
        port = communicator.send_port(op, channel, type_)
        if self._may_change(op.operands[0]) and isinstance(port, CopyingPort):
            port.copy_on_start()
        self._issue(op, port)

    def _may_change(self, value: Value) -> bool:
        """True if a method may change a value while it waits to be sent."""
        return value in self._layout.handled

    def _bind_recv(self, op: Recv) -> None:
        channel, communicator = self._channel(op)
        self._issue(op, communicator.recv_port(op, channel, _promised(op.result)))

    def _bind_collective(self, op: Collective) -> None:
        channel, communicator = self._channel(op)
        operand = op.operands[0].type if op.operands else None
        assert not isinstance(operand, FutureType)
        port = communicator.collective_port(op, channel, operand, _promised(op.result))
        self._issue(op, port)

    def _bind_copy_start(self, op: CopyStart) -> None:
        self._issue(op, HostCopyPort(op.is_to_host))

    def _issue(self, op: Op, port: Port) -> None:
        self._ports[op.result] = port
        self._indices[op.result] = self._at
        sources, registers = tuple(map(self._register, op.operands)), self._code.registers
        info = InstructionInfo(Role.ISSUE, sources, port=port)
        self._emit(instructions.issue_all(port, registers, sources), info)

    def _bind_wait(self, op: Wait) -> None:
        future = op.operands[0]
        if self._layout.first_waits.get(future) is not op:
            return  # The value is in its register already: streams are one on a host.
        port, awaited = self._ports[future], self._indices[future]
        if isinstance(_promised(future), UnitType):
            self._emit(port.poll, InstructionInfo(Role.AWAIT, port=port), awaited)
        else:
            target = self._register(op.result)
            info = InstructionInfo(Role.AWAIT, (), (target,), port)
            self._emit(instructions.wait(port, self._code.registers, target), info, awaited)

    def _bind_free(self, op: Free) -> None:
        register = self._layout.clears.get(self._at)
        if register is not None:
            self._emit(instructions.clear(self._code.registers, register), CLEAR)
        for future in self._layout.releases.get(self._at, ()):
            self._release(future)

    def _release(self, future: Value) -> None:
        port = self._ports.pop(future)
        if isinstance(_promised(future), UnitType):
            return
        if not self._is_releasing(port) or port.needs_release:
            self._emit(instructions.release(port), KEEP)

    def _is_releasing(self, port: Port) -> TypeGuard[ReleasingPort]:
        """True for a `ReleasingPort`; remembered for each class, since `isinstance` takes long."""
        if (kind := type(port)) not in self._releasing:
            self._releasing[kind] = isinstance(port, ReleasingPort)
        return self._releasing[kind]

    def _bind_return(self, op: Return) -> None:
        self._code.outputs = tuple(map(self._output, op.operands))

    def _output(self, value: Value) -> int:
        """The register of a value that the caller gets.

        If several executions may be in flight, it holds a copy of what a method of this rank has
        returned, because its actor may change that in another execution. Values from other ranks
        are copies anyway.
        """
        source = self._register(value)
        if self._tickets is None or value not in self._layout.from_opaque:
            return source
        if source in self._copies:
            return self._copies[source]  # made at once, before anybody could change the value
        target, copy = self._copied(value)
        self._emit(copy, InstructionInfo(Role.COMPUTE, (source,), (target,)))
        return target

    def _copied(self, value: Value) -> tuple[int, Instruction]:
        """A new register for a copy of a value, and what makes it."""
        source, target = self._register(value), len(self._code.template)
        self._code.registers.append(None)
        self._code.template.append(None)
        return target, instructions.apply(self._code.registers, source, target, _duplicate(value))

    def _finish(self) -> None:
        """Await the ops that no `wait` awaits, and release the ports that no `free` releases."""
        for future, port in self._ports.items():
            if future not in self._layout.first_waits:
                self._emit(port.poll, InstructionInfo(Role.AWAIT, port=port), self._indices[future])
        for future in tuple(self._ports):
            self._release(future)


# Methods of the instance, so that the binder of a device can bind some ops in its own way.
_BINDERS: dict[type[Op], Callable[[Binder, Any], None]] = {
    Constant: lambda binder, op: binder._bind_constant(op),
    View: lambda binder, op: binder._bind_view(op),
    Copy: lambda binder, op: binder._bind_copy(op),
    CopyStart: lambda binder, op: binder._bind_copy_start(op),
    Slice: lambda binder, op: binder._bind_slice(op),
    Reserve: lambda binder, op: binder._bind_reserve(op),
    Assemble: lambda binder, op: binder._bind_assemble(op),
    Call: lambda binder, op: binder._bind_call(op),
    Send: lambda binder, op: binder._bind_send(op),
    Recv: lambda binder, op: binder._bind_recv(op),
    Wait: lambda binder, op: binder._bind_wait(op),
    Free: lambda binder, op: binder._bind_free(op),
    Return: lambda binder, op: binder._bind_return(op),
}


def _duplicate(value: Value) -> Callable[[Any], Any]:
    """The function that copies a value."""
    return torch.clone if isinstance(value.type, TensorType) else duplicate_object


def _promised(future: Value) -> ValueType:
    assert isinstance(future.type, FutureType)
    return future.type.value
