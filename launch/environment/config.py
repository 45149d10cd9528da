"""Environment variables: the one module that reads them, and the table that documents them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import foreign
from .detect import Launch, detect, is_typed
from .foreign import Foreign

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
"""The variables that the thread pools under torch and numpy read when they are loaded."""

MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""The variables by which glibc is told when to give memory back to the system."""


TORCH_VARIABLES = (
    *("TORCH", "PYTORCH", "ATEN_", "CUBLAS", "CUDNN", "CUDA_", "NVIDIA_TF32", "MKL_", "DNNL_"),
    *("ONEDNN_", "KINETO_", "ASCEND_"),
)
"""The beginnings of the names of variables that torch and its libraries read."""

_OF_THE_PROCESS = frozenset(
    {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "MKL_NUM_THREADS", "ASCEND_VISIBLE_DEVICES"}
)
"""Those that say where a process runs, and not what it computes."""


class ConfigError(ValueError):
    """An environment variable, or an option of the launcher, has a value that it does not take."""

    __module__ = "cg"  # the public name, which tracebacks show


@dataclass(frozen=True)
class Config:
    """The settings that the environment asks for; `VARIABLES` has the variable of each field."""

    ranks: int | None = None
    """Ranks of the virtual world; None: not said."""
    dump: Path | None = None
    """The folder to which passes write the program; None: they write nothing."""
    dump_passes: re.Pattern[str] | None = None
    """A pattern in the names of the passes that write; None: all that changed something."""
    dump_ranks: frozenset[int] | None = frozenset({0})
    """The ranks that write; None: all."""
    passes: str = ""
    """Passes to switch off, as in `-overlap,-cse`."""
    timeout: float | None = 300.0
    """Seconds after which waiting for another rank is an error; None: never."""
    seed: int = 0
    """Seed of the random numbers of traced steps."""
    thread_cap: bool = True
    """Hold each rank's thread pools to its share of the cores."""
    affinity: bool = True
    """Bind each rank to its share of the cores."""
    keep_memory: bool = True
    """Let each rank keep the host memory that it frees."""
    bind_devices: bool = True
    """Let each rank select the accelerator of its local rank."""
    device: str = "auto"
    """The home of actors: the host, or an accelerator of each rank's own."""
    nccl_nonblocking: bool = False
    """Let NCCL's calls return before they are done."""
    hccl_library: str | None = None
    """The file of HCCL; None: search for it."""
    rank_registry: Path | None = None
    """The folder of the rank registry (`job/rank_registry.py`); None: there is none."""
    restarts: int = 0
    """How often the launcher has started the job again."""
    cache: Path | None = None
    """The folder of the compile cache; None: there is none."""
    torch_variables: Mapping[str, str] = field(default_factory=dict)
    """The variables by which torch and its libraries choose what they do."""
    launch: Launch | None = None
    """The launch of this process by an MPI launcher; None: there was none."""
    foreign: Foreign | None = None
    """The launch of this process by a launcher without MPI; None: there was none."""
    preset_threads: frozenset[str] = frozenset()
    """Those of `THREAD_VARIABLES` that are set already."""
    preset_malloc: bool = False
    """True if one of `MALLOC_VARIABLES` is set, which then decides about the heap."""
    set_fields: frozenset[str] = field(default=frozenset(), compare=False)
    """The fields whose variables are set."""

    @property
    def given_timeout(self) -> float | None:
        """The timeout if the environment sets one; None if it is only the default."""
        return self.timeout if "timeout" in self.set_fields else None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Config:
        """Read `environ`. An empty variable counts as not set, but for those that say otherwise.

        Raises:
            ConfigError: a variable has a value that it does not take.
        """
        fields: dict[str, Any] = {"cache": _user_cache(environ)}
        for variable in VARIABLES:
            text = environ.get(variable.name, "").strip()
            if text or (variable.takes_blank and variable.name in environ):
                fields[variable.field] = variable.value(text)
        return cls(
            **fields,
            set_fields=frozenset(v.field for v in VARIABLES if environ.get(v.name, "").strip()),
            torch_variables={
                name: text
                for name, text in environ.items()
                if name.startswith(TORCH_VARIABLES) and name not in _OF_THE_PROCESS
            },
            launch=_launch(environ),
            foreign=foreign.detect(environ),
            preset_threads=frozenset(name for name in THREAD_VARIABLES if environ.get(name)),
            preset_malloc=any(environ.get(name) for name in MALLOC_VARIABLES),
        )


@dataclass(frozen=True)
class Setting:
    """One environment variable of ours."""

    name: str
    field: str
    takes: str
    default: str
    meaning: str
    parse: Callable[[str], object]
    takes_blank: bool = False
    """Whether an empty text is a value."""

    def value(self, text: str) -> object:
        """The field's value.

        Raises:
            ConfigError: the variable does not take `text`.
        """
        try:
            return self.parse(text)
        except (ValueError, re.error) as error:
            why = f" ({error})" if isinstance(error, re.error) else ""
            raise ConfigError(f"{self.name}={text!r}: it takes {self.takes}{why}") from error


def config() -> Config:
    """Read the settings that this process's environment asks for now.

    Raises:
        ConfigError: a variable has a value that it does not take.
    """
    return Config.from_environ(os.environ)


def ranks_asked() -> int | None:
    """Read `CG_RANKS` alone, which is cheap; None if it is not set.

    Raises:
        ConfigError: it has a value that it does not take.
    """
    text = os.environ.get(_RANKS.name, "").strip()
    return None if not text else int(str(_RANKS.value(text)))


def environment() -> dict[str, str]:
    """A copy of this process's environment, to start another process with."""
    return dict(os.environ)


def export(variables: Mapping[str, str]) -> None:
    """Set variables for libraries that this process has yet to load."""
    os.environ.update(variables)


@contextmanager
def exported(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables inside a `with` block, in which a library reads them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Names in `environ` that look like ours but are not: misspelt, most likely."""
    known = {variable.name for variable in VARIABLES}
    return sorted(name for name in environ if name.startswith("CG_") and name not in known)


def table() -> str:
    """All variables as a Markdown table."""
    rows = [("variable", "takes", "default", "meaning"), ("---",) * 4]
    rows += [(f"`{v.name}`", v.takes, v.default, v.meaning) for v in VARIABLES]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def parse_ranks(text: str) -> frozenset[int] | None:
    """`0,2-5` as a set of ranks; `all` as None.

    Raises:
        ValueError: `text` is neither.
    """
    if text == "all":
        return None
    return frozenset(_members(text))


def _members(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low = _whole(first)
        high = _whole(last) if dash else low
        if high < low:
            raise ValueError(part)
        yield from range(low, high + 1)


def _whole(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text.strip()):
        raise ValueError(text)
    return int(text)


def _positive(text: str) -> int:
    if (value := _whole(text)) < 1:
        raise ValueError(text)
    return value


def _seconds(text: str) -> float | None:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value or None


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _word(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9]*", text):
        raise ValueError(text)
    return text


def _folder(text: str) -> Path | None:
    return Path(text).expanduser() if text else None


def _user_cache(environ: Mapping[str, str]) -> Path | None:
    """The folder `cg` in the user's folder of caches; None where the user has no home."""
    caches = environ.get("XDG_CACHE_HOME", "")
    if caches:
        return Path(caches) / "cg"
    home = environ.get("HOME", "")
    return Path(home) / ".cache" / "cg" if home else None


def _switches(text: str) -> str:
    if not all(re.fullmatch(r"\s*[+-][a-z0-9][a-z0-9-]*\s*", item) for item in text.split(",")):
        raise ValueError(text)
    return text.replace(" ", "")


def _launch(environ: Mapping[str, str]) -> Launch | None:
    try:
        return detect(environ, is_typed(environ))
    except ValueError as error:
        raise ConfigError(str(error)) from error


_ON = "`0` or `1`"

_RANKS = Setting(
    "CG_RANKS",
    "ranks",
    "a whole number of at least 1",
    "1",
    "Ranks of the virtual world, where no MPI launcher has started the program: "
    "one process plays them all. It counts when the world is used first.",
    _positive,
)

VARIABLES = (
    _RANKS,
    Setting(
        "CG_DUMP",
        "dump",
        "a directory, which is made where it does not exist",
        "none",
        "Where every pass that changes something writes the program.",
        Path,
    ),
    Setting(
        "CG_DUMP_PASSES",
        "dump_passes",
        "a regular expression",
        "all",
        "Which passes write, by a search in their names.",
        re.compile,
    ),
    Setting(
        "CG_DUMP_RANKS",
        "dump_ranks",
        "ranks such as `0,2-5`, or `all`",
        "0",
        "Which ranks write.",
        parse_ranks,
    ),
    Setting(
        "CG_PASSES",
        "passes",
        "names of passes, each after a `+` or a `-`, with commas between them",
        "none",
        "Optimisations to switch off, as in `-overlap,-cse`; `+name` keeps one on.",
        _switches,
    ),
    Setting(
        "CG_TIMEOUT",
        "timeout",
        "a number of seconds, or 0 for no limit",
        "300",
        "How long a rank waits for another one before that is an error.",
        _seconds,
    ),
    Setting(
        "CG_SEED",
        "seed",
        "a whole number of at least 0",
        "0",
        "Seed of the random numbers that traced steps draw.",
        _whole,
    ),
    Setting(
        "CG_THREAD_CAP",
        "thread_cap",
        _ON,
        "1",
        "Whether a rank's thread pools are held to its share of the machine's cores.",
        _switch,
    ),
    Setting(
        "CG_AFFINITY",
        "affinity",
        _ON,
        "1",
        "Whether a rank is bound to its share of the machine's cores.",
        _switch,
    ),
    Setting(
        "CG_KEEP_MEMORY",
        "keep_memory",
        _ON,
        "1",
        "Whether a rank keeps the host memory that it frees, so that its next step takes it again "
        "without page faults. What glibc's own variables say comes first.",
        _switch,
    ),
    Setting(
        "CG_BIND_DEVICES",
        "bind_devices",
        _ON,
        "1",
        "Whether a rank selects the accelerator of its local rank.",
        _switch,
    ),
    Setting(
        "CG_DEVICE",
        "device",
        "`auto`, `cpu`, `fake`, or a kind of accelerator, such as `cuda`",
        "auto",
        "Where the actors of ranks that a launcher has started live: each rank on the accelerator "
        "of its local rank (or its own, where the launcher shows each rank others), or all on the "
        "CPU. `auto` takes accelerators where no two ranks would share one, and says if it does "
        "not. `fake` gives each rank a device in the memory of the host, which waits and refuses "
        "as GPUs may.",
        _word,
    ),
    Setting(
        "CG_RANK_REGISTRY",
        "rank_registry",
        "a directory",
        "none",
        "Where ranks have files while they are in the job. `cg.launch` sets it, to notice those "
        "that end in the middle of it with exit code 0, and to know the step in which a job ends.",
        Path,
    ),
    Setting(
        "CG_RESTARTS",
        "restarts",
        "a whole number of at least 0",
        "0",
        "How often the job has been started again. `cg.launch` sets it, and `cg.restarts()` "
        "returns it.",
        _whole,
    ),
    Setting(
        "CG_CACHE",
        "cache",
        "a directory, which is made where it does not exist; empty for no cache",
        "`cg` in `$XDG_CACHE_HOME` or `~/.cache`",
        "Where traces and programs are kept for the next start.",
        _folder,
        takes_blank=True,
    ),
    Setting(
        "CG_NCCL_NONBLOCKING",
        "nccl_nonblocking",
        _ON,
        "0",
        "Whether NCCL's calls return before they are done. Ranks that do not join then are an "
        "error, instead of the job's end, and messages can be broken off at any time; but NCCL "
        "starts a thread for each call.",
        _switch,
    ),
    Setting(
        "HCCL_SO_PATH",
        "hccl_library",
        "the path of a `libhccl.so`",
        "none",
        "The HCCL by which tensors travel between NPUs. Without it, it is looked for by name, then "
        "in CANN's usual folder.",
        str,
    ),
)
