"""Files of the cache: torn, changed, written at once, too many."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cg.launch.cache.entry_store import EntryStore

from ..sampling import examples

TEXT = '{"nodes": [["placeholder", "x"]]}\n' * 20


def only_file(folder: Path) -> Path:
    (file,) = folder.glob("*/*.entry")
    return file


def test_what_was_written_is_read(tmp_path: Path) -> None:
    store = EntryStore(tmp_path / "made" / "by it")
    assert list(store.read("traces", "key", 3)) == []
    assert store.is_empty("traces")
    store.write("traces", "key", TEXT, 3)
    assert list(store.read("traces", "key", 3)) == [TEXT]
    assert list(store.read("traces", "another key", 3)) == []
    assert list(store.read("programs", "key", 3)) == []
    assert store.is_empty("programs")
    assert not store.is_empty("traces")


def test_the_youngest_texts_are_kept_and_come_first(tmp_path: Path) -> None:
    store = EntryStore(tmp_path)
    for number in range(4):
        store.write("traces", "key", str(number), 3)
        newest = max(tmp_path.glob("*/*.entry"), key=lambda file: file.stat().st_mtime_ns)
        os.utime(newest, (number, number))
    assert list(store.read("traces", "key", 2)) == ["3", "2"]
    assert len(list(tmp_path.glob("*/*.entry"))) == 3


@examples(1000)
@given(data=st.data())
def test_a_torn_or_changed_file_is_a_miss(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = EntryStore(folder)
    store.write("traces", "key", TEXT, 1)
    file = only_file(folder)
    content = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[at:]
    else:
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    assert list(store.read("traces", "key", 1)) == []
    assert not file.exists()
    store.write("traces", "key", TEXT, 1)
    assert list(store.read("traces", "key", 1)) == [TEXT]


def test_the_oldest_files_go_where_there_are_too_many_bytes(tmp_path: Path) -> None:
    store = EntryStore(tmp_path, limit=3 * 1100)
    for number in range(5):
        store.write("traces", f"key {number}", f"{number}" * 1000, 1)
        for file in tmp_path.glob("*/*.entry"):
            if file.read_bytes().endswith(str(number).encode()):
                os.utime(file, (number, number))
    list(store.read("traces", "key 0", 1))  # a use makes it young
    store.make_room()
    there = [bool(list(store.read("traces", f"key {number}", 1))) for number in range(5)]
    assert there == [True, False, False, True, True]


def test_what_dead_processes_left_goes(tmp_path: Path) -> None:
    store = EntryStore(tmp_path)
    store.write("traces", "key", TEXT, 1)
    left, young = tmp_path / "traces" / ".a.partial", tmp_path / "traces" / ".b.partial"
    left.touch()
    young.touch()
    os.utime(left, (0, 0))
    store.make_room()
    assert (left.exists(), young.exists()) == (False, True)
    assert list(store.read("traces", "key", 1)) == [TEXT]


def test_several_write_and_read_at_once(tmp_path: Path) -> None:
    texts = {str(number) * 50_000 for number in range(4)}
    wrong: list[str] = []

    def work(text: str) -> None:
        store = EntryStore(tmp_path)
        for _ in range(10):
            store.write("traces", "key", text, 8)
            wrong.extend(set(store.read("traces", "key", 8)) - texts)

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert set(EntryStore(tmp_path).read("traces", "key", 8)) == texts


def test_a_folder_that_cannot_be_made_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        EntryStore(tmp_path / "file").write("traces", "key", TEXT, 1)
    assert list(EntryStore(tmp_path / "file").read("traces", "key", 1)) == []
