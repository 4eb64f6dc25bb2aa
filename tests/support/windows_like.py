"""Runs commands of moesim as if on Windows: ``windows_like.py COMMANDS.json``.

To our modules, `os`, `signal`, `mmap` and `time` have only the names that Windows has,
modules of POSIX cannot be imported, an open file can be neither renamed nor removed,
and a text file that is opened without an encoding is an error (Windows would take its
own). Libraries see the real system: they have versions for Windows of their own.

Source: the availability notes of Python 3.11's library reference.
"""

import builtins
import json
import os
import sys
import types
import warnings
from contextlib import suppress
from pathlib import Path

POSIX_MODULES = {
    "crypt", "curses", "fcntl", "grp", "nis", "ossaudiodev", "posix", "pty", "pwd",
    "readline", "resource", "spwd", "syslog", "termios", "tty",
}  # fmt: skip

WINDOWS_NAMES = {
    "os": """
        DirEntry F_OK O_APPEND O_CREAT O_EXCL O_RDONLY O_RDWR O_TRUNC O_WRONLY
        P_DETACH P_NOWAIT P_NOWAITO P_OVERLAY P_WAIT PathLike R_OK SEEK_CUR SEEK_END
        SEEK_SET W_OK X_OK _exit abc abort access altsep chdir chmod close closerange
        cpu_count curdir defpath device_encoding devnull dup dup2 environ error execl
        execle execlp execlpe execv execve execvp execvpe extsep fdopen fsdecode
        fsencode fspath fstat fsync ftruncate get_exec_path get_handle_inheritable
        get_inheritable get_terminal_size getcwd getcwdb getenv getlogin getpid getppid
        isatty kill linesep link listdir lseek lstat makedirs mkdir name open pardir
        path pathsep pipe popen putenv read readlink remove removedirs rename renames
        replace rmdir scandir sep set_inheritable spawnl spawnle spawnv spawnve stat
        stat_result strerror supports_bytes_environ supports_dir_fd
        supports_effective_ids supports_fd supports_follow_symlinks symlink system
        terminal_size times times_result truncate umask unlink unsetenv urandom utime
        waitpid waitstatus_to_exitcode walk write
        """,
    "signal": """
        Handlers SIGABRT SIGFPE SIGILL SIGINT SIGSEGV SIGTERM SIG_DFL SIG_IGN Signals
        default_int_handler getsignal raise_signal set_wakeup_fd signal strsignal
        valid_signals
        """,
    "mmap": """
        ACCESS_COPY ACCESS_DEFAULT ACCESS_READ ACCESS_WRITE ALLOCATIONGRANULARITY
        PAGESIZE error mmap
        """,
    "time": """
        altzone asctime ctime daylight get_clock_info gmtime localtime mktime monotonic
        monotonic_ns perf_counter perf_counter_ns process_time process_time_ns sleep
        strftime strptime struct_time thread_time thread_time_ns time time_ns timezone
        tzname
        """,
}


def reduced(name):
    """The module of this name, with nothing but what Windows has."""
    full = __import__(name)
    copy = types.ModuleType(name)
    for attribute in WINDOWS_NAMES[name].split():
        if hasattr(full, attribute):
            setattr(copy, attribute, getattr(full, attribute))
    return copy


def is_open(path):
    """Whether this process has a file open, or mapped."""
    target = os.path.realpath(path)
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if str(descriptor.readlink()) == target:
                return True
    return target in Path("/proc/self/maps").read_text(encoding="utf-8")


def refusing_open_files(function):
    """`os.replace` and its like, which on Windows want closed files."""

    def wrapper(*paths, **options):
        for path in paths:
            if is_open(path):
                raise PermissionError(13, "the file is open in this process", str(path))
        return function(*paths, **options)

    return wrapper


def install():
    """Change what our modules see."""
    copies = {name: reduced(name) for name in WINDOWS_NAMES}
    for name in ("remove", "rename", "replace", "unlink"):
        setattr(copies["os"], name, refusing_open_files(getattr(os, name)))
    for name in ("rename", "replace", "unlink"):
        setattr(Path, name, refusing_open_files(getattr(Path, name)))
    real_import = builtins.__import__

    def windows_import(name, globals_=None, locals_=None, fromlist=(), level=0):
        importer = (globals_ or {}).get("__name__", "")
        if importer.partition(".")[0] == "moesim":
            if name in POSIX_MODULES:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in copies:
                return copies[name]
        return real_import(name, globals_, locals_, fromlist, level)

    builtins.__import__ = windows_import
    warnings.filterwarnings("error", category=EncodingWarning, module=r"moesim(\.|$)")


def main():
    """Run the commands of a file, one list of arguments each, until one fails."""
    install()
    from moesim.cli import main as cli

    commands = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for arguments in commands:
        sys.argv = ["moesim", *arguments]
        try:
            cli()
        except SystemExit as end:
            if end.code:
                sys.stderr.write(f"failed: {' '.join(arguments)}\n")
                sys.exit(end.code)
        sys.stdout.write(f"done: {' '.join(arguments)}\n")


if __name__ == "__main__":
    main()
