"""Files that are written whole, as readable as the process's umask lets them be, and beside other threads."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from paceline import PacelineError
from paceline.files import check_directory, check_place, write_whole

GUARANTEES = (
    "Files that are written beside other threads leave the umask "
    "alone, and a reader sees a whole file or none.",
)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_file_is_as_readable_as_the_umask_allows(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        written = write_whole(tmp_path / "file", "content")
    finally:
        os.umask(before)
    assert stat.S_IMODE(written.stat().st_mode) == 0o666 & ~mask


def test_the_umask_is_never_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The umask is the whole process's: a file that another thread makes meanwhile must not be open to all."""

    def refuse(mask: int) -> int:
        raise AssertionError("the umask was touched")

    monkeypatch.setattr(os, "umask", refuse)
    write_whole(tmp_path / "file", "content")


def test_threads_that_write_the_same_file_leave_one_of_theirs_whole(tmp_path: Path) -> None:
    contents = [str(number) * 10_000 for number in range(8)]
    threads = [threading.Thread(target=write_whole, args=(tmp_path / "file", each)) for each in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_text() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("place", ["/", "", ".", "..", "no/such/file", "x" * 300, "file/below"])
def test_places_that_cannot_be_written(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("as it was")
    with pytest.raises(PacelineError, match="cannot write"):
        write_whole(place, "content")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "as it was"}
    with pytest.raises(PacelineError, match="cannot write"):
        check_place(place)


def test_folders_above_a_directory_may_be_made(tmp_path: Path) -> None:
    check_directory(tmp_path / "no" / "such")


def test_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("before")
    link.symlink_to(file)
    write_whole(link, "after")
    assert link.is_symlink()
    assert file.read_text() == "after"
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    write_whole(tmp_path / "dangling", "made")
    assert (tmp_path / "new").read_text() == "made"


def test_pipe_stays_and_its_reader_gets_the_content(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_place(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "content")
    assert os.read(reader, 100) == b"content"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_device_stays_and_is_written_to() -> None:
    reader, device = os.openpty()
    place = Path(os.ttyname(device))
    check_place(place)
    write_whole(place, "content")
    assert os.read(reader, 100) == b"content"
    assert stat.S_ISCHR(place.stat().st_mode)
    os.close(reader)
    os.close(device)


def test_standard_output_that_is_a_file_stays_the_same_file(tmp_path: Path) -> None:
    code = "from paceline.files import write_whole; write_whole('/dev/stdout', 'content')"
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
        assert os.fstat(out.fileno()).st_ino == (tmp_path / "out").stat().st_ino
    assert (tmp_path / "out").read_text() == "content"


def test_link_into_a_folder_that_does_not_exist_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "none" / "file")
    with pytest.raises(PacelineError, match=r"none/file: the folder .*none does not exist; choose"):
        check_place(tmp_path / "link")
