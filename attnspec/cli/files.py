"""Files that commands write: whole or not at all, and never over what is not theirs."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path


def write_result(
    path: str,
    content: str | bytes,
    *,
    force: bool,
    is_ours: Callable[[bytes], bool] = lambda data: False,
) -> None:
    """Write a new file, or over one that holds the same content, that a command wrote or that
    `force` gives up.

    Raises OSError.
    """
    target = Path(path)
    if target.is_symlink() and not target.exists() and not force:
        words = "is a link to a file that is not there (--force writes it)"
        raise FileExistsError(errno.EEXIST, words, path)
    if target.is_file() and not force:
        before = target.read_bytes()
        if before == _bytes(content):
            return
        if not is_ours(before):
            words = "has other content already (--force overwrites it)"
            raise FileExistsError(errno.EEXIST, words, path)
    replace_file(target, content)


def require_folder(path: str) -> None:
    """Raises OSError where there is no folder for a new file."""
    folder = Path(path).parent
    if not folder.is_dir():
        number = errno.ENOTDIR if folder.exists() else errno.ENOENT
        raise OSError(number, os.strerror(number), path)


def replace_file(path: Path, content: str | bytes) -> None:
    """Put a text, or bytes, in place in one step: whoever looks sees the old file or the new one.

    Links are followed, permissions stay, devices and pipes are written to. Raises OSError that
    names `path`; the old file is then as it was, and nothing else is left.
    """
    data = _bytes(content)
    try:
        mode = path.stat().st_mode if path.exists() else None
        if mode is not None and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            path.write_bytes(data)
            return
        target = path.resolve()
        if mode is not None:
            # a directory is refused here, and a file that may not be written
            os.close(os.open(target, os.O_WRONLY))
        _move_in(target, data, mode)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def _bytes(content: str | bytes) -> bytes:
    return content.encode("utf-8") if isinstance(content, str) else content


def _move_in(target: Path, data: bytes, mode: int | None) -> None:
    beside = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(beside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            beside.chmod(stat.S_IMODE(mode))
            before, after = target.stat(), beside.stat()
            # Python takes a cached compilation for current by size and whole seconds
            if before.st_size == after.st_size and int(after.st_mtime) <= int(before.st_mtime):
                os.utime(beside, (after.st_atime, int(before.st_mtime) + 1))
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
