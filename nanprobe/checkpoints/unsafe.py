"""Names in a pickle that mean code execution, processes, imports or files when a trusting loader resolves them."""

from __future__ import annotations

__all__ = ["dangerous"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MODULES = _words(
    """os posix nt posixpath ntpath subprocess sys shutil socket pty importlib imp runpy ctypes _ctypes code codeop pdb
    bdb timeit cProfile profile webbrowser multiprocessing pickle _pickle dill cloudpickle joblib marshal tempfile pip
    asyncio signal threading _thread http urllib ftplib smtplib telnetlib xmlrpc requests httpx aiohttp commands popen2
    platform pkgutil zipimport distutils setuptools venv ensurepip idlelib lib2to3 doctest trace linecache gc inspect
    types functools operator builtins.__import__ fileinput glob pathlib io _io sqlite3 site sysconfig nturl2path
    ssl select selectors mmap resource faulthandler unittest"""
)
"""Top-level modules whose members run code, start processes, import or touch files."""

_HARMLESS = frozenset(
    {
        "types.SimpleNamespace",
        "functools.partial",
        "operator.getitem",
        "pathlib.Path",
        "pathlib.PosixPath",
        "pathlib.WindowsPath",
        "pathlib.PurePath",
        "pathlib.PurePosixPath",
        "pathlib.PureWindowsPath",
        "pathlib._local.Path",
        "pathlib._local.PosixPath",
        "pathlib._local.WindowsPath",
        "io.BytesIO",
        "_io.BytesIO",
        "signal.Signals",
    }
)
"""Members of those modules that training code stores and that do nothing when constructed."""

_BUILTINS = _words(
    """eval exec compile open input breakpoint __import__ globals locals vars setattr delattr memoryview help exit quit
    apply execfile file reload"""
)

_MEMBERS = _words(
    """system popen spawn spawnl spawnv execv execve exec eval fork Popen check_output check_call __import__
    import_module __globals__ __builtins__ __subclasses__ __reduce__ __reduce_ex__ __code__ __init_subclass__ __loader__
    run_path run_module load_module exec_module __getattribute__ __dict__"""
)
"""Attribute names that, reached through any module by a dotted name or getattr, amount to the same."""

_EXACT = frozenset(
    {
        "torch.load",
        "torch.hub.load",
        "torch.hub.load_state_dict_from_url",
        "torch.hub.download_url_to_file",
        "torch.serialization.load",
        "torch.jit.load",
        "torch.compile",
        "torch.ops.load_library",
        "torch.utils.cpp_extension.load",
        "torch.utils.cpp_extension.load_inline",
        "torch.utils._config_module.ConfigModule.load_config",
        "torch._dynamo.guards.GuardBuilder.get",
        "torch.fx.graph_module.reduce_graph_module",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression",
        "torch.distributed.rpc.rpc_sync",
        "numpy.load",
        "numpy.fromfile",
        "numpy.memmap",
        "numpy.core.memmap",
        "numpy.testing._private.utils.runstring",
        "pandas.read_pickle",
        "yaml.unsafe_load",
        "yaml.load",
        "logging.config.dictConfig",
    }
)


def dangerous(dotted: str) -> bool:
    """Return whether the name, as a pickle has it (module, a dot, and a possibly dotted name), is a dangerous one.

    A dotted name counts by any of its parts that is a dangerous module, so that ``torch.serialization.os.system`` is
    seen as well as ``os.system``.
    """
    if dotted in _HARMLESS:
        return False
    if dotted in _EXACT:
        return True
    parts = dotted.split(".")
    if parts[0] in ("builtins", "__builtin__"):
        return any(part in _BUILTINS or part in _MEMBERS for part in parts[1:])
    if parts[0] in _MODULES:
        return True
    if any(part in _MEMBERS for part in parts[1:]):
        return True
    return any(part in ("os", "posix", "nt", "subprocess", "sys", "importlib", "builtins") for part in parts[1:-1])
