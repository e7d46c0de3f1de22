"""The compiled loops as functions to call, ready in a few hundredths of a second.

The compiler (numba) takes half a second to import and to get going, as long as scanning two gigabytes. So its output
for this machine, LLVM assembly and machine code, is kept on disk, and later processes do not need the compiler. It is
kept beside this file, or in the user's cache where that is not writable; without either, it is made anew in
each process. Where nothing can be compiled, the caller does without.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import platform
import re
import tempfile
import threading
from pathlib import Path
from typing import Any

__all__ = ["Kernels", "load_kernels"]

_DECLARED = re.compile(r"^declare [^@\n]*@([\w.]+)\(", re.MULTILINE)
_NOTHING = ctypes.CFUNCTYPE(None)(lambda: None)
_lock = threading.Lock()


@dataclasses.dataclass(slots=True)
class _Module:
    """One kernel: the name of its function, its LLVM assembly, and its machine code in base64 ("" before linking)."""

    symbol: str
    assembly: str
    code: str = ""


_loaded: list[Kernels] = []


class Kernels:
    """Kernels by name: they take addresses and integers (see ``stored_kernels``) and release the interpreter's lock."""

    def __init__(self, engine: Any, symbols: dict[str, str]) -> None:
        self._engine = engine
        self._functions = {name: _function(engine.get_function_address(symbol)) for name, symbol in symbols.items()}

    def __contains__(self, name: str) -> bool:
        """Return whether this machine has the kernel."""
        return name in self._functions

    def __call__(self, name: str, *arguments: int) -> None:
        """Run a kernel."""
        self._functions[name](*[ctypes.c_int64(argument) for argument in arguments])


def _function(address: int) -> Any:
    if not address:
        raise RuntimeError("a compiled kernel has no address")
    # Addresses and integers are all 64 bits wide, and ctypes passes them alike.
    return ctypes.CFUNCTYPE(None)(address)


def load_kernels(*, compile_missing: bool = True) -> Kernels | None:
    """Return the kernels; None where this machine cannot have them.

    Where an earlier process left none they are compiled, which takes some seconds, unless ``compile_missing`` is false.
    """
    with _lock:
        if not _loaded:
            kernels = _load(compile_missing)
            if kernels is None:
                return None
            _loaded.append(kernels)
        return _loaded[0]


def _load(compile_missing: bool) -> Kernels | None:
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    try:
        import llvmlite.binding as llvm

        name = f"nanprobe-{_key(llvm)}.kernels"
        for folder in _folders():
            held = _read(folder / name)
            if held is not None:
                with contextlib.suppress(RuntimeError):
                    return _link(llvm, held)
        if not compile_missing:
            return None
        made = _compile(dict(llvm.get_host_cpu_features()))
        kernels = _link(llvm, made)
        _write(name, made)
        return kernels
    except (ImportError, OSError, RuntimeError):
        return None


def _key(llvm: Any) -> str:
    """Return a name for what the compiled code depends on: its source, the compiler's release, the processor."""
    source = Path(__file__).with_name("stored_kernels.py").read_bytes()
    release = getattr(__import__("llvmlite"), "__version__", "?")
    machine = f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()} {platform.system()}"
    return hashlib.sha256(source + f"{release} {machine}".encode()).hexdigest()[:24]


def _folders() -> list[Path]:
    folders = [Path(__file__).with_name("__pycache__")]
    with contextlib.suppress(RuntimeError):
        folders.append(Path.home() / ".cache" / "nanprobe")
    return folders


def _read(path: Path) -> dict[str, _Module] | None:
    try:
        digest, _, text = path.read_text("utf-8").partition("\n")
        if digest != _digest(text):
            return None
        return {name: _Module(**module) for name, module in json.loads(text).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _digest(text: str) -> str:
    """Return a checksum of what is kept: machine code that was cut short would end the process."""
    return hashlib.sha256(text.encode()).hexdigest()


def _write(name: str, modules: dict[str, _Module]) -> None:
    text = json.dumps({name: dataclasses.asdict(module) for name, module in modules.items()})
    for folder in _folders():
        temporary = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=folder, prefix=name)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(f"{_digest(text)}\n{text}")
            os.replace(temporary, folder / name)
        except OSError:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            continue
        return


def _compile(features: dict[str, bool]) -> dict[str, _Module]:
    from nanprobe.numerics.stored_kernels import compile_kernels

    return {name: _Module(*made) for name, made in compile_kernels(features).items()}


def _link(llvm: Any, modules: dict[str, _Module]) -> Kernels:
    """Turn the modules into machine code, or take that which they hold, and keep it there."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    machine = target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2, jit=True
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)

    def keep(module: Any, code: bytes) -> None:
        if module.name in modules:
            modules[module.name].code = base64.b64encode(code).decode("ascii")

    def find(module: Any) -> bytes | None:
        held = modules[module.name].code if module.name in modules else ""
        return base64.b64decode(held) if held else None

    engine.set_object_cache(keep, find)
    _fill_in(llvm, modules)
    for name, module in modules.items():
        parsed = llvm.parse_assembly(module.assembly)
        parsed.name = name
        engine.add_module(parsed)
    engine.finalize_object()
    return Kernels(engine, {name: module.symbol for name, module in modules.items()})


def _fill_in(llvm: Any, modules: dict[str, _Module]) -> None:
    """Give an address to what the modules name and this process lacks.

    The compiler wraps each kernel in code that would hand an exception to its own runtime. The kernels raise nothing,
    but with one name unresolved the linker leaves others unresolved too.
    """
    for module in modules.values():
        for name in _DECLARED.findall(module.assembly):
            if not name.startswith("llvm.") and llvm.address_of_symbol(name) is None:
                llvm.add_symbol(name, ctypes.cast(_NOTHING, ctypes.c_void_p).value)
