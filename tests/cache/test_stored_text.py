"""The text of traces: what comes back, and what is no such text."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

from cg.tracer.method import stored_traces
from cg.tracer.method.stored.function_names import function_named, name_of, operator_named
from cg.tracer.method.stored.graph_text import constant_json
from cg.tracer.method.stored.plain_text import Damaged, NotStorable, decoded, encoded

from .edited import MemoryStore, Version, traced, trained

VALUES: list[Any] = [
    *(None, True, 1, -(10**30), 1.5, float("-inf"), -0.0, 2j, "text", b"\x00\xff", Ellipsis),
    *(range(1, 9, 2), slice(None, 3, -1), (1, (2.0, [False])), [], {"a": (1,), 2: None}),
    *(torch.float16, torch.device("cuda:1"), torch.strided, torch.channels_last),
    *(torch.Size([2, 3]), signal.Signals.SIGINT),
    pytree.tree_structure({"a": [1, (2, 3)], "b": None}),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_data_come_back(value: Any) -> None:
    back = decoded(json.loads(json.dumps(encoded(value))))
    assert type(back) is type(value)
    assert repr(back) == repr(value)


@pytest.mark.parametrize("value", [object(), {1}, lambda: 0, nn.Identity(), int])
def test_what_is_no_plain_data_has_no_text(value: Any) -> None:
    with pytest.raises(NotStorable, match="has no text"):
        encoded(value)


@pytest.mark.parametrize("lazy", [torch.tensor(1j).conj(), torch.tensor([1j]).conj().imag])
def test_constants_that_are_conjugated_or_negated_lazily_have_no_text(lazy: torch.Tensor) -> None:
    with pytest.raises(NotStorable, match="plain tensor"):
        constant_json(lazy)


@pytest.mark.parametrize(
    "function",
    [
        *(torch.add, torch.Tensor.add, torch.Tensor.__pow__, torch.Tensor.__rsub__, torch.einsum),
        *(nn.functional.linear, nn.functional.gelu, nn.functional.scaled_dot_product_attention),
        *(torch.Tensor.shape.__get__, torch.Tensor.T.__get__, torch.ops.aten.add.Tensor),
        *(torch.Tensor.split, torch.special.expit, torch.linalg.norm, torch._C._set_grad_enabled),
        torch.Tensor.__getitem__,
    ],
)
def test_functions_of_torch_are_found_by_their_names(function: Any) -> None:
    assert function_named(name_of(function)) == function


@pytest.mark.parametrize("function", [print, json.dumps, lambda x: x, torch.ops.aten.add])
def test_other_functions_have_no_name(function: Any) -> None:
    with pytest.raises(NotStorable):
        name_of(function)


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "torch:os.system",
        "torch",
        "torch:",
        "torch:Tensor.add.__get__",
        "torch.x:y",
        "",
    ],
)
def test_names_that_are_not_of_torchs_functions_are_damaged(name: str) -> None:
    if name == "torch:os.system":
        assert function_named(name) is not None, "it is compared with functions, and never called"
        return
    with pytest.raises(Damaged):
        function_named(name)


@pytest.mark.parametrize(
    "name", ["torch.ops.user.f.default", "torch.ops.aten.no.default", "aten.x"]
)
def test_operators_of_others_are_damaged(name: str) -> None:
    with pytest.raises(Damaged):
        operator_named(name)


@pytest.mark.parametrize(
    "content",
    [
        *("text", None, [], ["unknown", 1], ["dtype", "os"], ["enum", "os", "path", "sep"], 1),
        *(["device", "nowhere"], ["tree", ["os", "path", 0]], ["return max"], ["return os", 1]),
        ["size", "a"],
    ],
    ids=repr,
)
def test_json_that_is_no_value_is_damaged(content: Any) -> None:
    with pytest.raises(Damaged):
        decoded(content)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MemoryStore, str]:
    folder, store = tmp_path_factory.mktemp("damaged"), MemoryStore()
    return folder, store, traced(Version(), folder, store)


def without(key: str) -> Callable[[Any], None]:
    return lambda content: content.pop(key)


def with_node(**changed: Any) -> Callable[[Any], None]:
    """Gives the first operator of a graph another kind, name or target."""
    fields = ("op", "name", "target", "arguments")

    def change(content: Any) -> None:
        node = next(row for row in content["graph"]["nodes"] if row[0] == "call_function")
        for name, value in changed.items():
            node[fields.index(name)] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(
            without("graph"),
            without("log"),
            without("results"),
            without("graded"),
            without("nodes"),
        ),
        *(with_node(op="call_module"), with_node(op="call_method"), with_node(name="i_1")),
        with_node(target="torch.ops.user.delete.default"),
        *(with_node(target="os.system"), with_node(arguments=[10**6])),
        lambda content: content["log"]["functions"].__setitem__(0, "os:system"),
        lambda content: content["graph"]["nodes"][0].__setitem__(2, "x; import os"),
        lambda content: content["log"]["entries"].pop(),
        lambda content: content["log"]["tensors"].pop(),
    ],
)
def test_a_text_of_another_form_is_a_miss(
    change: Callable[[Any], None], kept: tuple[Path, MemoryStore, str]
) -> None:
    """Whoever wrote it: the trace is made anew, and nothing is called by its name."""
    folder, store, fresh = kept
    changed = MemoryStore()
    for key, (text, *_) in store.texts.items():
        parts = list(map(json.loads, text.split("\n")))
        if parts[0]["log"] is None:
            continue  # of a torch function, which is not compared
        content = {**parts[0], **parts[1]}
        change(content)
        compared = {name: value for name, value in content.items() if name in parts[0]}
        graph = {name: value for name, value in content.items() if name in parts[1]}
        changed.texts[key] = ["\n".join(map(json.dumps, (compared, graph, parts[2])))]
    damaged = len(changed.texts)
    assert traced(Version(), folder, changed) == fresh
    assert len(changed.reasons) >= damaged > 0


def changed_sources(text: str, change: Callable[[Any], None]) -> str:
    """The text of a trace with another source of each body."""
    *others, pieces = text.split("\n")
    content = json.loads(pieces)
    parts = [part for _, sections in content["sections"] for part in sections["parts"]]
    for part in filter(None, (content["forward"], *parts)):
        for source in part["sources"].values():
            change(source)
    return "\n".join((*others, json.dumps(content)))


def calling(expression: str) -> Callable[[Any], None]:
    """Lets a source evaluate something before it computes."""

    def change(source: Any) -> None:
        head, _, rest = source["text"].partition("\n")
        source["text"] = f"{head}\n    {expression}\n{rest}"

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(calling("open('ran', 'w')"), calling("import os; os.mkdir('ran')")),
        *(calling("__builtins__.open('ran', 'w')"), calling("G0.__globals__['open']('ran', 'w')")),
        calling("(lambda: open('ran', 'w'))()"),
        *(lambda source: source.pop("globals"), lambda source: source.__setitem__("text", "def")),
        lambda source: source["globals"].append(
            ["open", ["operator", "torch.ops.os.open.default"]]
        ),
    ],
)
def test_a_source_that_reaches_anything_else_is_written_anew(
    change: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wrote it: bodies call operators of torch, and nothing by the names of Python."""
    monkeypatch.chdir(tmp_path)
    store = MemoryStore()
    expected = trained(Version(), tmp_path, store)
    assert any('"text"' in text for texts in store.texts.values() for text in texts)
    for key, (text, *_) in store.texts.items():
        store.texts[key] = [changed_sources(text, change)]
    assert trained(Version(), tmp_path, store) == expected
    assert not (tmp_path / "ran").exists()
    assert store.mended
    assert all(reason.startswith("the code of a body is damaged: ") for reason in store.mended)


def test_a_piece_of_another_form_is_cut_anew(tmp_path: Path) -> None:
    store = MemoryStore()
    expected = trained(Version(), tmp_path, store)
    assert not store.mended
    for key, (text, *_) in store.texts.items():
        *others, pieces = text.split("\n")
        content = json.loads(pieces)
        for piece in (part for _, sections in content["sections"] for part in sections["parts"]):
            piece["reads"] = ["x"]
        store.texts[key] = ["\n".join((*others, json.dumps(content)))]
    assert trained(Version(), tmp_path, store) == expected
    assert any(reason.startswith("a piece is damaged: ") for reason in store.mended)


def test_a_second_start_reads_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    first = trained(Version(), tmp_path, store)
    monkeypatch.setattr(stored_traces, "_read_nodes", pytest.fail)
    assert trained(Version(), tmp_path, store) == first


def test_a_torch_function_has_its_code_where_no_rank_runs_it(tmp_path: Path) -> None:
    """Ranks keep one text of it, which those that run it read as well."""
    store = MemoryStore()
    traced(Version(), tmp_path, store)
    parts = [text.split("\n") for texts in store.texts.values() for text in texts]
    pieces = [json.loads(part[2]) for part in parts if json.loads(part[0])["log"] is None]
    assert pieces
    for content in pieces:
        sections = [piece for _, section in content["sections"] for piece in section["parts"]]
        for piece in filter(None, [content["forward"], *sections]):
            assert list(piece["sources"]) == ["plain"]
