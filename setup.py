"""Builds the C core as a cffi extension; everything else is in pyproject.toml.

`ds4._core` is what users get. DS4_BUILD_TEST=1 adds `ds4._core_test`: the same sources with -DDS4_TEST
(failure injection, NaN poisoning, toy streams); DS4_BUILD_TEST=only builds nothing else.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
os.chdir(ROOT)  # so that building works from any directory
HEADERS = [str(p) for p in sorted(Path("csrc").rglob("*.h"))]
SOURCES = [str(p) for p in sorted(Path("csrc").rglob("*.c"))]

# After the user's CFLAGS. A result must not depend on what the compiler fuses; errno is not read after math functions.
FLAGS = ["-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-pthread"]

LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")  # the free-threaded build has no stable ABI
LIMITED_MACRO: list[tuple[str, str | None]] = [("Py_LIMITED_API", "0x030A0000")] if LIMITED else []


def extension(name: str, flags: list[str], macros: list[tuple[str, str | None]]) -> Extension:
    return Extension(
        name,
        sources=SOURCES,
        depends=[*HEADERS, "setup.py"],
        include_dirs=["csrc"],
        define_macros=[*LIMITED_MACRO, *macros],
        extra_compile_args=[*flags, *FLAGS],
        extra_link_args=["-pthread"],
        libraries=["m"],
        py_limited_api=LIMITED,
    )


def declarations(header: str) -> str:
    """The C declarations of `header` in the form that cffi reads: no comments, no preprocessor lines."""
    header = re.sub(r"/\*.*?\*/|//[^\n]*", " ", header, flags=re.S)
    header = re.sub(r"^\s*#\s*ifdef __cplusplus.*?#\s*endif[^\n]*$", "", header, flags=re.S | re.M)
    header = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$", "", header, flags=re.M)
    return header + '\nextern "Python" int ds4_py_progress(void *, uint64_t, uint64_t);\n'


def find_compiler() -> None:
    """Sets CC when the compiler that built this Python is not on this machine but another one is."""
    command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    found = next((c for c in (command[0], "cc", "gcc", "clang") if shutil.which(c)), None)
    if found is None or ("CC" in os.environ and found != command[0]):
        raise CompileError(
            f"ds4 needs a C compiler and {command[0]!r} was not found: "
            "install gcc or clang (Debian: apt-get install gcc libc6-dev), or set CC, then try again"
        )
    if found != command[0]:
        os.environ["CC"] = found
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        raise CompileError(
            f"ds4 needs the C headers of Python and {include / 'Python.h'} does not exist: "
            "install them (Debian: apt-get install python3-dev), then try again"
        )


class BuildCore(build_ext):
    """Compiles only what changed, on all CPUs, into a folder that every way of building shares."""

    def build_extensions(self) -> None:
        self.force = True  # link always; whether an object is stale is decided below, flags included
        super().build_extensions()

    def run(self) -> None:
        find_compiler()
        super().run()

    def build_extension(self, ext: Extension) -> None:
        from cffi import FFI
        from cffi.recompiler import make_c_source

        how = [self.compiler.compiler_so, ext.extra_compile_args, ext.define_macros, sys.version]
        digest = hashlib.sha256(repr(how).encode()).hexdigest()[:12]
        self.build_temp = str(Path("build", "core", f"{ext.name}-{digest}"))
        glue = Path(self.build_temp, ext.name.replace(".", "_") + ".c")
        glue.parent.mkdir(parents=True, exist_ok=True)
        ffi = FFI()
        ffi.cdef(declarations(Path("csrc/ds4.h").read_text(encoding="utf-8")))
        make_c_source(ffi, ext.name, '#include "ds4.h"', str(glue))  # leaves the file alone when nothing changed

        compile_all = self.compiler.compile
        self.compiler.compile = lambda sources, **options: self._compile(compile_all, sources, options)
        try:
            ext.sources = [*SOURCES, str(glue)]
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_all

    def _compile(self, compile_all: Callable[..., Any], sources: list[str], options: dict[str, Any]) -> list[str]:
        newest = max(os.path.getmtime(p) for p in options["depends"])

        def one(source: str) -> str:
            (path,) = self.compiler.object_filenames([source], output_dir=options["output_dir"])
            if not os.path.exists(path) or os.path.getmtime(path) < max(newest, os.path.getmtime(source)):
                compile_all([source], **options)
            return str(path)

        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(one, sources))


test_build = os.environ.get("DS4_BUILD_TEST", "")
extensions = [] if test_build == "only" else [extension("ds4._core", ["-O3"], [])]
if test_build in ("1", "only"):
    extensions.append(extension("ds4._core_test", ["-O2"], [("DS4_TEST", None)]))

setup(
    # models/*.toml are installed inside the package; a checkout is read in place (see ds4/models.py)
    packages=[*find_packages(include=["ds4", "ds4.*"]), "ds4._models"],
    package_dir={"ds4._models": "models"},
    package_data={"ds4": ["py.typed"], "ds4._models": ["*.toml"]},
    include_package_data=False,
    ext_modules=extensions,
    cmdclass={"build_ext": BuildCore},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if LIMITED else {},
)
