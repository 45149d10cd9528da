"""The programs of a scheduled module, of which those that are alike are kept once.

Ranks at like positions of meshes run the same ops, and differ in the names of values, in their
peers, groups and channels, and in the regions that slices take. `share` keeps one program of each
group of such ranks, the *representative*, and for each rank its variation. So passes that go
through the ops of ranks one by one go through representatives alone.

An *end* is a channel of a representative, and stands for the channels of the ranks of its group
that correspond. A channel joins the ends that stand for it at its ranks. Ends that are joined, also
by way of others, are one *junction*. A message of a junction is complete once all of its ends have
been posted; a message of ranks needs but some of these. So if the representatives come to their end
when they wait for each other at junctions, all ranks do, those of a group in step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

from ..disjoint_sets import DisjointSets
from ..ops import Op, Slice, Value
from ..ops.base import DerivedValue
from ..ops.clone import copy_op
from ..ops.module import Channel, Module, Program
from ..ops.names import Names
from .pattern import Pattern, RankVariation, end_of, move_to_end

ChannelAt: TypeAlias = tuple[int, int | None]
"""A rank, and a channel of its program."""


@dataclass(eq=False)
class RankGroup:
    """Ranks whose programs are alike, and the program of one of them.

    Attributes:
        pattern: the program of the first, as it was when it was compared.
        variations: those of all ranks, by rank, the first one's included.
    """

    pattern: Pattern
    variations: dict[int, RankVariation]

    def program_of(self, rank: int) -> Program:
        """A copy of the representative with the names, ends and regions of a rank."""
        variation = self.variations[rank]
        names = Names(variation.names)
        pairs = zip(self.pattern.values, variation.names, strict=True)
        here = {value: Value(name, value.type) for value, name in pairs}
        ends = dict(zip(self.pattern.ends, variation.ends, strict=True))
        regions = dict(zip(self.pattern.slices, variation.regions, strict=True))
        source = self.pattern.program
        ops: list[Op] = []
        for op in source.ops:
            for value in op.results:
                if value not in here:
                    here[value] = _derived(value, here, names)
            operands = tuple([here[value] for value in op.operands])
            copy = copy_op(op, operands, tuple([here[value] for value in op.results]))
            if (end := end_of(op)) is not None:
                move_to_end(copy, ends[end[0]])
            elif isinstance(op, Slice):
                assert isinstance(copy, Slice), "a copy is of the same class"
                copy.region = regions[op]
            ops.append(copy)
        return Program(source.name, [here[value] for value in source.params], ops, rank)


def _derived(value: Value, here: Mapping[Value, Value], names: Names) -> Value:
    """The value of a rank for one that a pass has derived from another of the representative."""
    assert isinstance(value, DerivedValue), "passes derive new values of shared programs"
    return names.derive(here[value.source], value.suffix, value.type)


class AlikePrograms(Sequence[Program]):
    """The programs of all ranks, by rank, of which those that are alike are kept once.

    A program that is asked for is a copy, which is kept, and may be changed. From then on nothing
    is shared any more: `representatives_of` makes all programs.

    Attributes:
        groups: the ranks whose programs are alike.
        ranks: all ranks.
        representatives: the programs that stand for those of all ranks.
        ends: for each rank and each of its channels, the rank and the channel of the representative
            that stand for it.
        junctions: for each rank of a representative and each of its channels, the number of the
            junction.
    """

    def __init__(self, groups: Sequence[RankGroup], channels: Mapping[int, Channel]) -> None:
        self.groups = groups
        self.representatives = [group.pattern.program for group in groups]
        self._home = {rank: group for group in groups for rank in group.variations}
        self.ranks = sorted(self._home)
        self._taken: dict[int, Program] = {}
        self.ends = self._ends()
        self.junctions = self._junctions(channels)

    @property
    def is_shared(self) -> bool:
        """True if no program has been asked for."""
        return not self._taken

    @property
    def op_count(self) -> int:
        """The number of ops of all programs."""
        return sum(len(self._known(rank).ops) for rank in self.ranks)

    def read(self) -> Iterator[Program]:
        """All programs, each of which is made when its turn comes, and not kept: to be read."""
        for rank in self.ranks:
            program = self._taken.get(rank)
            yield self._home[rank].program_of(rank) if program is None else program

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, index: int) -> Program: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Program]: ...
    def __getitem__(self, index: int | slice) -> Program | Sequence[Program]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        rank = self.ranks[index]
        program = self._taken.get(rank)
        if program is None:
            program = self._taken[rank] = self._home[rank].program_of(rank)
        return program

    def __iter__(self) -> Iterator[Program]:
        return (self[index] for index in range(len(self)))

    def _known(self, rank: int) -> Program:
        return self._taken.get(rank) or self._home[rank].pattern.program

    def _ends(self) -> dict[ChannelAt, ChannelAt]:
        return {
            (rank, its): (group.pattern.program.rank or 0, chan)
            for group in self.groups
            for rank, variation in group.variations.items()
            for chan, (its, _) in zip(group.pattern.ends, variation.ends, strict=True)
        }

    def _junctions(self, channels: Mapping[int, Channel]) -> dict[ChannelAt, int]:
        joined = DisjointSets[ChannelAt]()
        for id_, channel in channels.items():
            ends = [self.ends[rank, id_] for rank in channel.ranks if (rank, id_) in self.ends]
            for end in ends[1:]:
                joined.join(ends[0], end)
        numbers: dict[ChannelAt, int] = {}
        return {
            end: numbers.setdefault(joined.of(end), len(numbers))
            for end in dict.fromkeys(self.ends.values())
        }


def share(programs: Iterable[Program], channels: Mapping[int, Channel]) -> Sequence[Program]:
    """The programs of ranks, each in its own rank's; those that are alike are kept once.

    Args:
        programs: of ranks; each is asked for once, and let go if another one is alike.
        channels: those that the module declares.

    Returns:
        `AlikePrograms`, or a list if no two programs are alike.
    """
    likely: dict[tuple[int, int], list[RankGroup]] = {}
    order: list[int] = []
    for program in programs:
        rank = program.rank or 0
        order.append(rank)
        groups = likely.setdefault((len(program.params), len(program.ops)), [])
        for group in groups:
            variation = group.pattern.fit(program, channels)
            if variation is not None:
                group.variations[rank] = variation
                break
        else:
            pattern = Pattern(program)
            groups.append(RankGroup(pattern, {rank: pattern.variation}))
    all_groups = [group for groups in likely.values() for group in groups]
    if len(all_groups) < len(order):
        return AlikePrograms(all_groups, channels)
    by_rank = {group.pattern.program.rank or 0: group.pattern.program for group in all_groups}
    return [by_rank[rank] for rank in order]


def shared_programs(module: Module) -> AlikePrograms | None:
    """The programs of a scheduled module if they are kept once; None if each rank has its own."""
    programs = module.programs
    if not isinstance(programs, AlikePrograms):
        return None
    if programs.is_shared:
        return programs
    module.programs = list(programs)
    return None


def representatives_of(module: Module) -> Sequence[Program]:
    """The programs of a scheduled module that a pass goes through, and may change.

    A change of one of them is one of all programs that it stands for. So the pass decides by
    nothing that may differ there, and derives new values by `Names.derive`.
    """
    shared = shared_programs(module)
    return module.programs if shared is None else shared.representatives


def alike_programs_of(module: Module) -> AlikePrograms | None:
    """The programs of a scheduled module, shared to be read; None if no two are alike."""
    if (shared := shared_programs(module)) is not None:
        return shared
    programs = module.programs
    if len({program.rank for program in programs} - {None}) != len(programs):
        return None  # a rank has no program of its own
    programs = share(programs, module.channels)
    return programs if isinstance(programs, AlikePrograms) else None


def read_programs(module: Module) -> Iterable[Program]:
    """The programs of a module, to be read one after the other."""
    programs = module.programs
    return programs.read() if isinstance(programs, AlikePrograms) else programs


def programs_by_rank(module: Module) -> Iterable[Program]:
    """As `read_programs`, in the order of ranks."""
    programs = module.programs
    if isinstance(programs, AlikePrograms):
        return programs.read()
    return sorted(programs, key=lambda program: program.rank or 0)


def count_ops(module: Module) -> int:
    """The number of ops of all programs."""
    programs = module.programs
    if isinstance(programs, AlikePrograms):
        return programs.op_count
    return sum(len(program.ops) for program in programs)
